"""A small LeRobot dataset with drawn pictures: an arm moves to the disk that the prompt names."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.openpi.dataset import parquet
from recipes.packages import av, needed

SIDE, FPS, CHUNK = 64, 10, 1000
COLOURS = {"red": (220, 40, 40), "blue": (40, 60, 220)}
PROMPTS = tuple(f"move to the {name} disk" for name in COLOURS)
_SPEED = 0.12  # of the arm, in half pictures a frame
_DATA = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
_VIDEO = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
_CAMERAS = ("image", "wrist_image")


@dataclass(frozen=True)
class Scene:
    """Two disks on a table, and where the arm begins: all places in [-1, 1]."""

    disks: NDArray[np.float32]  # (2, 2)
    start: NDArray[np.float32]  # (2,)
    task: int

    def draw(self, arm: NDArray[Any], *, wrist: bool) -> NDArray[np.uint8]:
        """Return the picture from above, or a piece of it around the arm."""
        rows, columns = np.mgrid[:SIDE, :SIDE]
        places = np.stack([columns, rows], -1) / (SIDE - 1) * 2 - 1
        if wrist:
            places = places * 0.5 + arm
        image = np.full((SIDE, SIDE, 3), 200, np.uint8)
        for place, colour in zip(self.disks, COLOURS.values(), strict=True):
            image[np.hypot(*(places - place).transpose(2, 0, 1)) < 0.25] = colour
        image[np.abs(places - arm).max(-1) < 0.08] = (20, 20, 20)
        return image

    def demonstrate(self, frames: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Yield the arm's place and its next move: straight to the disk, and then it stays."""
        arm = self.start.copy()
        for _ in range(frames):
            way = self.disks[self.task] - arm
            move = way * min(1.0, _SPEED / max(float(np.hypot(*way)), 1e-6))
            yield arm.copy(), move
            arm = arm + move


def make_scenes(count: int, seed: int = 0) -> list[Scene]:
    """Return scenes, the same for the same seed, whose tasks alternate."""
    generator = np.random.default_rng(seed)

    def places(n: int) -> NDArray[np.float32]:
        return generator.uniform(-0.8, 0.8, (n, 2)).astype(np.float32)

    return [Scene(places(2), places(1)[0], index % 2) for index in range(count)]


def make_dataset(root: Path, *, episodes: int = 8, frames: int = 20, seed: int = 0) -> int:
    """Write a dataset of version 2.1 with the features of LIBERO, and return its frames."""
    needed("pyarrow", "LeRobot datasets", "pyarrow", "openpi")
    (root / "meta").mkdir(parents=True, exist_ok=True)
    described, stats = [], []
    for index, scene in enumerate(make_scenes(episodes, seed)):
        columns, pictures = _episode(scene, frames, index)
        path = root / _DATA.format(episode_chunk=index // CHUNK, episode_index=index)
        _write_table(path, columns)
        for name in _CAMERAS:
            place = {"episode_chunk": index // CHUNK, "episode_index": index, "video_key": name}
            _write_video(root / _VIDEO.format(**place), pictures[name])
        described.append({"episode_index": index, "tasks": [PROMPTS[scene.task]], "length": frames})
        stats.append({"episode_index": index, "stats": _stats({**columns, **pictures})})
    tasks = [{"task_index": i, "task": text} for i, text in enumerate(PROMPTS)]
    named = {"episodes": described, "episodes_stats": stats, "tasks": tasks}
    for name, lines in named.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (root / "meta" / f"{name}.jsonl").write_text(text, encoding="utf-8")
    info = _info(episodes, frames)
    (root / "meta" / "info.json").write_text(json.dumps(info, indent=4), encoding="utf-8")
    return episodes * frames


def _episode(scene: Scene, frames: int, index: int) -> tuple[dict[str, Any], dict[str, Any]]:
    arms, moves = (np.stack(part) for part in zip(*scene.demonstrate(frames), strict=True))
    state = np.zeros((frames, 8), np.float32)
    actions = np.zeros((frames, 7), np.float32)
    state[:, :2], actions[:, :2] = arms, moves
    number = np.arange(frames)
    columns = {
        "state": state,
        "actions": actions,
        "timestamp": (number / FPS).astype(np.float32),
        "frame_index": number,
        "episode_index": np.full(frames, index),
        "index": index * frames + number,
        "task_index": np.full(frames, scene.task),
    }
    pictures = {
        name: np.stack([scene.draw(arm, wrist=name == "wrist_image") for arm in arms])
        for name in _CAMERAS
    }
    return columns, pictures


def _write_table(path: Path, columns: dict[str, Any]) -> None:
    arrow = needed("pyarrow", "LeRobot datasets", "pyarrow", "openpi")
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {
        name: arrow.array(
            list(values), arrow.list_(arrow.float32(), values.shape[1]) if values.ndim > 1 else None
        )
        for name, values in columns.items()
    }
    parquet().write_table(arrow.table(made), path)


def _write_video(path: Path, frames: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av().open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=FPS, options={"crf": "18", "g": "2"})
        stream.height, stream.width, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for image in frames:
            for packet in stream.encode(av().VideoFrame.from_ndarray(image, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)


def _stats(values: dict[str, Any]) -> dict[str, Any]:
    """Return what LeRobot keeps of each feature of an episode; of pictures by channel in [0, 1]."""
    made = {}
    for name, one in values.items():
        is_picture = one.ndim == 4
        axes = (0, 1, 2) if is_picture else (0,)
        one = one / 255 if is_picture else one.astype(np.float64)
        of = {"min": one.min(axes), "max": one.max(axes), "mean": one.mean(axes)}
        of["std"] = one.std(axes)
        shape = (-1, 1, 1) if is_picture else (-1,)
        made[name] = {key: np.reshape(value, shape).tolist() for key, value in of.items()}
        made[name]["count"] = [len(one)]
    return made


def _info(episodes: int, frames: int) -> dict[str, Any]:
    video = {
        "dtype": "video",
        "shape": [SIDE, SIDE, 3],
        "names": ["height", "width", "channel"],
        "info": {
            "video.fps": float(FPS),
            "video.height": SIDE,
            "video.width": SIDE,
            "video.channels": 3,
            "video.codec": "h264",
            "video.pix_fmt": "yuv420p",
            "video.is_depth_map": False,
            "has_audio": False,
        },
    }
    whole = ("frame_index", "episode_index", "index", "task_index")
    features: dict[str, Any] = dict.fromkeys(_CAMERAS, video)
    features["state"] = {"dtype": "float32", "shape": [8], "names": ["state"]}
    features["actions"] = {"dtype": "float32", "shape": [7], "names": ["actions"]}
    features["timestamp"] = {"dtype": "float32", "shape": [1], "names": None}
    features |= {name: {"dtype": "int64", "shape": [1], "names": None} for name in whole}
    return {
        "codebase_version": "v2.1",
        "robot_type": "drawn",
        "total_episodes": episodes,
        "total_frames": episodes * frames,
        "total_tasks": len(PROMPTS),
        "total_videos": episodes * len(_CAMERAS),
        "total_chunks": -(-episodes // CHUNK),
        "chunks_size": CHUNK,
        "fps": FPS,
        "splits": {"train": f"0:{episodes}"},
        "data_path": _DATA,
        "video_path": _VIDEO,
        "features": features,
    }
