"""Small training sets, drawn at random in the format on disk."""

from pathlib import Path

import numpy as np

import tpuport


def make_shard(
    path: Path, frames: int = 30, *, seed: int = 0, runs: tuple[int, ...] | None = None
) -> Path:
    """A segment whose plan follows from the brightness of its road camera."""
    rng = np.random.default_rng(seed)
    level = rng.integers(40, 200, (frames, 1, 1, 1))
    images = rng.integers(0, 40, (2, frames, 6, 128, 256)) + level
    plan = np.zeros((frames, 33, 15), np.float32)
    plan[..., 0] = np.linspace(0, 1, 33) * (level[:, 0, 0] / 20 - 5)
    arrays = {
        "img": images[0].astype(np.uint8),
        "big_img": images[1].astype(np.uint8),
        "desire": np.eye(8, dtype=np.float32)[rng.integers(0, 8, frames)],
        "traffic_convention": np.tile(np.array([1, 0], np.float32), (frames, 1)),
        "v_ego": rng.uniform(5, 30, frames).astype(np.float32),
        "action_t": np.full((frames, 2), 0.3, np.float32),
        "frame_id": np.arange(frames),
        "mono_time": np.arange(frames) * 50_000_000,
        "run": np.repeat(np.arange(len(runs or (1,))), runs or (frames,)).astype(np.int32),
        "rpy_calib": np.zeros((frames, 3), np.float32),
        "plan": plan,
        "plan_valid": np.arange(frames) < frames - 2,
    }
    plan[~arrays["plan_valid"]] = np.nan
    tpuport.save_checkpoint(path, arrays, metadata={"format": "openpilot-frames-1"})
    return path
