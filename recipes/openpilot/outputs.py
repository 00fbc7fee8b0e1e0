"""The meaning of a driving model's output: means, deviations, hypotheses, probabilities.

Source: commaai/openpilot, selfdrive/modeld/parse_model_outputs.py. All functions take any leading
dims (batch, time) and do not change their input; upstream's parser changes its own.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch

from recipes.openpilot.constants import (
    DESIRE_LEN,
    DESIRE_PRED_LEN,
    IDX_N,
    LEAD_T_IDXS,
    LEAD_WIDTH,
    NUM_LANE_LINES,
    NUM_LEADS,
    NUM_ROAD_EDGES,
    PLAN_WIDTH,
    POSE_WIDTH,
)
from tpuport.foundation.errors import CheckpointError, UsageError

# Above this, exp overflows float16. Upstream clamps there in every dtype.
MOST_EXPONENT = 11.0


@dataclass(frozen=True)
class Head:
    """The layout of a range of the output.

    Attributes:
        kind: "mdn" has means and logarithms of deviations, "binary" logits of a sigmoid,
            "categorical" logits of a softmax over the last dim, "raw" is not interpreted.
        shape: Shape of one mean, or of all logits.
        hypotheses: Number of hypotheses of an mdn. Several have weights.
        choices: Number of targets for which several hypotheses are weighed, each with its own
            weights. The target's shape is (choices, *shape) if there is more than one.
    """

    kind: Literal["mdn", "binary", "categorical", "raw"]
    shape: tuple[int, ...]
    hypotheses: int = 1
    choices: int = 0

    @property
    def width(self) -> int:
        """Return the number of elements of the head."""
        size = math.prod(self.shape)
        return size if self.kind != "mdn" else self.hypotheses * (2 * size + self.choices)


_LEAD = (len(LEAD_T_IDXS), LEAD_WIDTH)
# The layouts of each head in the generations, told apart by their widths.
_MDN: Mapping[str, tuple[Head, ...]] = MappingProxyType(
    {
        "plan": (
            Head("mdn", (IDX_N, PLAN_WIDTH)),
            Head("mdn", (IDX_N, PLAN_WIDTH), hypotheses=5, choices=1),
        ),
        "lead": (
            Head("mdn", (NUM_LEADS, *_LEAD)),
            Head("mdn", _LEAD, hypotheses=2, choices=NUM_LEADS),
        ),
        "lane_lines": (Head("mdn", (NUM_LANE_LINES, IDX_N, 2)),),
        "road_edges": (Head("mdn", (NUM_ROAD_EDGES, IDX_N, 2)),),
        "pose": (Head("mdn", (POSE_WIDTH,)),),
        "sim_pose": (Head("mdn", (POSE_WIDTH,)),),
        "road_transform": (Head("mdn", (POSE_WIDTH,)),),
        "wide_from_device_euler": (Head("mdn", (3,)),),
        "desired_curvature": (Head("mdn", (1,)),),
        "action": (Head("mdn", (2,)),),
    }
)
_CATEGORICAL = MappingProxyType(
    {"desire_state": (DESIRE_LEN,), "desire_pred": (DESIRE_PRED_LEN, DESIRE_LEN)}
)
_BINARY = ("lane_lines_prob", "lead_prob", "meta")


def head_of(name: str, width: int) -> Head:
    """Return the layout of a head of that name and width. An unknown name is "raw".

    Raises:
        CheckpointError: No generation has that width.
    """
    if name in _MDN:
        found = next((head for head in _MDN[name] if head.width == width), None)
        if found is None:
            widths = " or ".join(str(head.width) for head in _MDN[name])
            raise CheckpointError(
                f"the head {name!r} has {width} numbers: expected {widths}. What to do: its layout"
                " is one of a generation that recipes/openpilot/outputs.py does not have yet"
            )
        return found
    if name in _CATEGORICAL:
        if math.prod(_CATEGORICAL[name]) != width:
            raise CheckpointError(
                f"the head {name!r} has {width} numbers: expected {math.prod(_CATEGORICAL[name])}"
            )
        return Head("categorical", _CATEGORICAL[name])
    return Head("binary" if name in _BINARY else "raw", (width,))


@dataclass(frozen=True)
class Mdn:
    """The raw parts of an mdn, for losses.

    Attributes:
        mean: (..., hypotheses, *shape), without the dim of hypotheses if there is only one.
        log_std: Logarithm of the deviation, in the shape of the mean.
        logits: (..., hypotheses, choices), of the hypotheses' weights; None if there is only one.
    """

    mean: torch.Tensor
    log_std: torch.Tensor
    logits: torch.Tensor | None


Prediction = Mdn | torch.Tensor


def cut(outputs: torch.Tensor, slices: Mapping[str, slice]) -> dict[str, torch.Tensor]:
    """Return each head's range, (..., its width).

    Raises:
        UsageError: The output is narrower than the heads.
    """
    widest = max(part.stop for part in slices.values())
    if outputs.shape[-1] < widest:
        raise UsageError(
            f"outputs has {outputs.shape[-1]} numbers and its heads go up to {widest}: expected the"
            " output of the model that the slices are of"
        )
    return {name: outputs[..., part] for name, part in slices.items()}


def predictions(outputs: torch.Tensor, slices: Mapping[str, slice]) -> dict[str, Prediction]:
    """Return what losses need of each head: means and logarithms of deviations, or logits.

    Args:
        outputs: (..., all heads) of one model.
        slices: Slices of its contract.

    Returns:
        By name an `Mdn`, or logits in the head's shape.
    """
    found: dict[str, Prediction] = {}
    for name, raw in cut(outputs, slices).items():
        head = head_of(name, raw.shape[-1])
        if head.kind == "mdn":
            found[name] = _mdn(raw, head)
        else:
            found[name] = raw.reshape(*raw.shape[:-1], *head.shape)
    return found


def _mdn(raw: torch.Tensor, head: Head) -> Mdn:
    lead, size = raw.shape[:-1], math.prod(head.shape)
    shape = head.shape if head.hypotheses == 1 else (head.hypotheses, *head.shape)
    each = raw.reshape(*lead, head.hypotheses, -1)
    mean = each[..., :size].reshape(*lead, *shape)
    log_std = each[..., size : 2 * size].reshape(*lead, *shape)
    return Mdn(mean, log_std, each[..., 2 * size :] if head.hypotheses > 1 else None)


def std_of(log_std: torch.Tensor) -> torch.Tensor:
    """Return the deviation, clamped where float16 ends."""
    return log_std.clamp(max=MOST_EXPONENT).exp()


def probability(logits: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid with upstream's clamp, which keeps it above 1.6e-5."""
    return 1.0 / (1.0 + (-logits).clamp(max=MOST_EXPONENT).exp())


def parse(outputs: Any, slices: Mapping[str, slice]) -> dict[str, Any]:
    """Parse an output as openpilot does.

    Args:
        outputs: (..., all heads), a numpy array or a tensor, also a traced one.
        slices: Slices of the model's contract.

    Returns:
        For an mdn `name` and `name_stds`: those of the hypothesis with the most weight, (...,
        *shape), or (..., choices, *shape). With several hypotheses also `name_weights` (...,
        hypotheses, choices), `name_hypotheses` and `name_stds_hypotheses` (..., hypotheses,
        *shape), in falling order of weight if there is one choice. For other heads probabilities,
        or the raw values. Arrays for an array, tensors for a tensor.
    """
    if isinstance(outputs, np.ndarray):
        given = torch.from_numpy(np.array(outputs, np.float32))
        return {name: value.numpy() for name, value in parse(given, slices).items()}
    found: dict[str, Any] = {}
    for name, value in predictions(outputs, slices).items():
        head = head_of(name, slices[name].stop - (slices[name].start or 0))
        if isinstance(value, Mdn):
            found |= _parsed(name, value, head)
        elif head.kind == "categorical":
            found[name] = value.softmax(-1)
        else:
            found[name] = probability(value) if head.kind == "binary" else value.clone()
    return found


def _parsed(name: str, mdn: Mdn, head: Head) -> dict[str, torch.Tensor]:
    std = std_of(mdn.log_std)
    if mdn.logits is None:
        return {name: mdn.mean.clone(), f"{name}_stds": std}
    axis = mdn.logits.ndim - 2
    weights, mean = mdn.logits.softmax(axis), mdn.mean
    if head.choices == 1:
        order = _falling(weights[..., 0])
        weights = weights.gather(axis, order.unsqueeze(-1))
        mean, std = _taken(mean, order, head), _taken(std, order, head)
        best, best_std = mean.select(axis, 0), std.select(axis, 0)
    else:
        first = _falling(weights.transpose(-1, -2))[..., 0]  # (..., choices)
        best, best_std = _taken(mean, first, head), _taken(std, first, head)
    return {
        **{name: best, f"{name}_stds": best_std, f"{name}_weights": weights},
        **{f"{name}_hypotheses": mean.clone(), f"{name}_stds_hypotheses": std},
    }


def _falling(weights: torch.Tensor) -> torch.Tensor:
    """Return the order of falling weight along the last dim.

    Of equal weights the later one is first, as when numpy's order is reversed.
    """
    return torch.argsort(weights, dim=-1, stable=True).flip(-1)


def _taken(values: torch.Tensor, order: torch.Tensor, head: Head) -> torch.Tensor:
    """Return hypotheses (..., hypotheses, *shape) selected by their numbers (..., n)."""
    index = order.reshape(*order.shape, *(1,) * len(head.shape))
    return values.gather(order.ndim - 1, index.expand(*order.shape, *head.shape))
