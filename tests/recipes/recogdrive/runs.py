"""Commands of the recipe that a test runs, reads the log of, or kills."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes.recogdrive.__main__ import app


def command(*given: Any) -> None:
    """Run a command in this process."""
    app(list(map(str, given)), standalone_mode=False)


def logged(out: Path, name: str = "loss") -> dict[int, float]:
    """What a run logged under a name, by step."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line[name] for line in lines if name in line}


def has_state(out: Path) -> bool:
    """Whether a run has a whole state on disk."""
    return any(p.name.isdigit() for p in out.glob("states/*"))


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
