"""What `--log` writes while stages train: numbers and pictures, each step once after a kill."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

import tpuport
from recipes.mae_dit import runs
from recipes.mae_dit.__main__ import app
from recipes.mae_dit.make_data import make_data
from recipes.mae_dit.sinks import make_sinks
from tests.recipes.killing import cached_in, kill_when
from tests.recipes.mae_dit import conftest
from tests.recipes.mae_dit.eager import Small, seeded_features
from tests.recipes.mae_dit.tiny import write
from tests.training.test_metric_writers import read_events
from tpuport.foundation.errors import UsageError

# Reads slowly, so that it is not through before it is killed.
SCRIPT = """
import time
from recipes.mae_dit import data, runs
from recipes.mae_dit.__main__ import app
from tests.recipes.mae_dit.eager import seeded_features
read = data.Pictures.__getitem__
data.Pictures.__getitem__ = lambda self, index: time.sleep(0.1) or read(self, index)
runs.load_lpips = lambda *_, **__: seeded_features()
app()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sinks")
    make_data(folder / "data", count=12, size=20)
    write(folder)
    sections = conftest.sections()
    sections["arch"]["stage_1"] = {"target": f"{Small.__module__}.Small"}
    (folder / "stage1.yaml").write_text(yaml.safe_dump(sections))
    return folder


def shown(out: Path) -> dict[str, list[Any]]:
    """Return what TensorBoard shows by name: steps with a number or the size of a picture."""
    found: list[tuple[str, int, Any]] = []
    for event in read_events(out / "tensorboard"):
        if event.session_log.status == event.session_log.START:
            found = [one for one in found if one[1] < event.step]
        for value in event.summary.value:
            size = (value.image.width, value.image.height)
            content = size if value.HasField("image") else value.simple_value
            found.append((value.tag, event.step, content))
    return {tag: [one[1:] for one in found if one[0] == tag] for tag, *_ in found}


def test_stage1_draws_and_goes_on_after_a_kill(folder: Path, tmp_path: Path, monkeypatch: Any):
    pytest.importorskip("tensorboardX")
    monkeypatch.setattr(runs, "load_lpips", lambda *_, **__: seeded_features())
    given = ["stage1", str(folder / "stage1.yaml"), "--data", str(folder / "data")]
    given += ["--log", "json,tensorboard", "--log-every", "1", "--grid-every", "3"]
    whole, out = tmp_path / "whole", tmp_path / "out"

    def run(where: Path) -> None:
        with tpuport.compile_cache(tmp_path / "programs", min_compile_seconds=0.0):
            done = CliRunner().invoke(app, [*given, "-o", str(where)])
        assert done.exit_code == 0, done.output

    run(whole)
    numbers = shown(whole)
    assert [step for step, _ in numbers["loss"]] == [*range(1, 10)]
    lines = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 10)]
    assert [value for _, value in numbers["loss"]] == pytest.approx([x["loss"] for x in lines])
    pictures = numbers["evaluate/reconstructions"]
    files = sorted((whole / "grids").iterdir())
    assert [step for step, _ in pictures] == [3, 6, 9]
    assert [file.name for file in files] == [f"step-{step:06d}.png" for step in (3, 6, 9)]
    with Image.open(files[-1]) as first, Image.open(files[0]) as other:
        assert first.size == pictures[-1][1] == (8 * 16, 2 * 16 * -(-min(16, _valid(folder)) // 8))
        assert np.asarray(first)[:16].tolist() == np.asarray(other)[:16].tolist()  # the images
        assert np.asarray(first)[16:32].tolist() != np.asarray(other)[16:32].tolist()

    # A copy: what is killed may leave half a program, which jax warns of and compiles anew.
    programs = shutil.copytree(tmp_path / "programs", tmp_path / "copied")
    kill_when(
        lambda: any(one.name.isdigit() for one in out.glob("states/*")),
        *("-W", "ignore", "-c", SCRIPT, *given, "-o", str(out)),
        **cached_in(programs),
    )
    run(out)
    found = shown(out)
    assert found["loss"] == numbers["loss"]
    assert found["evaluate/reconstructions"] == pictures
    for file in files:
        assert (out / "grids" / file.name).read_bytes() == file.read_bytes()


def _valid(folder: Path) -> int:
    return len([*(folder / "data" / "val").rglob("*.JPEG")])


def test_stage2_shows_its_samples(folder: Path, tmp_path: Path):
    pytest.importorskip("tensorboardX")
    given = ["stage2", str(folder / "stage2.yaml"), "--data", str(folder / "data")]
    given += ["--stage1", str(folder / "stage1"), "-o", str(tmp_path / "out"), "--steps", "2"]
    given += ["--log", "tensorboard", "--log-every", "1", "--grid-every", "1"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    found = shown(tmp_path / "out")
    assert [step for step, _ in found["loss"]] == [1, 2]
    assert found["evaluate/samples"] == [(1, (8 * 16, 4 * 16)), (2, (8 * 16, 4 * 16))]


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_a_missing_package_is_one_error(
    stage: str, name: str, package: str, folder: Path, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setattr("tpuport.training.metric_writers._has", lambda name: False)
    given = [stage, str(folder / f"{stage}.yaml"), "-o", str(tmp_path / "out"), "--log", name]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2
    said = " ".join(done.output.split())
    assert f"needs {package}" in said
    assert 'pip install "tpuport[log]"' in said
    assert not (tmp_path / "out").exists()


def test_an_unknown_sink_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match="--log tensorbord: expected json, tensorboard, wandb"):
        make_sinks("json,tensorbord", tmp_path)
