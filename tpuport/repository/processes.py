"""Commands of tpuport that run other people's code, each in a group of processes of its own."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_TPUPORT = (sys.executable, "-c", "from tpuport.cli.app import app; app()")
_GUARD = (sys.executable, "-c", "from tpuport.repository.processes import guard; guard()")
# A variable by which a process is known that left the group of the command.
_MARK = "TPUPORT_STARTED_BY"
# What a process may take to end by itself once it is asked to.
_GRACE_S = 5.0
_TAIL = 25


@dataclass(frozen=True)
class Finished:
    """How a command ended.

    Attributes:
        status: Its exit status; None if it was stopped after its time.
        output: What it wrote to standard output.
        tail: The last lines of what it wrote to standard error.
    """

    status: int | None
    output: str
    tail: str


def run_command(
    arguments: Sequence[str],
    *,
    folder: Path,
    log: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> Finished:
    """Run a command of tpuport, and stop it and all that it started after some time.

    They are stopped as well if this process is killed. Temporary files are deleted.

    Args:
        arguments: The command and its options.
        folder: The folder in which it runs.
        log: The file for what it wrote to standard error.
        seconds: The time that it may take.
        environment: Variables for it, besides those of this process.
    """
    mark = secrets.token_hex(16)
    # A short name: sockets of worker processes are there, and their paths have a limit.
    temporary = tempfile.mkdtemp(prefix="tpuport-")
    # Not in the folder of results: the command may look for files that the script wrote.
    with (
        _guarded(mark, temporary),
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        process = subprocess.Popen(
            [*_TPUPORT, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env={**os.environ, **(environment or {}), "TMPDIR": temporary, _MARK: mark},
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _stop(process)
        output, errors = _text(out), _text(err)
    log.write_text(errors)
    return Finished(status, output, "\n".join(errors.splitlines()[-_TAIL:]))


@contextmanager
def _guarded(mark: str, temporary: str) -> Iterator[None]:
    """Have a process that cleans up at the end of the block, or of this process if it is killed."""
    guard = subprocess.Popen(
        [*_GUARD, mark, temporary], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        guard.communicate()


def guard() -> None:
    """Wait for the end of the process that started this one, then stop what has its mark."""
    mark, temporary = sys.argv[1:]
    sys.stdin.read()
    _stop_strays(f"{_MARK}={mark}".encode())
    shutil.rmtree(temporary, ignore_errors=True)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a process and everything in its group, which outlives it if it was started there."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if process.poll() is None:
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def _stop_strays(mark: bytes) -> None:
    """Kill the processes that a command started in groups of their own, where /proc shows them."""
    until = time.monotonic() + _GRACE_S
    while time.monotonic() < until:
        found = False
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended, or is somebody else's
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found = True
                    os.kill(int(folder.name), signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)
