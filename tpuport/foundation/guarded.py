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
# A command that prints more than this loses the middle of it: what it printed last stays.
_MOST_OUTPUT, _KEPT_OUTPUT = 64 * 2**20, 4 * 2**20
_LOOKS_EVERY_S = 0.5
_LOOKS_AT_ITS_END = 8


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

    They are stopped as well if this process is killed. Of output without end the last part stays.

    Args:
        command: The command.
        stdout: The file for its output, which can be read too.
        stderr: Such a file for its errors, or `subprocess.STDOUT`.
        seconds: The time that it may take; None for any.
        folder: The folder in which it runs; the current one if left out.
        environment: Variables for it, besides those of this process.
        temporary: A folder that is deleted at the end.

    Returns:
        Its exit status; None if it was stopped after its time.
    """
    mark = secrets.token_hex(16)
    marks = f"{os.environ.get(_MARK, '')}/{mark}"
    outputs = [stdout] if isinstance(stderr, int) else [stdout, stderr]
    for output in outputs:
        _append_only(output)
    with _guarded(mark, temporary, outputs):
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
            return _wait(process, outputs, seconds)
        finally:
            _stop(process)
            _shorten(outputs)


def run_attached(command: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run a command with the terminal, input and output of this process, and return its status.

    It ends with this process, however this one ends, with all that it started.

    Args:
        command: The command.
        environment: Variables for it, besides those of this process.
    """
    mark = secrets.token_hex(16)
    marks = f"{os.environ.get(_MARK, '')}/{mark}"
    with _guarded(mark):
        process = subprocess.Popen(command, env={**os.environ, **(environment or {}), _MARK: marks})
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()


def _append_only(file: IO[Any]) -> None:
    """Let everything that writes to a file do so at its end, wherever that is by then."""
    if os.name != "posix":
        return
    import fcntl

    number = file.fileno()
    fcntl.fcntl(number, fcntl.F_SETFL, fcntl.fcntl(number, fcntl.F_GETFL) | os.O_APPEND)


def _wait(
    process: "subprocess.Popen[bytes]", outputs: Sequence[IO[Any]], seconds: float | None
) -> int | None:
    """Return the status of a process, or None after a time; keep its output short meanwhile."""
    until = float("inf") if seconds is None else time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        try:
            return process.wait(min(left, _LOOKS_EVERY_S))
        except subprocess.TimeoutExpired:
            _shorten(outputs)
    return process.poll()


def _shorten(outputs: Sequence[IO[Any]]) -> None:
    """Leave out all but the end of files that are too long."""
    for file in outputs if os.name == "posix" else ():
        number = file.fileno()
        size = os.fstat(number).st_size
        if size > _MOST_OUTPUT:
            end = os.pread(number, _KEPT_OUTPUT, size - _KEPT_OUTPUT)
            # What is written while this is read is the last that is known of a process that ends.
            # One that writes faster than that is read does not end now.
            for _ in range(_LOOKS_AT_ITS_END):
                added = os.pread(number, _KEPT_OUTPUT, size)
                if not added:
                    break
                size, end = size + len(added), (end + added)[-_KEPT_OUTPUT:]
            os.ftruncate(number, 0)
            said = f"[tpuport left out {size - len(end)} bytes of output here]\n"
            os.write(number, said.encode() + end)


@contextmanager
def _guarded(
    mark: str, temporary: str | None = None, outputs: Sequence[IO[Any]] = ()
) -> Iterator[None]:
    """Have a process that cleans up at the end of the block, or of this process if it is killed."""
    files = [os.fstat(output.fileno()) for output in outputs]
    known = ",".join(f"{file.st_dev}:{file.st_ino}" for file in files)
    guard = subprocess.Popen(
        [*_GUARD, mark, known, *filter(None, [temporary])],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield
    finally:
        guard.communicate()


def guard() -> None:
    """Wait for the end of the process that started this one, then stop what has its mark."""
    mark, known, *temporary = sys.argv[1:]
    starter = os.getppid()
    sys.stdin.read()
    _stop_strays(mark.encode(), set(filter(None, known.split(","))), starter)
    for folder in temporary:
        _delete(folder)


def _delete(folder: str) -> None:
    """Delete a folder in which a process that is ending may still write."""
    until = time.monotonic() + _GRACE_S
    shutil.rmtree(folder, ignore_errors=True)
    while os.path.exists(folder) and time.monotonic() < until:
        time.sleep(0.05)
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


def _stop_strays(mark: bytes, outputs: set[str], starter: int) -> None:
    """Kill the processes that a command started in groups of their own, where /proc shows them.

    Args:
        mark: What is in their environment.
        outputs: The files that they print to, which tell those whose environment was cleared.
        starter: The process that started the command, which is left alone.
    """
    until = time.monotonic() + _GRACE_S
    while time.monotonic() < until:
        found = [
            int(folder.name)
            for folder in Path("/proc").glob("[0-9]*")
            if int(folder.name) != starter and (_has_mark(folder, mark) or _prints(folder, outputs))
        ]
        for number in found:
            with suppress(OSError):  # it ended
                os.kill(number, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.05)


def _has_mark(process: Path, mark: bytes) -> bool:
    start = f"{_MARK}=".encode()
    try:
        entries = (process / "environ").read_bytes().split(b"\0")
    except OSError:  # it ended, or is somebody else's
        return False
    return any(entry.startswith(start) and mark in entry for entry in entries)


def _prints(process: Path, outputs: set[str]) -> bool:
    """Return whether the output or the errors of a process go to one of some files."""
    for number in (1, 2):
        try:
            file = (process / "fd" / str(number)).stat()
        except OSError:
            continue
        if f"{file.st_dev}:{file.st_ino}" in outputs:
            return True
    return False
