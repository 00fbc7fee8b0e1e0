"""A disk that fills up while labels, states and models are written: said, and nothing is lost."""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import tpuport
from recipes.openpilot.exporting import export
from recipes.openpilot.importing import import_onnx
from recipes.openpilot.losses import LossWeights
from recipes.openpilot.shards import write_index
from recipes.openpilot.student import DoraOptions
from recipes.openpilot.teacher import label, read_outputs
from recipes.openpilot.train import TrainOptions, train
from tests.full_disk import full_after
from tests.recipes.openpilot.frames import make_shard
from tests.recipes.openpilot.onnx_graphs import random_rows
from tpuport.foundation.errors import CheckpointError
from tpuport.training import JsonLines

FULL = r"was not saved: the disk is full .*What to do: make room there"
# Frames of two segments: what is made of the first fits where the second's does not.
SIZES = (5, 14)
OPTIONS = TrainOptions(
    dora=DoraOptions(("temporal_hydra/plan",), rank=2),
    losses=LossWeights(plan=0.0, path=1.0),
    **{"warmup": 1, "length": 3, "batch_size": 2, "steps": 4, "save_every": 2, "log_every": 1},
)


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    (tmp_path / "set").mkdir()
    return [make_shard(tmp_path / "set" / f"{n}.safetensors", n) for n in SIZES]


def names(folder: Path) -> list[str]:
    """Of all that is there, also what is hidden."""
    return sorted(path.name for path in folder.iterdir())


def test_labels_of_finished_segments_are_kept(
    driving_models: Callable[..., list[Path]], shards: list[Path], tmp_path: Path
):
    files, out, told = driving_models("0.10.3"), tmp_path / "teacher", []

    def run() -> list[Path]:
        return label(files, shards, out, host=True, done=lambda path, n: told.append(n))

    with full_after(80_000), pytest.raises(CheckpointError, match=f"14.safetensors {FULL}"):
        run()
    assert names(out) == ["5.safetensors", "teacher.json"]
    first = (out / "5.safetensors").stat().st_mtime_ns
    paths = run()
    assert told == [5, 14]
    assert paths[0].stat().st_mtime_ns == first
    assert [len(read_outputs(path)[0]) for path in paths] == [5, 14]


class _Filling(JsonLines):
    """A log that fills the disk up after the third step, when the state of the second is there."""

    disk: ExitStack

    def write(self, step: int, values: Mapping[str, float]) -> None:
        super().write(step, values)
        if step == 3:
            deadline = time.monotonic() + 60
            while not (self.path.parent / "states" / "2").is_dir():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            self.disk.enter_context(full_after(500_000))


# Writes of orbax that end after its own loop has closed, as the first of them failed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_training_goes_on_after_the_last_whole_state(
    driving_models: Callable[..., list[Path]],
    shards: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    files, out = driving_models("0.10.3"), tmp_path / "run"
    # While what frozen layers see is written.
    with full_after(60_000), pytest.raises(CheckpointError, match=f"seen/14.safetensors {FULL}"):
        train(files, shards, out, OPTIONS)
    assert names(out) == ["run.json", "seen"]
    assert names(out / "seen") == ["5.safetensors"]
    seen = (out / "seen" / "5.safetensors").stat().st_mtime_ns
    # While a state is written.
    said = r"disk is full.*states of the steps \[2\] are there.*make room there, and start again"
    # The next two runs have one program.
    programs = tpuport.compile_cache(tmp_path / "programs")
    with monkeypatch.context() as patch, programs, ExitStack() as disk:
        _Filling.disk = disk
        patch.setattr("recipes.openpilot.train.JsonLines", _Filling)
        with pytest.raises(CheckpointError, match=said):
            train(files, shards, out, OPTIONS)
    assert (out / "seen" / "5.safetensors").stat().st_mtime_ns == seen
    assert [name for name in names(out / "states") if name.isdigit()] == ["2"]
    lines = (out / "log.jsonl").read_text().splitlines()[:2]
    with programs:
        train(files, shards, out, OPTIONS)
    assert names(out / "states") == ["2", "4"]
    after = (out / "log.jsonl").read_text().splitlines()
    assert after[:2] == lines  # steps 1 and 2 were not taken again
    assert [int(re.findall(r'"step": (\d)', line)[0]) for line in after] == [1, 2, 3, 4]


def test_a_model_is_written_whole_or_not_at_all(
    driving_models: Callable[..., list[Path]], tmp_path: Path
):
    path, out = driving_models("0.10.3")[1], tmp_path / "model" / "driving_policy.onnx"
    graph, rows = import_onnx(path), random_rows(path)

    def full(kept: str) -> None:
        with full_after(100_000), pytest.raises(CheckpointError, match=FULL) as error:
            export(graph, path, out, rows=rows)
        assert f"{out} was not saved" in str(error.value)
        assert kept in str(error.value)

    full("nothing was left there")
    assert names(out.parent) == []
    export(graph, path, out, rows=rows)
    before = out.read_bytes()
    with torch.no_grad():
        next(graph.parameters()).add_(0.01)
    full("the old one is as it was")
    assert names(out.parent) == [out.name]
    assert out.read_bytes() == before
    assert export(graph, path, out, rows=rows).changed
    assert out.read_bytes() != before


def test_an_index_is_written_whole_or_not_at_all(tmp_path: Path):
    write_index(tmp_path, {"a--0": {"frames": 3}})
    before = (tmp_path / "index.json").read_bytes()
    with full_after(10), pytest.raises(CheckpointError, match=f"index.json {FULL}"):
        write_index(tmp_path, {"a--0": {"frames": 3}, "a--1": {"frames": 4}})
    assert names(tmp_path) == ["index.json"]
    assert (tmp_path / "index.json").read_bytes() == before
