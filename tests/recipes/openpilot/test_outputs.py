"""The parser equals openpilot's formulas, written out as loops over frames, on random outputs."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from recipes.openpilot.generations import GENERATIONS
from recipes.openpilot.outputs import Mdn, cut, head_of, parse, predictions
from tpuport.foundation.errors import CheckpointError, UsageError

OUTPUTS = [(gen, kind) for gen, kinds in GENERATIONS.items() for kind in kinds]
IDS = [f"{gen}-{kind.name}" for gen, kind in OUTPUTS]

# Shapes of one mean, how many hypotheses and choices: facts of the generations.
SHAPES = {
    **{"plan": (33, 15), "lane_lines": (4, 33, 2), "road_edges": (2, 33, 2), "pose": (6,)},
    **{"sim_pose": (6,), "road_transform": (6,), "wide_from_device_euler": (3,)},
    **{"desired_curvature": (1,)},
}


def exp(x: float) -> float:
    return math.exp(min(x, 11.0))


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    total = sum(exp(value - top) for value in row)
    return [exp(value - top) / total for value in row]


def loop_mdn(name: str, row: np.ndarray, shape: Any, hypotheses: int, choices: int) -> Any:
    """One frame's mdn, number by number."""
    size = math.prod(shape)
    stride = len(row) // hypotheses
    parts = [row[i * stride : (i + 1) * stride] for i in range(hypotheses)]
    means = [part[:size].reshape(shape) for part in parts]
    stds = [np.array([exp(v) for v in part[size : 2 * size]]).reshape(shape) for part in parts]
    if hypotheses == 1:
        return {name: means[0], f"{name}_stds": stds[0]}
    weights = np.zeros((hypotheses, choices))
    for choice in range(choices):
        weights[:, choice] = softmax([float(part[2 * size + choice]) for part in parts])
    if choices == 1:
        order = sorted(range(hypotheses), key=lambda h: -weights[h, 0])
        weights, means = weights[order], [means[h] for h in order]
        stds = [stds[h] for h in order]
        best, best_std = means[0], stds[0]
    else:
        chosen = [max(range(hypotheses), key=lambda h: weights[h, c]) for c in range(choices)]
        best = np.stack([means[h] for h in chosen])
        best_std = np.stack([stds[h] for h in chosen])
    return {
        **{name: best, f"{name}_stds": best_std, f"{name}_weights": weights},
        **{f"{name}_hypotheses": np.stack(means), f"{name}_stds_hypotheses": np.stack(stds)},
    }


def loop_parse(row: np.ndarray, slices: Any) -> dict[str, np.ndarray]:
    """One frame (all heads,)."""
    found: dict[str, Any] = {}
    for name, part in slices.items():
        raw = row[part].astype(np.float64)
        if name == "plan":
            many = len(raw) != 2 * 33 * 15
            found |= loop_mdn(name, raw, SHAPES[name], 5 if many else 1, 1)
        elif name == "lead":
            many = len(raw) != 2 * 3 * 6 * 4
            shape = (6, 4) if many else (3, 6, 4)
            found |= loop_mdn(name, raw, shape, 2 if many else 1, 3)
        elif name in SHAPES:
            found |= loop_mdn(name, raw, SHAPES[name], 1, 0)
        elif name in ("lane_lines_prob", "lead_prob", "meta"):
            found[name] = np.array([1 / (1 + exp(-value)) for value in raw])
        elif name == "desire_state":
            found[name] = np.array(softmax(raw.tolist()))
        elif name == "desire_pred":
            found[name] = np.array([softmax(line.tolist()) for line in raw.reshape(4, 8)])
        else:
            found[name] = raw
    return found


@pytest.mark.parametrize(("generation", "kind"), OUTPUTS, ids=IDS)
def test_the_parser_equals_the_formulas(generation: str, kind: Any):
    del generation
    width = sum(kind.heads.values())
    rng = np.random.default_rng(width)
    outputs = (rng.normal(size=(2, 3, width)) * 5).astype(np.float32)  # above 11 now and then
    before = outputs.copy()
    found = parse(outputs, kind.slices)
    np.testing.assert_array_equal(outputs, before)
    for i in range(2):
        for j in range(3):
            expected = loop_parse(outputs[i, j], kind.slices)
            assert set(expected) == set(found)
            for name, value in expected.items():
                assert isinstance(found[name], np.ndarray)
                np.testing.assert_allclose(
                    found[name][i, j], value, rtol=2e-5, atol=1e-6, err_msg=name
                )


@pytest.mark.parametrize("number", [1, 3])
def test_tensors_and_halves(number: int):
    kind = OUTPUTS[number][1]
    outputs = torch.randn(4, sum(kind.heads.values())).half()
    found = parse(outputs.float(), kind.slices)
    from_halves = parse(outputs.numpy(), kind.slices)
    for name, value in found.items():
        np.testing.assert_array_equal(value.numpy(), from_halves[name])
        assert from_halves[name].dtype == np.float32


def test_large_deviations_stay_numbers():
    kind = OUTPUTS[1][1]
    outputs = np.full((1, sum(kind.heads.values())), 200.0, np.float32)
    for name, value in parse(outputs, kind.slices).items():
        assert np.isfinite(value).all(), name
    assert parse(outputs, kind.slices)["pose_stds"].max() == pytest.approx(math.exp(11))
    assert parse(-outputs, kind.slices)["lead_prob"][0, 0] == pytest.approx(1 / (1 + math.exp(11)))


class Parsing(torch.nn.Module):
    def __init__(self, slices: Any) -> None:
        super().__init__()
        self.slices = slices

    def forward(self, outputs: torch.Tensor) -> Any:
        return parse(outputs, self.slices)


@pytest.mark.parametrize("generation", ["0.9.7", "2026-07"])
def test_the_parser_in_a_program(generation: str):
    (kind,) = GENERATIONS[generation]
    outputs = torch.randn(2, 2, sum(kind.heads.values()))
    ported = tpuport.convert(Parsing(kind.slices), verify=False)
    found = ported(outputs)
    for name, value in parse(outputs, kind.slices).items():
        np.testing.assert_allclose(tpuport.to_numpy(found[name]), value.numpy(), rtol=1e-5)


def test_predictions_keep_all_hypotheses():
    kind = GENERATIONS["0.10.0"][1]
    outputs = torch.randn(3, sum(kind.heads.values()))
    plan = predictions(outputs, kind.slices)["plan"]
    assert isinstance(plan, Mdn)
    assert plan.logits is not None
    assert plan.mean.shape == plan.log_std.shape == (3, 5, 33, 15)
    raw = outputs[:, kind.slices["plan"]].reshape(3, 5, 991)
    assert torch.equal(plan.mean[:, 4].flatten(1), raw[:, 4, :495])
    assert torch.equal(plan.log_std[:, 2].flatten(1), raw[:, 2, 495:990])
    assert torch.equal(plan.logits[..., 0], raw[..., 990])


def test_widths_that_no_generation_has_are_refused():
    with pytest.raises(CheckpointError, match="'plan' has 991 numbers: expected 990 or 4955"):
        head_of("plan", 991)
    with pytest.raises(CheckpointError, match="'desire_state' has 9 numbers: expected 8"):
        head_of("desire_state", 9)
    with pytest.raises(UsageError, match="has 10 numbers and its heads go up to 990"):
        cut(torch.zeros(1, 10), {"plan": slice(0, 990)})
