"""Processes that a test ends at a bad moment."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def kill_when(ready: Callable[[], bool], *given: str, **environment: str) -> None:
    """Start Python with arguments, and end it by SIGKILL as soon as something is so.

    It must still be running then.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), **environment}
    process = subprocess.Popen([sys.executable, *given], env=environment)
    try:
        deadline = time.monotonic() + 300
        while not ready():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def cached_in(folder: Path) -> dict[str, str]:
    """Return what makes a process keep its programs in a folder, and load what is there."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        # Else the path of the folder is part of the keys, and a copy has none of its programs.
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }
