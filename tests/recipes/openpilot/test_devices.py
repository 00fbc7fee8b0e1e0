"""Training over several devices: the windows of a step are spread, the weights are not."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from recipes.openpilot.losses import LossWeights
from recipes.openpilot.student import DoraOptions
from recipes.openpilot.train import (
    SequenceLoss,
    TrainOptions,
    make_step,
    make_student,
    num_devices,
    train,
)
from recipes.openpilot.windows import Windows
from tests.recipes.openpilot.frames import make_shard
from tpuport.foundation.errors import UsageError

DEVICES = 8
OPTIONS = TrainOptions(
    dora=DoraOptions(("temporal_hydra/plan",), rank=2),
    losses=LossWeights(plan=0.0, path=1.0),
    warmup=1,
    length=2,
    steps=2,
    batch_size=DEVICES,
    save_every=1,
    log_every=1,
)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shard(tmp_path_factory.mktemp("set") / "a.safetensors", 28)


def test_a_step_on_eight_is_eagers(driving_models: Callable[..., list[Path]], shard: Path):
    windows = Windows([shard], OPTIONS.warmup + OPTIONS.length, 3, ["plan"])
    each = [windows[number] for number in range(DEVICES)]
    batch = {name: torch.stack([one[name] for one in each]) for name in each[0]}
    loss = SequenceLoss(OPTIONS.losses, OPTIONS.warmup)
    student = make_student(driving_models("0.10.3"), OPTIONS.dora)
    eager = copy.deepcopy(student)
    step = make_step(student, loss, replace(OPTIONS, devices=DEVICES))
    state = step.init()
    places = {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state.params)}
    assert places == {DEVICES}
    state, metrics = step(state, batch)

    expected, _ = loss(eager, batch)
    expected.backward()
    trained = {n: p for n, p in eager.named_parameters() if p.requires_grad}
    norm = torch.nn.utils.clip_grad_norm_(trained.values(), OPTIONS.clip_norm)
    assert float(metrics["loss"]) == pytest.approx(expected.item(), rel=1e-4)
    assert float(metrics["grad_norm"]) == pytest.approx(norm.item(), rel=1e-4)
    optimizer = torch.optim.Adam(trained.values(), OPTIONS.learning_rate)
    before = {name: value.detach().clone() for name, value in trained.items()}
    optimizer.step()
    assert sorted(state.params) == sorted(trained)
    moved = 0
    for name, value in trained.items():
        assert value.grad is not None
        # Adam makes steps of one size of gradients that are rounding alone, too.
        clear = value.grad.abs() > 1e-2 * value.grad.abs().max()
        found = torch.from_numpy(np.array(state.params[name]))
        torch.testing.assert_close(found[clear], value[clear], rtol=0, atol=1e-5, msg=name)
        moved += not torch.allclose(before[name], value, atol=1e-5)
    assert moved


@pytest.mark.slow
def test_a_run_on_two_is_taken_over_by_one(
    driving_models: Callable[..., list[Path]], shard: Path, tmp_path: Path
):
    files = driving_models("0.10.3")
    spread = train(files, [shard], tmp_path, replace(OPTIONS, devices=2, save_every=2))
    alone = train(files, [shard], tmp_path, OPTIONS)
    for name, parameter in spread.named_parameters():
        assert torch.equal(alone.get_parameter(name), parameter), name


def test_all_devices_are_counted():
    assert num_devices(replace(OPTIONS, devices=-1)) == DEVICES == jax.device_count()


def test_what_cannot_be_spread_is_refused(
    driving_models: Callable[..., list[Path]], shard: Path, tmp_path: Path
):
    files = driving_models("0.10.3")
    given = replace(OPTIONS, see_once=False)  # is computed before
    for devices, words in (
        (DEVICES + 1, f"devices={DEVICES + 1}: there are {DEVICES}"),
        (3, "8 windows of a step over 3 devices: expected a multiple of 3"),
    ):
        with pytest.raises(UsageError, match=words):
            train(files, [shard], tmp_path / str(devices), replace(given, devices=devices))
    with pytest.raises(UsageError, match="devices=0: expected 1 or more, or -1"):
        replace(OPTIONS, devices=0)
