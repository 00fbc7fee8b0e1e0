"""The commands one after the other, as the page of the recipe has them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tpuport
from recipes.hunyuan_video.video import read_video
from recipes.openpilot.__main__ import COMMANDS, app
from recipes.openpilot.contract import read_contract


def run(*given: Any) -> Result:
    """A command in this process."""
    return CliRunner().invoke(app, list(map(str, given)))


def said(result: Result) -> str:
    return " ".join(result.output.split())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Routes, a model and a training set."""
    folder = tmp_path_factory.mktemp("chain")
    made = run("make-data", folder, "--routes", 1, "--segments", 1, "--seconds", 1)
    assert made.exit_code == 0, made.output
    prepared = run("prepare", folder / "routes", "--out", folder / "set")
    assert prepared.exit_code == 0, prepared.output
    assert "40 frames of 2 segments in 2 unbroken runs; 0 frames left out" in said(prepared)
    return folder


@pytest.fixture
def _compiled_once(tmp_path: Path) -> Iterator[None]:
    """The model that is evaluated and the one beside it are one program."""
    with tpuport.compile_cache(tmp_path / "programs"):
        yield


@pytest.mark.usefixtures("_compiled_once")
def test_a_model_goes_through_all_of_them(data: Path, tmp_path: Path):
    model, out = data / "model" / "driving_supercombo.onnx", tmp_path / "run"
    # One layer, and few frames: what is in a step is tested elsewhere.
    windows = ("--warmup", 1, "--length", 3, "--batch-size", 2, "--steps", 3, "--save-every", 2)
    layers = ("--layer", "plan", "--rank", 2)
    losses = ("--loss", "path=1", "--loss", "distill=0.1")
    teacher = tmp_path / "teacher"
    labelled = run("label", model, "--data", data / "set", "--out", teacher, "--host")
    assert labelled.exit_code == 0, labelled.output
    given = ("--data", data / "set", "--out", out, "--teacher", teacher, *windows, *losses, *layers)
    trained = run("train", model, *given)
    assert trained.exit_code == 0, trained.output
    assert json.loads((out / "arguments.json").read_text())["options"]["steps"] == 3

    exported = run("export", out, "--out", tmp_path / "model")
    assert exported.exit_code == 0, exported.output
    assert "onnxruntime and the trained module differ by" in said(exported)
    tuned = tmp_path / "model" / model.name
    before, after = read_contract(model), read_contract(tuned)
    assert (before.inputs, before.slices, before.metadata) == (
        after.inputs,
        after.slices,
        after.metadata,
    )
    assert tuned.read_bytes() != model.read_bytes()

    film, plot = tmp_path / "film.mp4", tmp_path / "errors.png"
    pictures = ("--film", film, "--plot", plot, "--warmup", 4)
    shown = run("evaluate", tuned, "--data", data / "set", "--against", model, *pictures)
    assert shown.exit_code == 0, shown.output
    assert "base model" in said(shown)
    assert "path_error_m@1s" in shown.output
    assert read_video(film)[0].shape == (16, 256, 1024, 3)
    assert plot.stat().st_size > 0

    beside = run("export", out, "--out", data / "model")
    assert beside.exit_code == 2
    assert "the original files are there" in said(beside)


def test_what_is_wrong_is_said(data: Path, tmp_path: Path):
    model = data / "model" / "driving_supercombo.onnx"
    given = ("train", model, "--data", data / "set", "--out", tmp_path)
    for loss in ("plan", "plan=much", "plans=1"):
        wrong = run(*given, "--loss", loss)
        assert wrong.exit_code == 2
        assert f"--loss {loss}: expected name=number, with a name of plan, path" in said(wrong)
    nowhere = run("export", tmp_path / "no run", "--out", tmp_path)
    assert nowhere.exit_code == 2
    assert "What to do: begin with `train`" in said(nowhere)


def test_help_says_what_it_is_for():
    found = run("--help")
    assert found.exit_code == 0
    assert "For research only" in said(found)
    assert all(name in found.output for name in COMMANDS)
