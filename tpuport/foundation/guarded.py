"""Processes that are stopped with all that they started: after a time, or if this one is killed."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_GUARD = (sys.executable, "-c", "from tpuport.foundation.guarded import guard; guard()")
# A variable by which a process is known that left the group of the one that was started. A guarded
# process that starts others of its own adds to it.
_MARK = "TPUPORT_STARTED_BY"
# What a process may take to end by itself once it is asked to.
_GRACE_S = 5.0


def run_guarded(
    command: Sequence[str],
    *,
    stdout: IO[Any],
    stderr: IO[Any] | int,
    seconds: float | None = None,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    temporary: str | None = None,
) -> int | None:
    """Run a command without standard input, and stop it and all that it started after some time.

    They are stopped as well if this process is killed.

    Args:
        command: The command.
        stdout: The file for its output.
        stderr: The file for its errors, or `subprocess.STDOUT`.
        seconds: The time that it may take; None for any.
        folder: The folder in which it runs; the current one if left out.
        environment: Variables for it, besides those of this process.
        temporary: A folder that is deleted at the end.

    Returns:
        Its exit status; None if it was stopped after its time.
    """
    mark = secrets.token_hex(16)
    marks = f"{os.environ.get(_MARK, '')}/{mark}"
    with _guarded(mark, temporary):
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            env={**os.environ, **(environment or {}), _MARK: marks},
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _stop(process)


def run_attached(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command with the terminal, input and output of this process, and return its status.

    It ends with this process, however this one ends, with all that it started.

    Args:
        command: The command.
        environment: Variables for it, besides those of this process.
    """
    mark = secrets.token_hex(16)
    marks = f"{os.environ.get(_MARK, '')}/{mark}"
    with _guarded(mark, None):
        process = subprocess.Popen(command, env={**os.environ, **(environment or {}), _MARK: marks})
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()


@contextmanager
def _guarded(mark: str, temporary: str | None) -> Iterator[None]:
    """Have a process that cleans up at the end of the block, or of this process if it is killed."""
    guard = subprocess.Popen(
        [*_GUARD, mark, *filter(None, [temporary])], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        guard.communicate()


def guard() -> None:
    """Wait for the end of the process that started this one, then stop what has its mark."""
    mark, *temporary = sys.argv[1:]
    sys.stdin.read()
    _stop_strays(mark.encode())
    for folder in temporary:
        shutil.rmtree(folder, ignore_errors=True)


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
    until, start = time.monotonic() + _GRACE_S, f"{_MARK}=".encode()
    while time.monotonic() < until:
        found = False
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended, or is somebody else's
                entries = (folder / "environ").read_bytes().split(b"\0")
                if any(e.startswith(start) and mark in e for e in entries):
                    found = True
                    os.kill(int(folder.name), signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)
