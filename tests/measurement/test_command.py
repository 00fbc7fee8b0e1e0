"""`tpuport doctor --measure`: exit codes, files, and what is left where they cannot be written."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.full_disk import full_after
from tests.measurement.results import HEALTHY, error, outcome
from tpuport.cli.app import app
from tpuport.measurement import runner
from tpuport.measurement.records import Measurements

NO_COLOR = {"NO_COLOR": "1", "FORCE_COLOR": ""}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of the runs, whose result is that of a healthy slice."""
    asked: list[dict[str, Any]] = []
    gives(monkeypatch, outcome(*HEALTHY), asked)
    return asked


def gives(
    monkeypatch: pytest.MonkeyPatch, found: Measurements, asked: list[dict[str, Any]] | None = None
) -> None:
    def watch(limits: runner.TimeLimits, **given: Any) -> Measurements:
        if asked is not None:
            asked.append({"limits": limits, **given})
        given["progress"]("products", 0, 3)
        return found

    monkeypatch.setattr(runner, "watch", watch)


def call(*options: str) -> Any:
    return CliRunner().invoke(app, ["doctor", "--measure", *options], env=NO_COLOR)


def test_it_writes_the_file_and_the_page(tmp_path: Path, watched: list[dict[str, Any]]):
    out = tmp_path / "new" / "folder"
    done = call("--out", str(out), "--minutes", "2", "--limit", "30", "--only", "a", "--only", "b")
    assert done.exit_code == 0
    assert "everything that was tried works" in done.stdout
    assert sorted(path.name for path in out.iterdir()) == ["measurement.html", "measurement.json"]
    assert json.loads((out / "measurement.json").read_text())["calibration"]["platform"] == "tpu"
    (asked,) = watched
    assert asked["limits"] == runner.TimeLimits(60.0, 30.0, 120.0)
    assert (asked["only"], asked["targets"]) == (("a", "b"), ())
    assert "products" in done.stderr
    assert f"wrote {out}" in done.stderr


@pytest.mark.usefixtures("watched")
def test_json_goes_to_standard_output(tmp_path: Path):
    done = call("--out", str(tmp_path), "--json")
    assert json.loads(done.stdout)["outcome"]["device"]["count"] == 8


def test_a_problem_is_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gives(monkeypatch, outcome(error("kernel splash", 0.5)))
    assert call("--out", str(tmp_path)).exit_code == 1
    assert (tmp_path / "measurement.json").exists()


@pytest.mark.usefixtures("watched")
def test_on_a_full_disk_the_report_is_shown_and_the_old_file_kept(tmp_path: Path):
    old = tmp_path / "measurement.json"
    old.write_text("old")
    with full_after(100):
        done = call("--out", str(tmp_path))
    assert done.exit_code == 2
    assert "everything that was tried works" in done.stdout
    assert "was not saved: the disk is full" in done.stderr
    assert "the old one is as it was" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["measurement.json"]
    assert old.read_text() == "old"


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_measured(
    tmp_path: Path, watched: list[dict[str, Any]]
):
    (tmp_path / "file").write_text("")
    done = call("--out", str(tmp_path / "file" / "below"))
    assert done.exit_code == 2
    assert "cannot be made" in done.stderr
    assert watched == []


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path, watched: list[dict[str, Any]]):
    tmp_path.chmod(0o500)
    assert "choose another --out" in call("--out", str(tmp_path)).stderr
    assert watched == []
