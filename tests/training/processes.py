"""Two processes of four virtual devices each, as torchrun would start them on two hosts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SECONDS = 240


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start_two(*given: str, **environment: str) -> list[subprocess.Popen]:
    """Start Python twice with the same arguments, the first process of the two being rank 0."""
    env = {
        **os.environ,
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        **environment,
    }
    return [
        subprocess.Popen(
            [sys.executable, *given],
            cwd=ROOT,
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


def finish(processes: list[subprocess.Popen], status: int = 0) -> list[str]:
    """What each has printed, once all have ended with a status."""
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [status] * len(processes), outputs
    return outputs
