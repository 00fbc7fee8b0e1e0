"""Programs compiled for TPUs that are not there: of the shapes that runs have, in numbers too."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tpuport
from recipes.openpilot.__main__ import app
from recipes.openpilot.compile import compile_program, files_of, window_shapes
from recipes.openpilot.contract import Kind, read_contract
from recipes.openpilot.driving import load_driver
from recipes.openpilot.losses import LossWeights
from recipes.openpilot.student import DoraOptions, count_trained
from recipes.openpilot.train import TrainOptions, make_student
from recipes.openpilot.windows import Windows, write_seen
from tests.recipes.openpilot.frames import make_shard
from tpuport.foundation.errors import UsageError
from tpuport.training import TrainStep

LOSSES = LossWeights(plan=0.0, path=1.0)
DORA = DoraOptions(("temporal_hydra/plan",), rank=4)
OPTIONS = TrainOptions(DORA, LOSSES, warmup=1, length=2, batch_size=8)


# The next test has what is asked for; tests/program compiles such steps.
@pytest.mark.slow
def test_a_step_is_compiled_for_a_chip_that_is_not_there(
    driving_models: Callable[..., list[Path]],
):
    model = driving_models("0.10.3")
    report = compile_program("train", model, "v6e-1", replace(OPTIONS, warmup=0), quick=True)
    assert (report.fits, report.what, report.num_chips) == (True, "training step", 1)
    trained, all_ = count_trained(make_student(model, DORA))
    assert report.memory.parameters == 4 * trained
    assert report.memory.optimizer == pytest.approx(2 * 4 * trained, abs=64)
    assert report.memory.buffers == pytest.approx(4 * (all_ - trained), abs=64)
    assert report.work is not None
    assert report.work.collectives == ()
    assert report.estimate is not None
    assert report.estimate.seconds > 0


def test_its_step_is_asked_for(
    driving_models: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch
):
    asked = []
    monkeypatch.setattr(
        tpuport, "compile_for", lambda *given, **named: asked.append((given, named))
    )
    model = driving_models("0.10.3")
    compile_program("train", model, "v6e-4", OPTIONS, quick=True)
    (((step, topology), named),) = asked
    assert isinstance(step, TrainStep)
    trained, _ = count_trained(make_student(model, DORA))
    assert sum(step.ported.params[name].size for name in step.trained) == trained
    assert (topology, named["mesh"], named["quick"]) == ("v6e-4", {"data": -1}, True)
    assert named["rules"].name == "by window"
    (shapes,) = named["inputs"]
    assert {value.shape[:2] for value in shapes.values()} == {(8, 3)}


def test_chips_keep_their_own_cameras():
    report = compile_program("warp", [], "v6e-4", OPTIONS, 2)
    assert (report.model, report.what, report.mesh["data"]) == ("Cameras", "warp", 4)
    pixels, planes = 1928 * 1208 * 3 // 2, 6 * 128 * 256
    assert report.memory.inputs == pytest.approx(2 * pixels, rel=0.01)
    assert report.memory.outputs == pytest.approx(2 * planes, rel=0.01)
    assert report.work is not None
    assert report.work.collectives == ()


@pytest.mark.parametrize("see_once", [False, True])
def test_its_batch_is_that_of_a_run(
    driving_models: Callable[..., list[Path]], tmp_path: Path, see_once: bool
):
    files = driving_models("2026-07")
    shard = make_shard(tmp_path / "a.safetensors", 4)
    student = make_student(files, DORA)
    seen = write_seen(student, files, [shard], tmp_path / "seen") if see_once else None
    window = Windows([shard], 3, 3, ["plan"], seen=seen)[0]
    batch = {name: torch.stack([value] * 8).numpy() for name, value in window.items()}
    shapes = window_shapes(student, replace(OPTIONS, see_once=see_once))
    assert {n: (v.shape, v.dtype) for n, v in shapes.items()} == {
        n: (v.shape, np.dtype(v.dtype)) for n, v in batch.items()
    }


def test_without_files_a_model_is_made_up(driving_models: Callable[..., list[Path]]):
    given = driving_models("2026-07")
    with files_of(given, "0.10.3", "small") as files:
        assert files == given
    with files_of(None, "0.10.3", "small") as files:
        assert [read_contract(path).kind for path in files] == [Kind.VISION, Kind.POLICY]
        load_driver(files)
    assert not any(path.exists() for path in files)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("train", "9 windows of a step over 8 devices: expected a multiple of 8"),
        ("drive", "9 drives over 8 devices: expected a multiple of 8"),
        ("fly", "program='fly': expected warp, drive or train"),
    ],
)
def test_what_does_not_fit_is_refused(
    driving_models: Callable[..., list[Path]], program: str, words: str
):
    with pytest.raises(UsageError, match=words):
        compile_program(program, driving_models("2026-07"), "v6e-8", replace(OPTIONS, batch_size=9))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("-t", "v6e-3"), "There is no TPU topology 'v6e-3'"),
        (("--loss", "distill=1"), "the loss has a weight for a teacher, and none is given"),
        (("--layer", "nowhere"), "'nowhere' finds none of the"),
        (("--length", "0"), "length=0: expected 1 or more"),
    ],
)
def test_the_command_says_what_is_wrong(
    driving_models: Callable[..., list[Path]], more: tuple[str, ...], words: str
):
    given = ("compile", *map(str, driving_models("2026-07")), "--program", "train", *more)
    found = CliRunner().invoke(app, list(given))
    assert found.exit_code == 2
    assert words in " ".join(found.output.split())
