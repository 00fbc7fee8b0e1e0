"""Windows of a training set: consecutive frames with labels, for training over time."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import tpuport
from recipes.openpilot.driving import FRAME_INPUTS, Driver
from recipes.openpilot.shards import open_arrays, open_shard
from recipes.openpilot.teacher import BATCH, read_outputs, runs_of
from recipes.records import digest_of
from tpuport.foundation.errors import UsageError

LABELS = ("plan", "lane_lines", "road_edges", "lead", "desire_state", "pose")
# Labels that are read together with another one.
PROBABILITIES = {"lane_lines": "lane_lines_prob", "lead": "lead_prob"}
IMAGES = ("img", "big_img")
SEEN, TEACHER = "seen/", "teacher"


@dataclass(frozen=True)
class Place:
    """The start of a window.

    Attributes:
        shard: Number of the segment.
        start: First frame of the window.
    """

    shard: int
    start: int


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of equal length, each within one unbroken run.

    Args:
        shards: Segments of a training set.
        length: Frames of a window.
        every: Frames from the start of one window to that of the next.
        labels: Names of the labels. Each must be in some segment.
        seen: A file of `write_seen` for each segment, which replaces its images.
        teacher: A file of `teacher.label` for each segment.

    Raises:
        UsageError: No run is long enough, or a label is in no segment.
        CheckpointError: A file is damaged.
    """

    def __init__(
        self,
        shards: Sequence[Path],
        length: int,
        every: int,
        labels: Sequence[str],
        *,
        seen: Sequence[Path] | None = None,
        teacher: Sequence[Path] | None = None,
    ) -> None:
        self.shards, self.length = list(shards), length
        self.labels, self.seen, self.teacher = tuple(labels), seen, teacher
        self.places: list[Place] = []
        found: set[str] = set()
        longest = 0
        for number, shard in enumerate(self.shards):
            with open_shard(shard) as file:
                found |= set(file.keys())
                run = file.get_tensor("run")
            for part in runs_of(run):
                longest = max(longest, part.stop - part.start)
                last = part.stop - length
                self.places += [Place(number, s) for s in range(part.start, last + 1, every)]
        if not self.places:
            raise UsageError(
                f"no run of the training set has the {length} frames of a window; the longest has"
                f" {longest}. What to do: a smaller warmup or length"
            )
        missing = [name for name in self.labels if name not in found]
        if missing:
            raise UsageError(
                f"no segment has the labels {', '.join(missing)}. What to do: give their losses the"
                " weight 0, or prepare with other labels"
            )

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        place = self.places[index]
        part = slice(place.start, place.start + self.length)
        found: dict[str, np.ndarray] = {}
        inputs = [n for n in FRAME_INPUTS if self.seen is None or n not in IMAGES]
        with open_shard(self.shards[place.shard]) as file:
            names = set(file.keys())
            for name in inputs:
                found[name] = file.get_slice(name)[part]
            for name in self.labels:
                for one in (name, PROBABILITIES.get(name, name), f"{name}_valid"):
                    if one not in names:
                        raise UsageError(
                            f"{self.shards[place.shard]} has no {one}, which other segments have."
                            " What to do: prepare all segments alike"
                        )
                    # Labels that are not valid may be NaN.
                    found[one] = np.nan_to_num(file.get_slice(one)[part])
        if self.seen is not None:
            with open_arrays(self.seen[place.shard]) as file:
                found |= {f"{SEEN}{n}": file.get_slice(n)[part] for n in file.keys()}
        if self.teacher is not None:
            with open_arrays(self.teacher[place.shard]) as file:
                found[TEACHER] = file.get_slice("outputs")[part]
        return {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in found.items()}


def teacher_slices(files: Sequence[Path]) -> dict[str, slice]:
    """Return the slices of a teacher's heads, which must be equal in all files.

    Raises:
        UsageError: They are of different models.
    """
    tables = [read_outputs(path)[1] for path in files]
    if any(table != tables[0] for table in tables):
        raise UsageError("the teacher's files are of different models: expected one folder's")
    return tables[0]


def write_seen(
    driver: Driver, model: Sequence[Path], shards: Sequence[Path], out: Path
) -> list[Path]:
    """Compute the outputs of the frozen layers before the trained ones for every frame, once.

    Args:
        driver: The driver, whose `requires_grad` tells which layers are trained.
        model: Files of the driver, for provenance.
        shards: Segments of a training set.
        out: Folder to write to. Files there of the same model, layers and segment are kept.

    Returns:
        A file for each segment, with values by name, each (t, ...).

    Raises:
        CheckpointError: A segment is damaged, or the disk is full.
    """
    graph: Any = driver.graphs[0]
    frontier = graph.frozen_frontier(driver.image_inputs)
    origin = {"model": digest_of(list(model)), "values": json.dumps(frontier)}
    ported = tpuport.convert(driver, verify=False, methods=("see",))
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for shard in shards:
        path = out / shard.name
        said = {**origin, "shard": digest_of([shard])}
        if not (path.is_file() and _said(path) == said):
            tpuport.save_checkpoint(path, _seen(driver, ported, shard), metadata=said)
        written.append(path)
    return written


def _said(path: Path) -> dict[str, str]:
    with open_arrays(path) as file:
        return dict(file.metadata() or {})


def _seen(driver: Driver, ported: Any, shard: Path) -> dict[str, np.ndarray]:
    with open_shard(shard) as file:
        run = file.get_tensor("run")
        frames = {name: file.get_tensor(name) for name in IMAGES}
    found: dict[str, list[np.ndarray]] = {}
    for part in runs_of(run):
        state = driver.begin(1)
        for start in range(part.start, part.stop, BATCH):
            places = np.minimum(np.arange(start, start + BATCH), part.stop - 1)
            given = {n: torch.from_numpy(v[places][:, None]) for n, v in frames.items()}
            images, after = driver.images(state, given)
            state = {**state, **after}
            values: Mapping[str, Any] = ported.see(images)
            for name, value in values.items():
                kept = tpuport.to_numpy(value)[: part.stop - start, 0]
                found.setdefault(name, []).append(kept)
    return {name: np.concatenate(values) for name, values in found.items()}
