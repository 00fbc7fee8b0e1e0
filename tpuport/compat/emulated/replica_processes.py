"""`tpuport run --replicas N`: starts the command N times, and ends all with the first error.

Imports no framework: this process only waits.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

from tpuport.foundation.errors import UsageError

# What each replica is told: "rank:size:pipe:folder".
VARIABLE = "TPUPORT_REPLICA"
_POLL_SECONDS = 0.05
_END_SECONDS = 5.0
_INTERRUPTED = 130


def is_replica() -> bool:
    """Return whether this process was started as a replica."""
    return VARIABLE in os.environ


def refuse_launcher() -> None:
    """Refuse a process that a launcher of processes started, as torchrun does.

    Raises:
        UsageError: it is one of several. Each would take itself for the only one.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if is_replica() or size in ("", "0", "1"):
        return
    number = os.environ.get("RANK", "?")
    raise UsageError(
        f"a launcher such as torchrun started this process as rank {number} of {size} (RANK,"
        " WORLD_SIZE), and tpuport run starts the processes itself. What to do: run"
        f" tpuport run --replicas {size} SCRIPT, without the launcher; if nothing launched it,"
        " unset WORLD_SIZE"
    )


def run_replicas(size: int, command: Sequence[str]) -> int:
    """Run a command as replicas, and return the exit status of the first that fails, or 0.

    All have ended when this returns, or when this process is gone, however it went.

    Args:
        size: How many.
        command: The command, which has to call `replicas.join()`.
    """
    with (
        _ended_by_signal(),
        tempfile.TemporaryDirectory(prefix="tpuport-") as folder,
        _pipe() as pipe,
    ):
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(size):
                environment = _environment(rank, size, pipe, folder)
                started.append(subprocess.Popen(command, env=environment, pass_fds=[pipe]))
            return _first_failure(started)
        except KeyboardInterrupt:
            return _INTERRUPTED
        finally:
            _end(started)


def _environment(rank: int, size: int, pipe: int, folder: str) -> dict[str, str]:
    values = {VARIABLE: f"{rank}:{size}:{pipe}:{folder}"}
    # One chip for each process, if the host has TPUs: see JAX's page on several processes a host.
    bounds = ("TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS")
    values.update(dict.fromkeys(bounds, "1,1,1"), TPU_VISIBLE_CHIPS=str(rank))
    defaults = {"OMP_NUM_THREADS": "1"}  # as torchrun has it
    if sys.platform == "linux":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    return {**defaults, **os.environ, **values}


def _first_failure(started: Sequence["subprocess.Popen[bytes]"]) -> int:
    while True:
        ended = [process.poll() for process in started]
        for rank, status in enumerate(ended):
            if status:
                how = f"exit status {status}" if status > 0 else f"signal {-status}"
                sys.stderr.write(
                    f"tpuport run: replica {rank} of {len(started)} ended with {how}, and with it"
                    f" the others\n"
                )
                return status if status > 0 else 128 - status
        if None not in ended:
            return 0
        time.sleep(_POLL_SECONDS)


def _end(started: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in started:
        process.terminate()
    deadline = time.monotonic() + _END_SECONDS
    for process in started:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _pipe() -> Iterator[int]:
    """Open a pipe whose writing end only this process has."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """Leave the block, with what it cleans up, when the process is told to end."""

    def leave(number: int, frame: object) -> NoReturn:
        del frame
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
