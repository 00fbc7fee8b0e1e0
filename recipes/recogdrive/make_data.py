"""Small data in the real formats, from scenes whose trajectories can be learned.

A car drives on at a constant acceleration along an arc. Its command says roughly which way the arc
goes, its history and status how fast it is, and only the hidden states how sharp the arc is.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from recipes.recogdrive.layouts import Entry, Layout, write_token

COMMANDS = ("left", "straight", "right", "unknown")
NUM_HISTORY, NUM_FUTURE, INTERVAL = 4, 8, 0.5  # poses, poses, s
# So that all poses are in the range that the planner normalises by.
SPEEDS, ACCELERATIONS, CURVATURES = (3.0, 10.0), (-0.7, 0.8), (-0.018, 0.018)  # m/s, m/s^2, 1/m
STRAIGHT = 0.004  # 1/m
_SALT = 20_260


@dataclass(frozen=True)
class Scene:
    """One moment of a drive.

    Attributes:
        log: the drive.
        token: the sample's name, 16 hexadecimal digits.
        speed: m/s.
        acceleration: m/s^2, along the way.
        curvature: 1/m, positive to the left.
    """

    log: str
    token: str
    speed: float
    acceleration: float
    curvature: float

    @property
    def command(self) -> int:
        """Which of `COMMANDS`."""
        if abs(self.curvature) < STRAIGHT:
            return 1
        return 0 if self.curvature > 0 else 2

    def poses(self, times: np.ndarray) -> np.ndarray:
        """(n, 3): x forward and y left in m, heading in rad, at times (n,) in s from now."""
        way = self.speed * times + 0.5 * self.acceleration * times**2
        heading = self.curvature * way
        # The chord of an arc; sinc has no hole at a curvature of 0.
        chord = way * np.sinc(heading / (2 * np.pi))
        return np.stack([chord * np.cos(heading / 2), chord * np.sin(heading / 2), heading], axis=1)

    def trajectory(self) -> torch.Tensor:
        """(8, 3), the poses to predict, in float64 as in real caches."""
        return torch.from_numpy(self.poses(np.arange(1, NUM_FUTURE + 1) * INTERVAL))

    def features(self) -> dict[str, torch.Tensor]:
        """All that a cache keeps of the ego: history, command and status, without a batch dim."""
        history = self.poses(np.arange(1 - NUM_HISTORY, 1) * INTERVAL)
        command = torch.eye(len(COMMANDS))[self.command]
        sideways = self.speed**2 * self.curvature
        motion = torch.tensor([self.speed, 0.0, self.acceleration, sideways])
        return {
            "history_trajectory": torch.from_numpy(history).float(),
            "high_command_one_hot": command,
            "status_feature": torch.cat([command, motion]),
        }


def make_scenes(count: int, *, logs: int = 2, seed: int = 0) -> list[Scene]:
    """Scenes of several drives, the same for the same seed.

    Args:
        count: how many in all.
        logs: over how many drives they are spread.
        seed: of everything.
    """
    generator = np.random.default_rng((_SALT, seed))
    return [
        Scene(
            f"log-{index % logs:02d}",
            generator.bytes(8).hex(),
            *(float(generator.uniform(*limits)) for limits in (SPEEDS, ACCELERATIONS, CURVATURES)),
        )
        for index in range(count)
    ]


def hidden_states(scene: Scene, tokens: int, width: int) -> torch.Tensor:
    """(tokens, width) that stand for a chat model's: the arc in the last tokens, else noise.

    As those of a model in bfloat16 they are float32 with bfloat16's values.
    """
    mixing = np.random.default_rng(_SALT).standard_normal((2, width))
    noise = np.random.default_rng(int(scene.token, 16)).standard_normal((tokens, width))
    told = np.array([scene.curvature / CURVATURES[1], scene.acceleration / ACCELERATIONS[1]])
    states = 0.1 * noise
    states[-math.ceil(tokens / 2) :] += told @ mixing
    return torch.from_numpy(states).bfloat16().float()


def make_cache(
    root: str | Path,
    *,
    count: int = 32,
    tokens: int = 16,
    width: int = 64,
    layout: Layout = "upstream",
    seed: int = 0,
) -> list[Entry]:
    """Write a small cache, as the step before the planner's training leaves one.

    Args:
        root: the folder.
        count: samples.
        tokens: of the hidden states; upstream's caches have 2800.
        width: of the hidden states; upstream's have 1536 or 3584.
        layout: "upstream" or "safetensors".
        seed: of everything.

    Raises:
        CheckpointError: a file cannot be written.
    """
    return [
        write_token(
            root,
            scene.log,
            scene.token,
            {**scene.features(), "last_hidden_state": hidden_states(scene, tokens, width)},
            {"trajectory": scene.trajectory()},
            layout,
        )
        for scene in make_scenes(count, seed=seed)
    ]
