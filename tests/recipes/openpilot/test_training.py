"""Training over time: the scan is the Python loop, and what is trained becomes a model file."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
import torch

import tpuport
from recipes.openpilot.driving import Driver, Tensors, load_driver
from recipes.openpilot.exporting import export
from recipes.openpilot.losses import LossWeights, winner_takes_all
from recipes.openpilot.outputs import predictions
from recipes.openpilot.student import DoraOptions
from recipes.openpilot.teacher import label
from recipes.openpilot.train import SequenceLoss, TrainOptions, make_student, train
from recipes.openpilot.windows import Windows, write_seen
from tests.recipes.openpilot.frames import make_shard
from tpuport.foundation.errors import UsageError
from tpuport.training import make_train_step

RATE, WARMUP, LENGTH = 1.0, 3, 5


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shard(tmp_path_factory.mktemp("set") / "a.safetensors", 30, runs=(18, 12))


def batch_of(windows: Windows, rows: int = 2) -> Tensors:
    each = [windows[number] for number in range(rows)]
    return {name: torch.stack([one[name] for one in each]) for name in each[0]}


def student_of(files: list[Path], *layers: str) -> Driver:
    driver = make_student(files, DoraOptions(layers, rank=4))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in driver.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn_like(parameter))
    return driver


def loop_loss(driver: Driver, batch: Tensors, truncate: int | None) -> torch.Tensor:
    """Frame by frame from the step alone, with gradients cut by hand."""
    state = driver.begin(len(batch["desire"]))
    losses = []
    for t in range(WARMUP + LENGTH):
        frame = {name: value[:, t] for name, value in batch.items()}
        if t < WARMUP or (truncate and (t - WARMUP) % truncate == 0) or t == WARMUP:
            state = {name: value.detach() for name, value in state.items()}
        images, pictures = driver.images(state, {n: frame[n][None] for n in ("img", "big_img")})
        seen = {name: value[0] for name, value in driver.see(images).items()}
        state, outputs = driver.step({**state, **pictures}, seen, frame)
        if t >= WARMUP:
            plan: Any = predictions(outputs, driver.slices)["plan"]
            each = winner_takes_all(plan, frame["plan"], frame["plan_valid"].float())
            losses.append(each * frame["plan_valid"].sum())
    return torch.stack(losses).sum() / batch["plan_valid"][:, WARMUP:].sum()


@pytest.mark.parametrize(
    ("generation", "layers", "truncate", "remat"),
    [
        # test_devices.py takes a step of it that neither cuts gradients nor recomputes.
        pytest.param("0.10.3", ("plan", "attention"), None, False, marks=pytest.mark.slow),
        ("2026-07", ("plan", "summarizer/feature"), 2, True),
        # One file: as test_commands.py trains one.
        pytest.param(
            *("0.9.7", ("desired_curvature", "summarizer/feature", "plan"), None, False),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_step_is_that_of_the_python_loop(
    driving_models: Callable[..., list[Path]],
    shard: Path,
    generation: str,
    layers: tuple[str, ...],
    truncate: int | None,
    remat: bool,
):
    batch = batch_of(Windows([shard], WARMUP + LENGTH, 4, ["plan"]))
    eager = student_of(driving_models(generation), *layers)
    student = copy.deepcopy(eager)
    student.remat = remat
    before = {name: p.detach().clone() for name, p in eager.named_parameters()}
    expected = loop_loss(eager, batch, truncate)
    expected.backward()
    loss = SequenceLoss(LossWeights(), WARMUP, truncate)
    step = make_train_step(tpuport.convert(student, verify=False), loss, optax.sgd(RATE))
    state, metrics = step(step.init(), batch)
    assert float(metrics["loss"]) == pytest.approx(expected.item(), rel=1e-4)
    trained = [name for name, p in eager.named_parameters() if p.requires_grad]
    assert sorted(state.params) == sorted(trained)
    for name in trained:
        gradient = eager.get_parameter(name).grad
        assert gradient is not None
        scale = float(gradient.abs().max())
        mine = (before[name].numpy() - np.asarray(state.params[name])) / RATE
        np.testing.assert_allclose(mine, gradient.numpy(), atol=5e-3 * scale + 1e-6, err_msg=name)


def test_frames_that_were_seen_before_train_alike(
    driving_models: Callable[..., list[Path]], shard: Path, tmp_path: Path
):
    files = driving_models("0.10.3")
    driver = student_of(files, "policy")
    seen = write_seen(driver, files, [shard], tmp_path)
    written = seen[0].stat().st_mtime_ns
    assert write_seen(driver, files, [shard], tmp_path) == seen
    assert seen[0].stat().st_mtime_ns == written
    loss = SequenceLoss(LossWeights(), WARMUP)
    options: Any = ([shard], WARMUP + LENGTH, 4, ["plan"])
    images, cached = Windows(*options), Windows(*options, seen=seen)
    assert "img" not in cached[0]
    # The first window of each run: those inside a run have seen the frames before it.
    places = [n for n, place in enumerate(images.places) if place.start in (0, 18)]
    assert len(places) == 2
    for number in places:
        expected, _ = loss(driver, {n: v[None] for n, v in images[number].items()})
        found, _ = loss(driver, {n: v[None] for n, v in cached[number].items()})
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# Above one of the steps recomputes its frames.
@pytest.mark.slow
def test_remat_changes_nothing(driving_models: Callable[..., list[Path]], shard: Path):
    # Few frames: what is computed again is the step of a scan, whatever its length.
    batch = batch_of(Windows([shard], 3, 4, ["plan"]), rows=1)
    found = []
    for remat in (False, True):
        driver = student_of(driving_models("0.10.3"), "plan")
        driver.remat = remat
        loss = SequenceLoss(LossWeights(), warmup=1)
        step = make_train_step(tpuport.convert(driver, verify=False), loss, optax.sgd(RATE))
        state, _ = step(step.init(), batch)
        found.append({name: np.asarray(value) for name, value in state.params.items()})
    for name, value in found[0].items():
        np.testing.assert_allclose(value, found[1][name], rtol=1e-4, atol=1e-5)


OPTIONS = TrainOptions(
    dora=DoraOptions(("temporal_hydra", "attention", "project")),
    losses=LossWeights(plan=0.0, path=1.0),
    warmup=4,
    length=4,
    steps=150,
    batch_size=2,
    learning_rate=3e-3,
    save_every=75,
    log_every=75,
)


def plan_error(driver: Driver, shard: Path) -> float:
    windows = Windows([shard], 8, 4, ["plan"])
    loss = SequenceLoss(LossWeights(), 4)
    with torch.no_grad():
        batch = batch_of(windows, 3)
        plan: Any = predictions(loss.outputs(driver, batch), driver.slices)["plan"]
    target = batch["plan"][:, 4:].transpose(0, 1)
    return float((plan.mean - target)[..., 0].abs().mean())


# test_commands.py trains and exports, test_full_disks.py goes on with a run.
@pytest.mark.slow
def test_a_model_is_trained_and_exported(
    driving_models: Callable[..., list[Path]], shard: Path, tmp_path: Path
):
    files = driving_models("0.10.3")
    out = tmp_path / "run"
    trained = train(files, [shard], out, OPTIONS)
    assert plan_error(trained, shard) < 0.5 * plan_error(load_driver(files), shard)
    # Started again, it is at its end: the same weights.
    again = train(files, [shard], out, OPTIONS)
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    rng = np.random.default_rng(0)
    spec = trained.contracts[1].inputs
    rows = [{s.name: rng.normal(size=s.shape).astype(np.float32) for s in spec}]
    report = export(trained.graphs[1], files[1], tmp_path / "policy.onnx", rows=rows)
    assert report.largest_difference < 1e-4
    assert report.changed
    with pytest.raises(UsageError, match="run was begun otherwise"):
        train(files, [shard], out, replace(OPTIONS, learning_rate=1e-3))


# test_commands.py trains with a teacher, test_teacher.py labels on the accelerator.
@pytest.mark.slow
def test_a_student_learns_from_a_teacher(
    driving_models: Callable[..., list[Path]], shard: Path, tmp_path: Path
):
    files = driving_models("0.10.3")
    teacher = label(driving_models("2026-07"), [shard], tmp_path / "teacher", batch=8)
    losses = LossWeights(plan=0.0, distill=1.0)
    options = replace(OPTIONS, losses=losses, steps=2, see_once=False)
    trained = train(files, [shard], tmp_path / "run", options, teacher=teacher)
    base = load_driver(files)
    moved = [n for n, p in trained.named_parameters() if not torch.equal(p, base.get_parameter(n))]
    assert moved
    assert all(re.search("temporal_hydra|attention|project", name) for name in moved)
    with pytest.raises(UsageError, match="weight for a teacher, and none is given"):
        train(files, [shard], tmp_path / "other", options)


def test_what_cannot_be_trained_is_refused(driving_models: Callable[..., list[Path]], shard: Path):
    with pytest.raises(UsageError, match="has the 40 frames of a window; the longest has 18"):
        Windows([shard], 40, 4, ["plan"])
    with pytest.raises(UsageError, match="no segment has the labels lead"):
        Windows([shard], 8, 4, ["plan", "lead"])
    with pytest.raises(UsageError, match="'nowhere' finds none of the"):
        make_student(driving_models("0.10.3"), DoraOptions(("nowhere",)))
    with pytest.raises(UsageError, match="steps=0: expected 1 or more"):
        TrainOptions(steps=0)
    with pytest.raises(UsageError, match="warmup=-1"):
        TrainOptions(warmup=-1)


def test_windows_are_within_runs_and_hold_no_other_numbers(shard: Path):
    windows = Windows([shard], 8, 4, ["plan"])
    assert [place.start for place in windows.places] == [0, 4, 8, 18, 22]
    everywhere = Windows([shard], 8, 1, ["plan"])
    assert [place.start for place in everywhere.places] == [*range(11), *range(18, 23)]
    last = windows[4]
    assert last["plan_valid"].tolist() == [True] * 6 + [False] * 2
    assert torch.isfinite(last["plan"]).all()
    assert last["img"].shape == (8, 6, 128, 256)
