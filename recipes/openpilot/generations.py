"""The files of each generation of driving models, with their inputs and heads.

Sources: the metadata of openpilot's releases, and selfdrive/modeld/modeld.py of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from recipes.openpilot.constants import DESIRE_LEN, FRAME_SHAPE, TEMPORAL_SKIP

FEATURE_LEN = 512

# Heads of one output in order, with their widths.
_SEEN = {
    **{"meta": 55, "desire_pred": 32, "pose": 12, "wide_from_device_euler": 6},
    **{"road_transform": 12, "lane_lines": 528, "lane_lines_prob": 8, "road_edges": 264},
}
_SEEN_2025 = {**_SEEN, "lead": 102, "lead_prob": 3, "hidden_state": FEATURE_LEN, "pad": 2}
_SEEN_2026 = {**_SEEN, "lead": 144, "lead_prob": 3, "hidden_state": FEATURE_LEN}
_HEADS_097 = {
    **{"plan": 4955, "lane_lines": 528, "lane_lines_prob": 8, "road_edges": 264, "lead": 102},
    **{"lead_prob": 3, "desire_state": 8, "meta": 48, "desire_pred": 32, "pose": 12},
    **{"wide_from_device_euler": 6, "sim_pose": 12, "road_transform": 12},
    **{"desired_curvature": 2, "hidden_state": FEATURE_LEN},
}


@dataclass(frozen=True)
class FileKind:
    """One file of a generation.

    Attributes:
        name: Name of the file, without `.onnx`.
        heads: Heads of its output in order: name to width.
        images: Names of its two image inputs; none for a policy.
        buffers: Its other inputs: name to shape.
        image_dtype: Dtype of the images.
        stateful: Whether its queues are inputs and outputs.
    """

    name: str
    heads: Mapping[str, int]
    images: tuple[str, ...] = ()
    buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    image_dtype: torch.dtype = torch.uint8
    stateful: bool = False

    @property
    def slices(self) -> dict[str, slice]:
        """Return the slice of each head in the output."""
        found, start = {}, 0
        for name, width in self.heads.items():
            found[name] = slice(start, start + width)
            start += width
        return found


_TRAFFIC = {"traffic_convention": (1, 2)}
_DRIVER = {"lateral_control_params": (1, 2), "prev_desired_curv": (1, 25, 1)}
_POLICY_INPUTS = {**_TRAFFIC, "features_buffer": (1, 25, FEATURE_LEN)}
_POLICY_2025 = {"plan": 4955, "desire_state": 8, "desired_curvature": 2, "pad": 3}
_PLANNED = {"plan": 990, "desire_state": 8, "pad": 2}
_SUPERCOMBO_2026 = {
    **{"features_buffer": (1, 24, FEATURE_LEN), "desire_pulse": (1, 25, 8)},
    **_TRAFFIC,
    **{"action_t": (1, 2)},
}

# By release, or by month where there was no release.
GENERATIONS: Mapping[str, tuple[FileKind, ...]] = MappingProxyType(
    {
        "0.9.7": (
            FileKind(
                "supercombo",
                _HEADS_097,
                ("input_imgs", "big_input_imgs"),
                {
                    **{"desire": (1, 100, 8), **_TRAFFIC, "lateral_control_params": (1, 2)},
                    **{"prev_desired_curv": (1, 100, 1), "features_buffer": (1, 99, FEATURE_LEN)},
                },
                torch.float32,
            ),
        ),
        "0.9.9": (
            FileKind(
                "driving_vision",
                _SEEN_2025,
                ("input_imgs", "big_input_imgs"),
                image_dtype=torch.float32,
            ),
            FileKind(
                "driving_policy",
                _POLICY_2025,
                buffers={"desire": (1, 25, 8), **_DRIVER, **_POLICY_INPUTS},
            ),
        ),
        "0.10.0": (
            FileKind("driving_vision", _SEEN_2025, ("img", "big_img")),
            FileKind(
                "driving_policy", _POLICY_2025, buffers={"desire": (1, 25, 8), **_POLICY_INPUTS}
            ),
        ),
        "0.10.3": (
            FileKind("driving_vision", _SEEN_2026, ("img", "big_img")),
            FileKind(
                "driving_policy", _PLANNED, buffers={"desire_pulse": (1, 25, 8), **_POLICY_INPUTS}
            ),
        ),
        "2026-07": (
            FileKind(
                "driving_supercombo",
                {**_SEEN_2026, **_PLANNED},
                ("img", "big_img"),
                _SUPERCOMBO_2026,
            ),
        ),
        "2026-09": (
            FileKind(
                "driving_supercombo",
                {**_SEEN_2026, **_PLANNED},
                ("img", "big_img"),
                _SUPERCOMBO_2026,
                stateful=True,
            ),
        ),
    }
)


def example_inputs(kind: FileKind, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return the inputs of a file by name, all zero, in the order of its graph.

    Args:
        kind: The file.
        dtype: Dtype of the inputs that are no images.
    """
    if kind.stateful:
        past = kind.buffers["features_buffer"][1]
        pulses = kind.buffers["desire_pulse"][1]
        return {
            "new_img": torch.zeros(2, *FRAME_SHAPE, dtype=torch.uint8),
            "desire": torch.zeros(DESIRE_LEN),
            "traffic_convention": torch.zeros(1, 2),
            "action_t": torch.zeros(1, 2),
            "state_img_q": torch.zeros(2, TEMPORAL_SKIP + 1, *FRAME_SHAPE, dtype=torch.uint8),
            "state_desire_q": torch.zeros(TEMPORAL_SKIP * pulses, 1, DESIRE_LEN),
            "state_feat_q": torch.zeros(TEMPORAL_SKIP * past, 1, FEATURE_LEN),
        }
    image = (1, 2 * FRAME_SHAPE[0], *FRAME_SHAPE[1:])
    image_dtype = kind.image_dtype if kind.image_dtype == torch.uint8 else dtype
    return {
        **{name: torch.zeros(image, dtype=image_dtype) for name in kind.images},
        **{name: torch.zeros(shape, dtype=dtype) for name, shape in kind.buffers.items()},
    }
