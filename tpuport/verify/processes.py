"""The two runs of a script, each in its own process, and the files that they write."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.foundation.guarded import run_guarded
from tpuport.verify.working_copy import find_links, put_back

EAGER, PORTED = "eager", "ported"
# Eager PyTorch again, with what rounding could add to the gradients.
DISTURBED = "disturbed"
# What is said of a run that nothing here has stopped.
KILLED = "It was killed: most likely memory ran out."
# What is said of a script that fails in eager PyTorch.
NO_REFERENCE = "so there is nothing to compare with"
# Ends a reason for no verdict that holds only because time was over.
MORE_TIME = "more time may tell"
# A file that the recorder leaves once the script has called `backward()`, however it ends.
TRAINED = "trained"
# Where the recorder lists the paths that the script writes.
WRITTEN = "written.jsonl"
# The file by which a folder is known to be one of ours.
RESULT = "verify.json"
_TPUPORT = (sys.executable, "-c", "from tpuport.cli.app import app; app()", "run", "--quiet")
# The option of `tpuport run` that changes what an import finds, and not what is computed.
# Without these a script's imports fail, and calls that are programs are not met.
_OF_ALL_RUNS = ("--absent", "--program")
_SKIPPED = {".git", ".hg", "__pycache__", ".venv", "node_modules", "site-packages"}
_TAIL, _LONGEST_LINE = 25, 2000


@dataclass(frozen=True)
class VerifiedScript:
    """What to run, and how.

    Attributes:
        script: The path of the script.
        arguments: Its arguments.
        steps: The number of optimizer steps after which it is stopped.
        seed: The seed of Python, numpy and torch before it starts.
        plain: Whether the reference is plain Python, without CUDA being emulated.
        options: Options of `tpuport run` for the ported run; `--absent` and `--program` are for
            all runs in which CUDA is emulated.
        before: A Python file that each run executes before the script, under the name
            `__before__`, with the folder of the run as `FOLDER`.
        environment: Variables for all runs.
        original: The folder that the current one is a copy of, in which nobody else works: after
            each run, what it wrote there is moved away, whoever wrote it, and what it changed or
            deleted is copied again. None to leave what is not known to be the script's.
    """

    script: Path
    arguments: Sequence[str] = ()
    steps: int = 20
    seed: int = 0
    plain: bool = False
    options: Sequence[str] = ()
    before: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    original: Path | None = None


@dataclass(frozen=True)
class FinishedRun:
    """One run.

    Attributes:
        folder: Where its recordings, its output and its files are.
        status: Its exit status; None if it was stopped after its time.
        overwritten: The files that it changed.
        left: New files that are not known to be its own, which stay where they are.
        seconds: What it took.
    """

    folder: Path
    status: int | None
    overwritten: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def recorded(self) -> bool:
        """Return whether it came to its end and wrote what it recorded."""
        return self.status == 0 and (self.folder / "record.json").exists()

    @property
    def tail(self) -> str:
        """Return the last lines that the run printed."""
        lines = last_lines((self.folder / "output.txt").read_text(errors="replace"))
        return "\n".join(filter(None, [lines, ended_by_signal(self.status)]))


def ended_by_signal(status: int | None) -> str:
    """Return which signal ended a process, or one that a shell started; empty if none did."""
    number = next((n for n in signal.Signals if status in (-n, 128 + n)), None)
    if number is None:
        return ""
    return KILLED if number == signal.SIGKILL else f"It was ended by {number.name}."


def last_lines(text: str) -> str:
    """Return the last lines of a text, each with what a page has room for."""
    return "\n".join(line[:_LONGEST_LINE] for line in text.rstrip().splitlines()[-_TAIL:])


def prepare(out: Path, script: Path) -> None:
    """Make an empty folder for the results.

    Raises:
        UsageError: there is no such script, or the folder holds something else.
    """
    if not script.is_file():
        raise UsageError(f"There is no file {script} to verify.")
    if out.exists() and any(out.iterdir()):
        if not (out / RESULT).exists():
            raise UsageError(f"{out} holds other files. Name another folder with --out.")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / RESULT).write_text("{}")


def run(
    what: VerifiedScript,
    side: str,
    out: Path,
    settings: Mapping[str, Any] | None = None,
    seconds: float | None = None,
) -> FinishedRun:
    """Run the script and gather what it recorded and wrote.

    New files below the current folder and the script's that it wrote are moved away, so that the
    second run begins as the first did. What others write there meanwhile stays.

    Args:
        what: The script.
        side: The name of the run; only `PORTED` is ported.
        out: The folder for the results.
        settings: Of the recorder, and of what is around the script.
        seconds: The time after which it is stopped, with all that it started; None for any.
    """
    folder = (out / side).resolve()
    folder.mkdir()
    recorder = folder / "recorder.py"
    shutil.copy(Path(__file__).with_name("recorder.py"), recorder)
    file = folder / "settings.json"
    wanted = {"steps": what.steps, "seed": what.seed, "disturbed": side == DISTURBED}
    wanted["before"] = None if what.before is None else str(what.before.resolve())
    wanted |= {
        "folder": str(folder),
        "trained": TRAINED,
        "written": WRITTEN,
        "optimizers": 0,
        "noise": {},
        "around": [],
        **(settings or {}),
    }
    file.write_text(json.dumps(wanted))
    script = what.script.resolve()
    roots = _roots([Path.cwd(), script.parent])
    before = _files(roots, out.resolve())
    folders = _folders(roots, out.resolve())
    links = find_links(roots, _SKIPPED)
    command = [*_command(what, side, script), str(recorder), str(file), str(what.script)]
    started = time.monotonic()
    with (folder / "output.txt").open("w+b") as output:
        status = run_guarded(
            [*command, *what.arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            seconds=seconds,
            environment={"PYTHONHASHSEED": str(what.seed), **what.environment},
        )
    took = time.monotonic() - started
    written = written_paths(folder / WRITTEN)
    after = _files(roots, out.resolve())
    if what.original is not None:
        # Nobody else writes there: what is new is the script's, or of a process that it started.
        written |= {*after, *_folders(roots, out.resolve())}
    changed, left = _gather(roots, before, after, written, folder / "files")
    for made in sorted(_folders(roots, out.resolve()) - folders, reverse=True):
        if made in written and not any(made.iterdir()):
            made.rmdir()
    if what.original is not None:
        put_back(before, folders, links, what.original)
        changed = ()
    return FinishedRun(folder, status, changed, left, took)


def _command(what: VerifiedScript, side: str, script: Path) -> list[str]:
    if side == PORTED:
        return [*_TPUPORT, "--path", str(script.parent), *what.options]
    if what.plain:
        return [sys.executable]
    return [*_TPUPORT, "--no-port", "--no-rewrite", *_for_all_runs(what.options)]


def _for_all_runs(options: Sequence[str]) -> list[str]:
    """Return the options, with their values, that eager PyTorch needs as well."""
    found: list[str] = []
    for index, option in enumerate(options):
        if option in _OF_ALL_RUNS:
            found += options[index : index + 2]
        elif option.partition("=")[0] in _OF_ALL_RUNS:
            found.append(option)
    return found


def _roots(folders: Sequence[Path]) -> list[Path]:
    """Return the folders that are not below another one."""
    resolved = sorted({folder.resolve() for folder in folders})
    return [f for f in resolved if not any(f != o and f.is_relative_to(o) for o in resolved)]


def _files(roots: Sequence[Path], out: Path) -> dict[Path, tuple[int, int]]:
    """Return the files below some folders, with what shows that one was written."""
    found = {}
    for root in roots:
        for folder, names, files in os.walk(root):
            names[:] = [n for n in names if n not in _SKIPPED and Path(folder, n) != out]
            for name in files:
                path = Path(folder, name)
                if path.is_file() and not path.is_symlink():
                    stat = path.stat()
                    found[path] = (stat.st_mtime_ns, stat.st_size)
    return found


def _folders(roots: Sequence[Path], out: Path) -> set[Path]:
    found = set()
    for root in roots:
        for folder, names, _ in os.walk(root):
            names[:] = [n for n in names if n not in _SKIPPED and Path(folder, n) != out]
            found.update(Path(folder, name) for name in names)
    return found


def written_paths(file: Path) -> set[Path]:
    """Return the paths that a run wrote, with those that what it wrote was renamed to."""
    written: set[Path] = set()
    lines = file.read_text().splitlines() if file.exists() else []
    for line in lines:
        try:
            paths = [Path(path) for path in json.loads(line)]
        except ValueError:  # the run was stopped while it wrote
            continue
        old, new = (path.parent.resolve() / path.name for path in (paths[0], paths[-1]))
        if len(paths) == 1:
            written.add(new)
        else:
            written |= {new / path.relative_to(old) for path in written if path.is_relative_to(old)}
    return written


def _gather(
    roots: Sequence[Path],
    before: dict[Path, tuple[int, int]],
    after: dict[Path, tuple[int, int]],
    written: set[Path],
    to: Path,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Move new files that a run wrote, and copy changed ones.

    Returns:
        The names of the changed ones, and of new ones that somebody else may have written.
    """
    overwritten, left = [], []
    for path, seen in after.items():
        if before.get(path) == seen:
            continue
        root = next(r for r in roots if path.is_relative_to(r))
        name = str(path.relative_to(root))
        if path not in written:
            left += [] if path in before else [name]
            continue
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path in before:
            overwritten.append(name)
            shutil.copy2(path, target)
        else:
            shutil.move(path, target)
    return tuple(overwritten), tuple(left)
