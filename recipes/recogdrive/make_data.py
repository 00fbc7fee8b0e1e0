"""Small data in the real formats, from scenes whose trajectories can be learned.

A car drives at a constant acceleration along an arc. Its command tells roughly which way the arc
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
# Chosen so that all poses are in the range that the planner normalises by.
SPEEDS, ACCELERATIONS, CURVATURES = (3.0, 10.0), (-0.7, 0.8), (-0.018, 0.018)  # m/s, m/s^2, 1/m
STRAIGHT = 0.004  # 1/m
_SALT = 20_260


@dataclass(frozen=True)
class Scene:
    """One moment of a drive.

    Attributes:
        log: Name of the drive.
        token: Name of the sample, 16 hexadecimal digits.
        speed: Speed in m/s.
        acceleration: Acceleration along the path in m/s^2.
        curvature: Curvature in 1/m, positive to the left.
    """

    log: str
    token: str
    speed: float
    acceleration: float
    curvature: float

    @property
    def command(self) -> int:
        """Return the index of the command in `COMMANDS`."""
        if abs(self.curvature) < STRAIGHT:
            return 1
        return 0 if self.curvature > 0 else 2

    def poses(self, times: np.ndarray) -> np.ndarray:
        """Return poses (n, 3) at times (n,) in s: x forward and y left in m, heading in rad."""
        way = self.speed * times + 0.5 * self.acceleration * times**2
        heading = self.curvature * way
        # The chord of an arc. sinc is defined at a curvature of 0, too.
        chord = way * np.sinc(heading / (2 * np.pi))
        return np.stack([chord * np.cos(heading / 2), chord * np.sin(heading / 2), heading], axis=1)

    def trajectory(self) -> torch.Tensor:
        """Return the poses to predict, (8, 3), in float64 as in real caches."""
        return torch.from_numpy(self.poses(np.arange(1, NUM_FUTURE + 1) * INTERVAL))

    def features(self) -> dict[str, torch.Tensor]:
        """Return the cached features of the ego without a batch dim: history, command, status."""
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
    """Return scenes of several drives, the same for the same seed.

    Args:
        count: Total number of scenes.
        logs: Number of drives.
        seed: Random seed of all data.
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
    """Return imitated hidden states (tokens, width), with the arc in the last tokens and noise.

    They are float32 with values exact in bfloat16, as from a model in bfloat16.
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
    """Write a small cache in the form in which the planner's training reads it.

    Args:
        root: Folder of the cache.
        count: Number of samples.
        tokens: Tokens of the hidden states; upstream's caches have 2800.
        width: Width of the hidden states; upstream's are 1536 or 3584.
        layout: "upstream" or "safetensors".
        seed: Random seed of all data.

    Raises:
        CheckpointError: A file cannot be written.
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
