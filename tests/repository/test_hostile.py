"""Repositories and scripts that get in the way: nothing breaks, and the answer says why."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.repository.test_before import run_script
from tests.repository.theirs import COMPILED, EQUAL, NET, TRAIN, port
from tpuport.foundation import guarded
from tpuport.foundation.guarded import run_guarded
from tpuport.repository import copies, runs
from tpuport.repository.copies import copy_repository
from tpuport.repository.landlock import refuse_writes_outside
from tpuport.repository.processes import Finished
from tpuport.repository.texts import read_text
from tpuport.verify.processes import NO_REFERENCE

_REFUSES = "import sys\nfrom tpuport.repository.landlock import refuse_writes_outside as refuse\n"


def test_what_is_no_file_is_not_copied(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    root.mkdir()
    (root / "a.py").write_text("1")
    os.mkfifo(root / "pipe")
    (root / "loop").symlink_to("loop")
    (root / "zero").symlink_to("/dev/zero")
    (root / "around").symlink_to("..")
    copy = tmp_path / "out" / "copy"
    assert copy_repository(root, copy, without=tmp_path / "out") == []
    assert sorted(path.name for path in copy.iterdir()) == ["a.py", "around", "loop", "zero"]
    assert (copy / "around").resolve() == tmp_path / "out"


def test_a_copy_can_be_written_to_and_deleted(tmp_path: Path) -> None:
    root = tmp_path / "repo"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "a.py").write_text("1")
    for path in (root / "sub" / "a.py", root / "sub", root):
        path.chmod(0o555 if path.is_dir() else 0o444)
    copy = tmp_path / "copy"
    for _ in range(2):
        copy_repository(root, copy, without=tmp_path / "out")
        assert copy.stat().st_mode & 0o700 == (copy / "sub").stat().st_mode & 0o700 == 0o700
        assert (copy / "sub" / "a.py").stat().st_mode & 0o200
        (copy / "sub").chmod(0o000)
    assert root.stat().st_mode & 0o200 == 0
    for path in (root, root / "sub"):
        path.chmod(0o755)


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "repo"
    root.mkdir()
    for name in ("a.py", "secret"):
        (root / name).touch()
    real = copies.shutil.copy2

    def copy2(source: str, target: str) -> str:
        if source.endswith("secret"):
            raise PermissionError(source)
        return real(source, target)

    monkeypatch.setattr(copies.shutil, "copy2", copy2)
    assert copy_repository(root, tmp_path / "copy", without=tmp_path / "out") == ["secret"]
    assert (tmp_path / "copy" / "a.py").exists()


def test_of_much_data_only_the_first_part_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_MOST", 25)
    root = tmp_path / "repo"
    root.mkdir()
    for name in ("a.bin", "b.bin", "c.bin", "z.py"):
        (root / name).write_text("0123456789")
    copy_repository(root, tmp_path / "copy", without=tmp_path / "out")
    links = [path.name for path in sorted((tmp_path / "copy").iterdir()) if path.is_symlink()]
    assert links == ["c.bin"]


def test_names_that_are_no_text_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def end(arguments: Any, **_: Any) -> Finished:
        asked.append(arguments)
        return Finished(0, json.dumps(COMPILED if arguments[0] == "compile" else EQUAL), "")

    monkeypatch.setattr(runs, "run_command", end)
    root = tmp_path / "r\u00e9 po"
    root.mkdir()
    (root / "-train.py").write_text(TRAIN)
    (root / "net.py").write_text(NET)
    (root / "gone.py").symlink_to("nowhere")
    try:
        Path(os.fsdecode(os.fsencode(root) + b"/bad\xff.py")).write_text("if x.item(): pass\n")
    except OSError:
        pytest.skip("the file system takes no such name")
    code, text = port(root, "--out", tmp_path / "out", "--run", "--json", "--", "--lr", "1")
    assert code in (0, 1), text
    assert asked[0][asked[0].index("--steps") - 1] == "./-train.py"
    assert "gone.py" in json.loads(text)["stages"]["read"]["answer"]
    assert "exec tpuport run ./-train.py" in (tmp_path / "out" / "run.sh").read_text()
    assert (tmp_path / "out" / "report.html").read_bytes().decode()


def test_what_cannot_be_read_is_no_text(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sh")
    (tmp_path / "zero.sh").symlink_to("/dev/zero")
    (tmp_path / "folder.sh").mkdir()
    (tmp_path / "bytes.sh").write_bytes(b"a\xff")
    names = ("pipe.sh", "zero.sh", "folder.sh", "none.sh", "bytes.sh")
    assert [read_text(tmp_path / name) for name in names] == ["", "", "", "", "a\ufffd"]


def test_a_file_that_is_no_python_is_named(tmp_path: Path) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "train.py").write_text("for x in y\n    loss.backward()\n")
    code, text = port(tmp_path / "repo", "--out", tmp_path / "out", "--json")
    stages = json.loads(text)["stages"]
    assert code == 4
    assert "Not read: train.py: no Python 3 that can be read in line 1" in stages["read"]["answer"]
    assert stages["entry"]["next"].startswith("mend what cannot be read (train.py: no Python 3")


@pytest.mark.parametrize(
    ("ended", "output", "said"),
    [
        (
            Finished(2, "", f"The script fails in eager PyTorch (exit status 3), {NO_REFERENCE}."),
            "",
            "before anything is ported (exit status 3).",
        ),
        (
            Finished(2, "", f"The script fails in eager PyTorch (exit status 1), {NO_REFERENCE}."),
            "a\nYou need four GPUs.\n",
            "before anything is ported (exit status 1; it ends with: You need four GPUs).",
        ),
        (
            Finished(2, "", f"The script fails in eager PyTorch (exit status 0), {NO_REFERENCE}."),
            "",
            "The script ends by itself, without an error and before its steps are recorded",
        ),
        (Finished(-9, "", ""), "", "the comparison with it: It was killed"),
        (
            Finished(2, "", f"The script fails (exit status -11), {NO_REFERENCE}."),
            "Fatal\nIt was ended by SIGSEGV.\n",
            "it ends with: It was ended by SIGSEGV",
        ),
    ],
)
def test_how_a_script_ended_is_said(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended: Finished,
    output: str,
    said: str,
) -> None:
    def end(_: Any, *, folder: Path, **__: Any) -> Finished:
        side = folder.parent / "verify" / "eager"
        side.mkdir(parents=True, exist_ok=True)
        (side / "output.txt").write_text(output)
        return ended

    monkeypatch.setattr(runs, "run_command", end)
    code, text = port(repository, "--out", tmp_path / "out", "--run", "--json")
    assert code == 4
    assert said in json.loads(text)["stages"]["verify"]["answer"]


@pytest.mark.parametrize("made", [True, False])
def test_a_script_that_does_not_end_after_its_steps_is_said_to(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, made: bool
) -> None:
    def end(_: Any, *, folder: Path, **__: Any) -> Finished:
        side = folder.parent / "verify" / "eager"
        side.mkdir(parents=True)
        if made:
            (side / "record.json").touch()
        return Finished(None, "", "")

    monkeypatch.setattr(runs, "run_command", end)
    options = ["--out", tmp_path / "out", "--run", "--steps", "1", "--json"]
    answer = json.loads(port(repository, *options)[1])["stages"]["verify"]["answer"]
    assert ("made its steps, and then did not end" in answer) == made
    assert ("did not make 1 step in 15 minutes" in answer) != made


def test_of_output_without_end_the_last_part_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded, "_MOST_OUTPUT", 100_000)
    monkeypatch.setattr(guarded, "_KEPT_OUTPUT", 1_000)
    monkeypatch.setattr(guarded, "_LOOKS_EVERY_S", 0.01)
    # The last line comes when what was before it has been shortened: written at that very moment,
    # in the microsecond between a look at the file and the cut, it would be left out, too.
    code = """
import time
for i in range(20_000):
    print("x" * 50 + str(i), flush=i % 100 == 0)
time.sleep(0.5)
print("the end")
"""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        status = run_guarded([sys.executable, "-c", code], stdout=out, stderr=err, seconds=60)
        out.seek(0)
        lines = out.read().decode().splitlines()
    assert status == 0
    assert any("[tpuport left out " in line for line in lines)
    assert lines[-1] == "the end"
    assert sum(map(len, lines)) <= 100_000


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find strays")
def test_a_stray_without_environment_is_known_by_its_output() -> None:
    code = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, env={}, start_new_session=True).pid, flush=True)
"""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        run_guarded([sys.executable, "-c", code], stdout=out, stderr=err, seconds=60)
        out.seek(0)
        stat = Path("/proc", out.read().decode().strip(), "stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_torch_says_which_file_it_may_not_write(tmp_path: Path) -> None:
    """It opens files in C++, of which Python hears nothing."""
    (tmp_path / "repo").mkdir()
    outside = tmp_path / "outside.pt"
    script = f"""
import torch
torch.save(1, "inside.pt")
try:
    torch.save(1, {str(outside)!r})
except PermissionError as error:
    assert "outside of its copy" in str(error)
else:
    raise AssertionError("written")
"""
    seen = run_script(tmp_path / "repo", script)
    assert not outside.exists()
    assert [one["what"] for one in seen if one["kind"] == "refused write"] == [str(outside)]


def test_the_kernel_refuses_what_python_does_not_see(tmp_path: Path) -> None:
    """A shell writes without Python, and so may a library in C++."""
    inside = tmp_path / "inside"
    inside.mkdir()
    code = f"""{_REFUSES}
import os, subprocess
if not refuse([{str(inside)!r}, "/nowhere", "/dev"]):
    sys.exit(77)
assert subprocess.run(["sh", "-c", "echo 1 > {inside}/a && echo 1 > /dev/null"]).returncode == 0
os.makedirs("{inside}/b")
os.rename("{inside}/a", "{inside}/b/a")
assert subprocess.run(["sh", "-c", "echo 1 > {tmp_path}/a"]).returncode != 0
assert subprocess.run(["rm", "{tmp_path}/theirs"]).returncode != 0
"""
    (tmp_path / "theirs").write_text("theirs")
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("this kernel has no Landlock, or an old one")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "theirs").read_text() == "theirs"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inside", "theirs"]


def test_elsewhere_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not refuse_writes_outside(["/"])
