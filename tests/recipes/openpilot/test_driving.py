"""Queues over time equal a loop that keeps every frame and looks back, as modeld's formulas do."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.openpilot.contract import Kind, ModelContract, TensorSpec, read_contract
from recipes.openpilot.driving import Driver, Tensors, load_driver
from recipes.openpilot.generations import GENERATIONS
from tpuport.foundation.errors import UsageError

FRAMES = 112  # more than the 100 that queues are long


class Projection:
    """Stands in for a file: each output depends on every number of every input."""

    def __init__(self, contract: ModelContract) -> None:
        self.contract = contract
        rng = np.random.default_rng(contract.width)
        self.inner = {
            spec.name: rng.normal(size=(self.summary(np.zeros(spec.shape)).size, 24)) / 8
            for spec in contract.inputs
        }
        self.outer = rng.normal(size=(24, contract.width)) / 5

    @staticmethod
    def summary(value: np.ndarray) -> np.ndarray:
        """(1, ...) to one line; the images here have one level in each plane."""
        return value[:, :, 5, 7].ravel() / 64 - 2 if value.ndim == 4 else value.ravel()

    def run(self, given: Mapping[str, np.ndarray]) -> np.ndarray:
        total = sum(self.summary(given[n]) @ matrix for n, matrix in self.inner.items())
        return np.tanh(np.tanh(total) @ self.outer)[None]

    def compute(self, given: Mapping[str, torch.Tensor], wanted: Sequence[str]) -> Tensors:
        if wanted[0] in given:
            return {name: given[name] for name in wanted}
        rows = range(len(next(iter(given.values()))))
        for spec in self.contract.inputs:
            assert tuple(given[spec.name].shape[1:]) == spec.shape
            assert (given[spec.name].dtype == torch.uint8) == (spec.dtype == "uint8")
        found = [self.run({n: v[row].numpy() for n, v in given.items()}) for row in rows]
        return {wanted[0]: torch.from_numpy(np.stack(found)).float()}

    def frozen_frontier(self, given: Any) -> tuple[str, ...]:
        return tuple(given)


def frames_of(count: int, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """(t, n, ...), with desires that come, stay and go."""
    rng = np.random.default_rng(seed)
    level = rng.integers(0, 256, (2, count, rows, 6, 1, 1))
    images = np.broadcast_to(level, (2, count, rows, 6, 128, 256)).astype(np.uint8)
    held = np.repeat(rng.integers(0, 8, (-(-count // 3), rows)), 3, axis=0)[:count]
    return {
        "img": images[0],
        "big_img": images[1],
        "desire": np.eye(8, dtype=np.float32)[held],
        "traffic_convention": np.eye(2, dtype=np.float32)[rng.integers(0, 2, (count, rows))],
        "v_ego": rng.uniform(0, 30, (count, rows)).astype(np.float32),
        "action_t": rng.uniform(0, 1, (count, rows, 2)).astype(np.float32),
    }


def as_tensors(frames: Mapping[str, np.ndarray]) -> Tensors:
    return {name: torch.from_numpy(value.copy()) for name, value in frames.items()}


def history(kept: list[np.ndarray], ages: Sequence[int], like: np.ndarray) -> np.ndarray:
    """What was there `ages` frames ago, oldest first; zero before the beginning."""
    return np.stack([kept[-1 - a] if a < len(kept) else np.zeros_like(like) for a in ages])


def loop(contracts: Sequence[ModelContract], graphs: Sequence[Any], frames: Any) -> np.ndarray:
    """One drive, (t, all heads), from all that was before each frame."""
    policy = contracts[-1]
    old = policy.input("desire") is not None and policy.input("desire").shape[1] == 100
    skip = 1 if old else 4
    split = len(contracts) == 2
    images: dict[str, list[np.ndarray]] = {"img": [], "big_img": []}
    pulses, features, curvatures, outputs = [], [], [], []
    before = np.zeros(8)
    for t in range(len(frames["desire"])):
        given: dict[str, np.ndarray] = {}
        for name, camera in zip(contracts[0].images, ("img", "big_img"), strict=True):
            images[camera].append(frames[camera][t])
            pair = history(images[camera], [skip, 0], frames[camera][t])
            given[name] = pair.reshape(1, 12, 128, 256)
        desire = frames["desire"][t].copy()
        desire[0] = 0
        pulses.append(np.where(desire - before > 0.99, desire, 0))
        before = desire
        all_pulses = history(pulses, range(99, -1, -1), desire)
        pooled = all_pulses if old else all_pulses.reshape(25, 4, 8).max(1)
        given["desire"] = given["desire_pulse"] = pooled[None]
        given["traffic_convention"] = frames["traffic_convention"][t][None]
        given["action_t"] = frames["action_t"][t][None]
        given["lateral_control_params"] = np.array([[frames["v_ego"][t], frames["action_t"][t][0]]])
        none = np.zeros(1)
        ages = range(99, -1, -1) if old else range(96, -1, -4)
        given["prev_desired_curv"] = history(curvatures, ages, none)[None]
        feature = np.zeros(512)
        if split:
            first = graphs[0].run({n: given[n] for n in contracts[0].images})
            features.append(first[0, contracts[0].slices["hidden_state"]])
            given["features_buffer"] = history(features, range(96, -1, -4), feature)[None]
            names = [spec.name for spec in policy.inputs]
            second = graphs[1].run({n: given[n] for n in names})
            out = np.concatenate([first, second], axis=1)
        else:
            # The newest one is of the frame before: age 0 in the list is 1 frame ago.
            past = range(98, -1, -1) if old else range(95, 0, -4)
            given["features_buffer"] = history(features, past, feature)[None]
            names = [spec.name for spec in policy.inputs]
            out = second = graphs[0].run({n: given[n] for n in names})
            features.append(out[0, policy.slices["hidden_state"]])
        if "desired_curvature" in policy.slices:
            start = policy.slices["desired_curvature"].start
            curvatures.append(second[0, start : start + 1])
        outputs.append(out[0])
    return np.stack(outputs)


STATELESS = [name for name in GENERATIONS if name != "2026-09"]


@pytest.mark.parametrize("generation", STATELESS)
def test_queues_are_those_of_the_car(generation: str):
    contracts = [contract_of(kind) for kind in GENERATIONS[generation]]
    graphs = [Projection(contract) for contract in contracts]
    driver = Driver(contracts, graphs)
    frames = frames_of(FRAMES, 2)
    state = driver.begin(2)
    found = []
    # Also cut into pieces, as a long drive is.
    for part in (slice(0, 1), slice(1, 50), slice(50, FRAMES)):
        given = as_tensors({name: value[part] for name, value in frames.items()})
        state, outputs = driver(state, given)
        found.append(outputs.numpy())
    joined = np.concatenate(found)
    for row in range(2):
        expected = loop(contracts, graphs, {n: v[:, row] for n, v in frames.items()})
        # What is fed back makes float32's rounding grow.
        np.testing.assert_allclose(joined[:, row], expected, atol=3e-3)
    # Each row and the queues matter.
    assert np.abs(joined[:, 0] - joined[:, 1]).max() > 0.1
    assert np.abs(joined[100] - joined[104]).max() > 0.1


def contract_of(kind: Any) -> ModelContract:
    """The contract of a file without the file."""
    image = "uint8" if kind.image_dtype == torch.uint8 else "float32"
    specs = [TensorSpec(name, (1, 12, 128, 256), image) for name in kind.images]
    specs += [TensorSpec(name, shape, "float32") for name, shape in kind.buffers.items()]
    width = sum(kind.heads.values())
    which = Kind.VISION if not kind.buffers else Kind.SUPERCOMBO if kind.images else Kind.POLICY
    output = (TensorSpec("outputs", (1, width), "float32"),)
    return ModelContract(which, tuple(specs), output, kind.slices, 20, {})


def test_the_contracts_here_are_those_of_the_files(driving_models: Callable[..., list[Path]]):
    for path, kind in zip(driving_models("0.10.3"), GENERATIONS["0.10.3"], strict=True):
        mine, real = contract_of(kind), read_contract(path)
        assert (mine.kind, set(mine.inputs), mine.slices) == (
            real.kind,
            set(real.inputs),
            real.slices,
        )


def test_queues_inside_a_graph_are_those_outside(driving_models: Callable[..., list[Path]]):
    """The stateful model has the weights of the stateless one."""
    outside = load_driver(driving_models("2026-07"))
    inside = load_driver(driving_models("2026-09"))
    frames = as_tensors(frames_of(6, 2))
    with torch.no_grad():
        last, expected = outside(outside.begin(2), frames)
        state, found = inside(inside.begin(2), frames)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        more = as_tensors(frames_of(3, 2, seed=1))
        torch.testing.assert_close(
            inside(state, more)[1], outside(last, more)[1], rtol=1e-4, atol=1e-5
        )
    assert inside.slices == outside.slices


def test_frames_may_be_seen_before(driving_models: Callable[..., list[Path]]):
    driver = load_driver(driving_models("0.10.3"))
    for name, parameter in driver.named_parameters():
        parameter.requires_grad_("policy" in name)
    frames = as_tensors(frames_of(6, 2))
    with torch.no_grad():
        images, _ = driver.images(driver.begin(2), frames)
        seen = driver.see(images)
        assert {tuple(value.shape[2:]) for value in seen.values()} == {(1, 1576)}
        _, expected = driver(driver.begin(2), frames)
        rest = {name: value for name, value in frames.items() if "img" not in name}
        _, found = driver(driver.begin(2), rest, seen)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_end_where_they_are_told_to(driving_models: Callable[..., list[Path]]):
    """A loss on the last frame alone: what the first frame's feature gives to it."""
    driver = load_driver(driving_models("2026-07"))
    driver.requires_grad_(False)
    parameter = next(p for n, p in driver.named_parameters() if "summarizer/feature" in n)
    parameter.requires_grad_(True)
    frames = as_tensors(frames_of(5, 1))

    def gradient(stops: list[bool]) -> torch.Tensor:
        _, outputs = driver(driver.begin(1), frames, None, torch.tensor(stops))
        plan = outputs[-1, 0, driver.slices["plan"]]
        (found,) = torch.autograd.grad(plan.square().sum(), parameter)
        return found

    whole, cut = gradient([False] * 5), gradient([False] * 4 + [True])
    own = copy.deepcopy(driver)
    with torch.no_grad():
        state, _ = own(own.begin(1), {n: v[:4] for n, v in frames.items()})
    trained = next(p for n, p in own.named_parameters() if "summarizer/feature" in n)
    _, outputs = own(state, {n: v[4:] for n, v in frames.items()})
    (alone,) = torch.autograd.grad(outputs[0, 0, own.slices["plan"]].square().sum(), trained)
    torch.testing.assert_close(cut, alone, rtol=1e-3, atol=1e-5)
    assert not torch.allclose(whole, cut, rtol=1e-2, atol=1e-3)


def test_files_of_different_models_are_refused(driving_models: Callable[..., list[Path]]):
    vision, policy = driving_models("0.10.3")
    assert load_driver([policy, vision]).slices == load_driver([vision, policy]).slices
    with pytest.raises(UsageError, match="files of kind policy: expected one supercombo, or vis"):
        load_driver([policy])
    with pytest.raises(UsageError, match="files of kind none"):
        load_driver([])
