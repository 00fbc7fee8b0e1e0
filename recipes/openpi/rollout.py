"""A served policy in closed loop with MuJoCo, through gym-aloha and openpi's own client."""

import importlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from recipes.openpi.inputs import resized
from recipes.packages import av
from tpuport.foundation.errors import UsageError

SIDE, FPS = 224, 50  # of the pictures that are sent, and of the simulator


class Client(Protocol):
    """What answers observations, such as openpi-client's `WebsocketClientPolicy`."""

    def infer(self, obs: dict[str, Any]) -> Mapping[str, Any]:
        """Return the actions of an observation."""
        ...


@dataclass(frozen=True)
class Rollout:
    """What came of an episode.

    Attributes:
        steps: Steps of the simulator.
        rewards: Sum of the rewards.
        best: Highest reward; gym-aloha gives 4 for a cube that was handed over.
        calls: Calls of the policy.
        call_ms: Median time of a call, with the way there and back.
    """

    steps: int
    rewards: float
    best: float
    calls: int
    call_ms: float

    def __str__(self) -> str:
        return (
            f"{self.steps} steps, rewards {self.rewards:g}, the best {self.best:g};"
            f" {self.calls} calls of {self.call_ms:.1f} ms"
        )


def _package(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"a rollout needs {name}, which is not installed. What to do: pip install {install}"
        ) from error


def client_of(host: str, port: int) -> Any:
    """Connect openpi-client to a server.

    Raises:
        UsageError: It is not installed, or no server listens there.
    """
    module = _package("openpi_client.websocket_client_policy", "--no-deps openpi-client")
    try:
        return module.WebsocketClientPolicy(host, port)
    except OSError as error:
        raise UsageError(
            f"no server at {host}:{port}: {error}. What to do: start `serve` first"
        ) from error


def simulator(task: str) -> Any:
    """Return an environment of gym-aloha, which draws without a display.

    Raises:
        UsageError: gym-aloha is not installed, or has no such task.
    """
    os.environ.setdefault("MUJOCO_GL", "egl")
    _package("gym_aloha", "gym-aloha 'mujoco<4'")
    gymnasium: Any = importlib.import_module("gymnasium")
    try:
        return gymnasium.make(f"gym_aloha/{task}", obs_type="pixels_agent_pos")
    except gymnasium.error.Error as error:
        raise UsageError(f"gym-aloha has no task {task!r}: {error}") from error


def rollout(
    client: Client,
    environment: Any,
    *,
    prompt: str,
    steps: int = 300,
    replan: int = 10,
    video: Path | None = None,
    seed: int = 0,
) -> Rollout:
    """Let a policy act in an environment of gym-aloha.

    Args:
        client: The policy.
        environment: Result of `simulator`.
        prompt: Prompt of the policy.
        steps: Most steps of the environment.
        replan: Actions that are taken of a chunk before the policy is asked again.
        video: File to write the camera's pictures to.
        seed: Random seed of the scene.

    Raises:
        UsageError: `replan` is less than 1.
    """
    if replan < 1:
        raise UsageError(f"replan={replan}: expected 1 or more")
    seen, _ = environment.reset(seed=seed)
    pending: list[NDArray[Any]] = []
    rewards, pictures, times = [], [], []
    for _ in range(steps):
        if not pending:
            began = time.monotonic()
            found = client.infer(_observation(seen, prompt))
            times.append(time.monotonic() - began)
            pending = list(found["actions"][:replan])
        seen, reward, terminated, truncated, _ = environment.step(pending.pop(0))
        rewards.append(float(reward))
        pictures.append(seen["pixels"]["top"])
        if terminated or truncated:
            break
    if video is not None:
        _write(video, pictures)
    call_ms = float(np.median(times)) * 1000
    return Rollout(len(rewards), sum(rewards), max(rewards), len(times), call_ms)


def _observation(seen: Mapping[str, Any], prompt: str) -> dict[str, Any]:
    picture = resized(seen["pixels"]["top"], SIDE).transpose(2, 0, 1)
    return {
        "state": np.asarray(seen["agent_pos"]),
        "images": {"cam_high": np.ascontiguousarray(picture)},
        "prompt": prompt,
    }


def _write(path: Path, pictures: list[NDArray[np.uint8]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av().open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=FPS)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for image in pictures:
            frame = av().VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
