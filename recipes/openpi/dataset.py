"""LeRobot datasets of version 2.0 and 2.1, read from their files: parquet, mp4 and meta/*.json."""

import io
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recipes.openpi.inputs import Preparation, stacked
from recipes.openpi.robots import Robot
from recipes.openpi.statistics import NormStats, Stats
from recipes.packages import av, needed
from tpuport.foundation.errors import UsageError

VERSIONS = ("v2.0", "v2.1")
_EPISODES_KEPT = 256  # without pictures, by process


def parquet() -> Any:
    """Import and return pyarrow.parquet.

    Raises:
        MissingExtraError: It is not installed.
    """
    return needed("pyarrow.parquet", "LeRobot datasets", "pyarrow", "openpi")


class LeRobot:
    """A dataset on disk, whose pictures are decoded one by one."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            self.info: dict[str, Any] = json.loads((root / "meta" / "info.json").read_text("utf-8"))
            self.tasks = {one["task_index"]: one["task"] for one in self._lines("tasks")}
            self.lengths = [one["length"] for one in self._lines("episodes")]
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(
                f"{root} is no LeRobot dataset: {error!r}. What to do: give a folder with"
                " meta/info.json, meta/tasks.jsonl and meta/episodes.jsonl"
            ) from error
        version = self.info.get("codebase_version")
        if version not in VERSIONS:
            raise UsageError(
                f"{root}: version {version}, expected one of {', '.join(VERSIONS)}. openpi's own"
                " reader is of these versions, too"
            )
        self.episode = lru_cache(_EPISODES_KEPT)(self._read)

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        text = (self.root / "meta" / f"{name}.jsonl").read_text("utf-8")
        yield from (json.loads(line) for line in text.splitlines() if line.strip())

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was read, so that worker processes get a small object."""
        return {name: value for name, value in vars(self).items() if name != "episode"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with nothing read."""
        vars(self).update(state)
        self.episode = lru_cache(_EPISODES_KEPT)(self._read)

    def _path(self, kind: str, index: int, **names: str) -> Path:
        chunk = index // self.info["chunks_size"]
        return self.root / self.info[kind].format(episode_chunk=chunk, episode_index=index, **names)

    def _read(self, index: int) -> dict[str, Any]:
        """Return each feature of an episode but its videos, (frames, ...)."""
        path = self._path("data_path", index)
        try:
            table = parquet().read_table(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
        made: dict[str, Any] = {}
        for name, feature in self.info["features"].items():
            if feature["dtype"] == "image":
                made[name] = [one["bytes"] for one in table[name].to_pylist()]
            elif feature["dtype"] != "video":
                made[name] = np.array(table[name].to_pylist())
        return made

    def at(self, name: str, episode: int, time: int) -> Any:
        """Return a feature of one frame; a picture as (height, width, 3)."""
        if self.info["features"][name]["dtype"] == "video":
            path = self._path("video_path", episode, video_key=name)
            return _frame(path, time, self.info["fps"])
        found = self.episode(episode)[name][time]
        return _decoded(found) if isinstance(found, bytes) else found


def _decoded(data: bytes) -> NDArray[np.uint8]:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def _frame(path: Path, index: int, fps: float) -> NDArray[np.uint8]:
    """Decode one frame of a video, from the key frame in front of it on."""
    try:
        with av().open(str(path)) as file:
            stream = file.streams.video[0]
            stream.codec_context.thread_count = 1
            file.seek(int(index / fps / stream.time_base), stream=stream)
            for frame in file.decode(stream):
                if round(frame.time * fps) >= index:
                    if round(frame.time * fps) == index:
                        return frame.to_ndarray(format="rgb24")
                    break
    except (OSError, av().error.FFmpegError) as error:
        raise UsageError(f"{path} cannot be decoded: {error}") from error
    raise UsageError(f"{path} has no frame {index}, and its episode has")


class Demonstrations:
    """The frames of a dataset as a robot's observations, each with the actions that follow.

    Items are dicts of observation and `actions` (horizon, action dim), in which the last action of
    an episode is repeated beyond its end, as LeRobot does.
    """

    def __init__(self, data: LeRobot, robot: Robot, horizon: int) -> None:
        self.data, self.robot, self.horizon = data, robot, horizon
        self.places = [(e, t) for e, length in enumerate(data.lengths) for t in range(length)]
        missing = [f for f in robot.features.values() if f not in data.info["features"]]
        if missing:
            raise UsageError(
                f"{data.root} lacks the features {', '.join(missing)} of a {robot.name}; it has"
                f" {', '.join(data.info['features'])}"
            )

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, Any]:
        episode, time = self.places[index]
        features = self.robot.features.items()
        made = {p: self.data.at(name, episode, time) for p, name in features if p != "actions"}
        made["actions"] = self.actions(episode, time)
        task = int(np.ravel(self.data.at("task_index", episode, time))[0])
        return {**made, "prompt": self.data.tasks.get(task, "")}

    def actions(self, episode: int, time: int) -> NDArray[Any]:
        """Return the actions from a time on, (horizon, action dim)."""
        of_episode = self.data.episode(episode)[self.robot.features["actions"]]
        times = np.minimum(time + np.arange(self.horizon), len(of_episode) - 1)
        return of_episode[times]

    def stats(self) -> Stats:
        """Return the statistics of states, and of chunks of actions in the policy's conventions."""
        states, chunks = [], []
        for episode, time in self.places:
            found = self.data.at(self.robot.features[self.robot.state], episode, time)
            states.append(self.robot.state_in(found))
            chunks.append(self.robot.actions_in(self.actions(episode, time), states[-1]))
        return {"state": NormStats.of(np.stack(states)), "actions": NormStats.of(np.stack(chunks))}


class Samples:
    """Demonstrations as a policy's training samples, whose prompts have one length."""

    def __init__(self, found: Demonstrations, preparation: Preparation) -> None:
        self.found, self.preparation = found, preparation
        self.length = preparation.config.max_token_len

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = self.found[index]
        prepared = self.preparation.observation(item)
        made = {name: one[0] for name, one in stacked([prepared], self.length).items()}
        actions = self.preparation.actions_in(item["actions"], prepared.raw_state)
        return {**made, "actions": torch.from_numpy(actions)}
