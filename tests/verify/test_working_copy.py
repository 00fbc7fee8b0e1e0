"""A copy of a folder is the same before each run of a script in it, whoever writes there."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tpuport.foundation.errors import UsageError
from tpuport.verify import processes
from tpuport.verify.processes import VerifiedScript, run


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder, and change to a copy of it."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    (original / "data" / "empty").mkdir(parents=True)
    for name in ("train.py", "log.csv", "data/cache.pt", "data/untouched"):
        (original / name).write_text(name)
    (tmp_path / "large").write_text("large")
    shutil.copytree(original, copy)
    (copy / "data" / "large").symlink_to(tmp_path / "large")
    monkeypatch.chdir(copy)
    return original


def _listed(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): "" if path.is_dir() else path.read_text()
        for path in folder.rglob("*")
    }


def test_each_run_begins_with_the_same_files(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What processes write that a script starts is not in the recorder's list."""
    copy, found = Path.cwd(), []

    def runs(*_: Any, **__: Any) -> int:
        found.append(_listed(copy))
        (copy / "last.pt").write_text("a checkpoint to resume from")
        (copy / "cache" / "deep").mkdir(parents=True)
        (copy / "cache" / "deep" / "index").write_text("1")
        with (copy / "log.csv").open("a") as log:
            log.write("a line")
        (copy / "data" / "cache.pt").unlink()
        (copy / "data" / "empty").rmdir()
        (copy / "data" / "large").unlink()
        (copy / "data" / "large").write_text("small")
        return 0

    monkeypatch.setattr(processes, "run_guarded", runs)
    (tmp_path / "out").mkdir()
    what = VerifiedScript(Path("train.py"), original=copied)
    ended = [run(what, side, tmp_path / "out") for side in ("eager", "ported", "disturbed")]
    assert found[0] == found[1] == found[2] == _listed(copy)
    assert os.readlink(copy / "data" / "large") == str(tmp_path / "large")
    # They are compared, and nobody is told that a run found what another one left.
    for one in ended:
        assert not one.left
        assert not one.overwritten
        assert (one.folder / "files" / "last.pt").is_file()
        assert (one.folder / "files" / "cache" / "deep" / "index").is_file()
        assert (one.folder / "files" / "log.csv").read_text() == "log.csva line"


def test_a_file_that_cannot_be_put_back_is_named(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(*_: Any, **__: Any) -> int:
        Path("log.csv").unlink()
        (copied / "log.csv").unlink()
        return 0

    monkeypatch.setattr(processes, "run_guarded", runs)
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match=r"log\.csv is not there"):
        run(VerifiedScript(Path("train.py"), original=copied), "eager", tmp_path / "out")
