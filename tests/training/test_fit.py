"""The loop: resumed exactly, logged, saved, evaluated, ended in time, and never waiting."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from rich.console import Console

import tpuport
from tests.full_disk import full_after
from tests.training.small import Small, loss
from tests.training.test_step import refuse_to_read
from tests.training.two_processes import Samples
from tpuport.foundation.errors import CheckpointError, MissingExtraError, UsageError
from tpuport.training import (
    Batches,
    Checkpoints,
    JsonLines,
    Preempted,
    Profile,
    TensorBoard,
    WandB,
    fit,
    make_train_step,
)
from tpuport.training.progress import Meter, Shown, shown

ROOT = Path(__file__).parent.parent.parent


def new_step(**options: Any) -> Any:
    torch.manual_seed(0)
    return make_train_step(tpuport.convert(Small(**options)), loss)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def batches() -> Batches:
    return Batches(Samples(), batch_size=16)


def assert_equal(one: Any, other: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, one.params, other.params)
    jax.tree.map(np.testing.assert_array_equal, one.optimizer, other.optimizer)
    jax.tree.map(np.testing.assert_array_equal, one.buffers, other.buffers)


def test_a_run_that_goes_on_is_bit_equal_to_one_that_was_not_interrupted(tmp_path, capsys):
    step = new_step()
    log = JsonLines(tmp_path / "whole.jsonl")
    whole = fit(step, batches(), steps=7, log_every=1, sinks=log, progress=False)
    assert step.retraces == 0
    options: dict[str, Any] = {"checkpoints": tmp_path / "states", "save_every": 3, "log_every": 1}

    def fail(step: Any, state: Any) -> Any:
        raise ConnectionError("lost")

    again = JsonLines(tmp_path / "again.jsonl")
    with pytest.raises(ConnectionError):  # after step 5: the state of step 3 is there
        fit(step, batches(), steps=7, **options, sinks=again, evaluate=fail, evaluate_every=5)
    found = fit(new_step(), batches(), steps=7, **options, sinks=JsonLines(again.path))
    assert_equal(found, whole)
    for one, other in zip(lines(again.path), lines(log.path), strict=True):
        assert {one[key] for key in ("step", "loss", "epoch")} == {
            other[key] for key in ("step", "loss", "epoch")
        }
    text = capsys.readouterr().err
    assert "step 1: compiled (" not in text  # it was before
    assert "resuming after step 3" in text
    assert "step 7/7" in text
    # There is nothing left to do.
    assert_equal(fit(new_step(), batches(), steps=7, **options), whole)


def test_numbers_and_rates_are_logged_and_evaluated(tmp_path):
    log = JsonLines(tmp_path / "log.jsonl")
    seen = []

    def evaluate(step: Any, state: Any) -> dict[str, Any]:
        seen.append(int(state.step))
        step.load_state(state)
        return {"x": torch.tensor(2.0), "y": jax.numpy.ones(())}

    step = new_step()
    fit(
        step,
        batches(),
        steps=6,
        log_every=2,
        evaluate=evaluate,
        evaluate_every=4,
        sinks=log,
        peak_flops=1e9,
        progress=False,
    )
    assert seen == [4, 6]
    assert step.retraces == 0
    found = [line for line in lines(log.path) if "loss" in line]
    assert [line["step"] for line in found] == [2, 4, 6]
    assert {"grad_norm", "accuracy", "skipped_steps", "epoch", "seconds"} <= found[0].keys()
    for line in found:
        if "steps_per_second" in line:
            rate = line["steps_per_second"]
            assert line["samples_per_second"] == pytest.approx(16 * rate)
            assert line["mfu"] == pytest.approx(step.flops() * rate / 1e9)
    assert any("mfu" in line for line in found)
    # Forward: 3 layers, backward: 6 products but for the input's gradient; 2 FLOP for each.
    products = 8 * 16 * 2 + 16 * 16 * 2 + 16 * 4 * 3
    assert step.flops() == 2 * 16 * products
    assert [line for line in lines(log.path) if "evaluate/x" in line] == [
        {"step": 4, "evaluate/x": 2.0, "evaluate/y": 1.0},
        {"step": 6, "evaluate/x": 2.0, "evaluate/y": 1.0},
    ]


def test_no_step_waits_for_its_numbers(monkeypatch):
    step = new_step()
    state, _ = step(step.init(), {"x": torch.randn(16, 8), "y": torch.zeros(16, dtype=torch.long)})
    reads = []
    value = type(state.step)._value  # pyright: ignore[reportAttributeAccessIssue]

    def read(array: Any) -> Any:
        reads.append(array)
        return value.fget(array)

    data = batches()
    given = data.device_iterator(step)
    monkeypatch.setattr(type(state.step), "_value", property(refuse_to_read))
    for _ in range(3):
        state, _ = step(state, next(given))
    monkeypatch.setattr(type(state.step), "_value", property(read))
    fit(step, batches(), steps=9, log_every=4, progress=False)
    assert len(reads) < 9 * 2  # three times four numbers, and the first step's own


def test_a_padded_batch_needs_a_loss_that_looks_at_its_mask():
    def masked(model: Any, batch: Any) -> Any:
        each = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        mask = batch["sample_mask"]
        return (each * mask).sum() / mask.sum()

    with pytest.raises(UsageError, match=r"does not use batch\['sample_mask'\].*count twice"):
        fit(new_step(), Batches(Samples(), 16, last="pad"), steps=2, progress=False)
    step = make_train_step(tpuport.convert(Small(0.0)), masked)
    fit(step, Batches(Samples(), 16, last="pad"), steps=6, progress=False)
    assert step.retraces == 0


def test_the_mask_at_the_end_of_a_tuple_has_to_be_used_too():
    def forgets(model: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    data = torch.utils.data.TensorDataset(torch.randn(20, 8), torch.zeros(20, dtype=torch.long))
    step = make_train_step(tpuport.convert(Small(0.0)), forgets)
    with pytest.raises(UsageError, match=r"does not use batch\[2\].*count twice"):
        fit(step, Batches(data, 16, last="pad"), steps=2, progress=False)
    with pytest.raises(UsageError, match=r"there is no 'mask' among 0.0, 0.1, 0.2"):
        step.leaves_unread("mask")


@pytest.mark.parametrize("weighted", [True, False])
def test_parts_of_a_padded_batch_have_to_be_weighted(weighted: bool):
    class Short(Samples):
        def __len__(self) -> int:
            return 20  # the last batch has 4, all of them in its first part

    def masked(model: Any, batch: Any) -> Any:
        each = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        mask = batch["sample_mask"]
        metrics = {"weight": mask.sum()} if weighted else {}
        return (each * mask).sum() / mask.sum(), metrics

    step = make_train_step(tpuport.convert(Small(0.0)), masked, accumulate=2)
    given = Batches(Short(), 16, last="pad")
    if weighted:
        state: Any = fit(step, given, steps=4, progress=False)
        assert int(state.skipped) == 0
        return
    with pytest.raises(UsageError, match=r"each of its parts counts alike.*{'weight': mask.sum"):
        fit(step, given, steps=4, progress=False)


def test_asked_to_end_it_saves_and_the_next_call_goes_on(tmp_path):
    whole = fit(new_step(), batches(), steps=6, progress=False)

    def ask(step: Any, state: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {"checkpoints": tmp_path, "progress": False, "steps": 6}
    with pytest.raises(Preempted) as caught:
        fit(new_step(), batches(), **options, evaluate=ask, evaluate_every=4)
    # It was asked after step 4 was looked at.
    assert (caught.value.code, caught.value.step) == (143, 5)
    assert signal.getsignal(signal.SIGTERM) is before
    assert_equal(fit(new_step(), batches(), **options), whole)


class Reading(Batches):
    """Does something before a batch is read."""

    before: Any = None

    def _read(self, *place: Any) -> Any:
        self.count = getattr(self, "count", 0) + 1
        self.before(self.count)
        return super()._read(*place)


def test_asked_while_it_reads_it_saves_before_it_evaluates_or_fails(tmp_path):
    def fail(count: int) -> None:
        if count == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            raise OSError("the workers ended")

    def ask(count: int) -> None:
        if count == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    evaluated: list[int] = []
    for name, before in (("fails", fail), ("asked", ask)):
        given = Reading(Samples(), 16, prefetch=0)
        given.before = before
        with Checkpoints(tmp_path / name) as saved, pytest.raises(Preempted) as caught:
            fit(
                new_step(),
                given,
                steps=9,
                checkpoints=saved,
                save_every=5,
                evaluate=lambda step, state: evaluated.append(int(state.step)),
                evaluate_every=3,
                progress=False,
            )
        assert caught.value.step == 3
        with Checkpoints(tmp_path / name) as saved:
            assert saved.steps == [3]
    assert evaluated == [3]  # of the first, before it was asked


def test_what_is_saved_is_logged_with_the_epoch_of_its_batch(tmp_path):
    def fail(count: int) -> None:
        if count == 5:
            raise OSError("lost")

    given = Reading(Samples(), 16, prefetch=0)
    given.before = fail
    log = JsonLines(tmp_path / "log.jsonl")
    with pytest.raises(OSError, match="lost"):
        fit(
            new_step(),
            given,
            steps=7,
            checkpoints=tmp_path / "states",
            save_every=2,
            log_every=2,
            sinks=log,
            progress=False,
        )
    # 70 samples are four batches: the fourth is of the first epoch.
    assert [(line["step"], line["epoch"]) for line in lines(log.path)] == [(2, 0), (4, 0)]


def test_a_window_of_steps_is_traced(tmp_path):
    profile = Profile(tmp_path, start=2, steps=2)
    fit(new_step(), batches(), steps=5, profile=profile, progress=False)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_new_shape_is_told_with_its_reason(capsys):
    given = [{"x": torch.randn(n, 8), "y": torch.zeros(n, dtype=torch.long)} for n in (4, 4, 6)]
    fit(new_step(), given, steps=3)
    text = capsys.readouterr().err
    assert "step 1: compiled (" in text
    assert "step 3: compiled again, because batch.x: float32[4, 8] -> float32[6, 8]; " in text


# Where numbers go.


def test_a_full_disk_takes_no_half_of_a_line(tmp_path):
    path = tmp_path / "log.jsonl"
    log = JsonLines(path)
    log.write(1, {"loss": 0.5})
    whole = path.read_bytes()
    for room in (0, 5):
        with (
            full_after(len(whole) + room),
            pytest.raises(CheckpointError, match=r"jsonl was not saved: the disk is full"),
        ):
            log.write(2, {"loss": 0.25})
        assert path.read_bytes() == whole
    log.write(2, {"loss": 0.25})
    # Without its last line, the file is written anew.
    with full_after(5), pytest.raises(CheckpointError, match="the old one is as it was"):
        JsonLines(path).start(1)
    assert [line["step"] for line in lines(path)] == [1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.jsonl"]
    log.close()


def test_lines_are_whole_and_those_that_come_again_are_taken_out(tmp_path):
    path = tmp_path / "deep" / "log.jsonl"
    log = JsonLines(path)
    for step in (1, 2, 3):
        log.write(step, {"loss": 1.0 / step, "bad": math.nan})
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    log = JsonLines(path)
    log.start(2)
    log.write(3, {"loss": 5.0})
    log.close()
    bad = {"bad": None, "nonfinite": ["bad"]}
    assert lines(path) == [
        {"step": 1, "loss": 1.0, **bad},
        {"step": 2, "loss": 0.5, **bad},
        {"step": 3, "loss": 5.0},
    ]
    assert [file.name for file in path.parent.iterdir()] == ["log.jsonl"]


def test_what_is_not_installed_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'WandB needs wandb.*pip install "tpuport\[log\]"'):
        WandB("project")
    with pytest.raises(MissingExtraError, match=r'needs tensorboardX.*"tpuport\[log\]"'):
        TensorBoard(tmp_path)


def test_the_line_has_what_matters():
    values = {"loss": 1.25, "skipped_steps": 0, "epoch": 2, "mfu": 0.4123, "steps_per_second": 9.0}
    assert shown(values) == "loss 1.25  9 steps/s  MFU 41.2%"
    assert shown({"skipped_steps": 2}) == "skipped_steps 2"
    console = Console(force_terminal=True, width=100, file=open(os.devnull, "w"), record=True)
    bar = Shown(10, 2, on=True, console=console)
    bar.advance(5)
    bar.log(5, {"loss": 1.5})
    bar.note("a [note]")
    bar.close()
    console.file.close()
    text = console.export_text()
    assert "step 5/10" in text
    assert "loss 1.5" in text
    assert "a [note]" in text
    assert Meter().rates(0) == {}


REFUSED = {
    "steps": ({"steps": 0}, "steps=0: expected a number of steps"),
    "log": ({"steps": 1, "log_every": 0}, "log_every=0: expected a number of steps"),
    "evaluate": ({"steps": 1, "evaluate_every": 2}, "evaluate_every=2: expected .* and evaluate="),
    "sink": ({"steps": 1, "sinks": [print]}, "sinks: a builtin_function_or_method has no start"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_of_no_use_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        fit(None, [], **options)


def test_a_state_without_a_position_is_refused(tmp_path):
    step = new_step()
    state, _ = step(step.init(), {"x": torch.randn(16, 8), "y": torch.zeros(16, dtype=torch.long)})
    with Checkpoints(tmp_path) as saved:
        saved.save(state)
    with pytest.raises(CheckpointError, match=r"step 1 in .* without the position of the input"):
        fit(step, batches(), steps=3, checkpoints=tmp_path, progress=False)
