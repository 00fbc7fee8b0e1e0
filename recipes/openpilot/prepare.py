"""Routes converted to a training set: read, joined, decoded, warped, packed, labelled.

Logs are read in processes, videos are decoded in threads, and frames are warped on the device. Data
that cannot be used are left out and reported per segment. A finished segment is kept as long as its
files and the options are the same.
"""

import json
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import (
    FIRST_EXCEPTION,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    wait,
)
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from recipes.openpilot import shards
from recipes.openpilot.geometry import SAMPLINGS, Sampling
from recipes.openpilot.labels import LABEL_SHAPES, Poses, path_labels
from recipes.openpilot.logs import POSES, Log, read_log
from recipes.openpilot.segments import Segment, find_segments, following
from recipes.records import digest_of
from tpuport.foundation.errors import CheckpointError, UsageError

LabelSource = Literal["modelV2", "pose"]
LABEL_SOURCES: tuple[LabelSource, ...] = get_args(LabelSource)
Record = dict[str, Any]


@dataclass(frozen=True)
class PrepareOptions:
    """The settings with which a training set is made.

    Attributes:
        labels: "modelV2" for those of the model that drove, or "pose" for the path that was driven.
        sampling: How the device of the model samples its cameras.
        batch_size: Number of frames that are warped at a time; None for a default that fits the
            accelerator.
        keep_private: Whether to keep VIN, dongle id and GPS, too.
        num_processes: Number of processes that read logs; 0 to read them in this one.
        num_threads: Number of segments at a time, each of which holds its frames in memory.
    """

    labels: LabelSource = "modelV2"
    sampling: Sampling = "bilinear"
    batch_size: int | None = None
    keep_private: bool = False
    num_processes: int = 2
    num_threads: int = 2

    def check(self) -> None:
        """Raise an error for options that do not fit.

        Raises:
            UsageError: An option does not fit.
        """
        for name, value, known in (
            ("labels", self.labels, LABEL_SOURCES),
            ("sampling", self.sampling, SAMPLINGS),
        ):
            if value not in known:
                raise UsageError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
        for name in ("batch_size", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}: expected at least 1, got {value}")


def prepare(
    root: str | Path,
    out: str | Path,
    options: PrepareOptions | None = None,
    *,
    on_segment: Callable[[str, Record], None] | None = None,
) -> dict[str, Record]:
    """Make a training set of all segments below a folder.

    Args:
        root: Folder of routes.
        out: Folder of the training set. An interrupted run is resumed.
        options: Settings of the training set.
        on_segment: Called with name and record of each segment, also of those that were finished
            before.

    Returns:
        The record of each segment: "frames", "runs" (lengths of unbroken runs), "skipped" (frames
        by reason), "problems" (number of read errors by description), "notes" (assumptions),
        "camera", "labels", "digest", and "file" if there are frames.

    Raises:
        UsageError: There is no segment, or an option does not fit.
        CheckpointError: The disk is full. Finished segments are kept.
        MissingExtraError: A package of the extra `openpilot` is not installed.
    """
    options = PrepareOptions() if options is None else options
    options.check()
    segments, out = find_segments(root), Path(out)
    records = shards.read_index(out)
    with ExitStack() as stack:
        readers = _processes(stack, options.num_processes)
        threads = stack.enter_context(ThreadPoolExecutor(options.num_threads))
        stop = threading.Event()
        futures: dict[Future[Record], Segment] = {}
        for segment in segments:
            job = _Job(segment, following(segment, segments), out, options, readers, stop)
            old = records.get(segment.name)
            futures[threads.submit(job.run, old)] = segment
        try:
            for future in as_completed(futures):
                name, record = futures[future].name, future.result()
                records[name] = record
                shards.write_index(out, records)
                if on_segment is not None:
                    on_segment(name, record)
        finally:
            stop.set()
            for future in futures:
                future.cancel()
            wait(futures, return_when=FIRST_EXCEPTION)
    return {segment.name: records[segment.name] for segment in segments}


def _processes(stack: ExitStack, count: int) -> Executor | None:
    """Start processes that read logs.

    Reading is pure Python, so that threads would wait for the GIL.
    """
    if count < 1:
        return None
    count = min(count, os.cpu_count() or 1)
    # spawn, since jax has threads, and a fork with threads may deadlock.
    context = multiprocessing.get_context("spawn")
    return stack.enter_context(ProcessPoolExecutor(count, mp_context=context))


@dataclass(frozen=True)
class _Job:
    """One segment to prepare."""

    segment: Segment
    after: Segment | None
    out: Path
    options: PrepareOptions
    readers: Executor | None
    stop: threading.Event

    def run(self, old: Record | None) -> Record:
        """Return the record of the segment, the old one if it is still valid."""
        if self.stop.is_set():
            return {}
        digest = self._digest()
        # A run that was killed may have finished the file but not the index.
        for found in (old, self._written()):
            if found and found.get("digest") == digest and self._is_there(found):
                return found
        record: Record = {"frames": 0, "runs": [], "skipped": {}, "problems": {}, "notes": []}
        record |= {"camera": "", "labels": self.options.labels, "digest": digest}
        if self.segment.log is None:
            return record | {"problems": {"no rlog": 1}}
        try:
            log, poses = self._logs(self.segment.log)
        except OSError as error:
            return record | {"problems": {f"the log cannot be read ({error.strerror})": 1}}
        return self._write(record, log, poses)

    def _write(self, record: Record, log: Log, poses: Poses) -> Record:
        from recipes.openpilot.assembling import assemble

        made = assemble(self.segment, log, self.options.sampling, self.options.batch_size)
        record |= {"skipped": dict(made.skipped), "notes": made.notes, "camera": made.camera}
        record["problems"] = dict(log.problems)
        frames = made.arrays
        if not len(frames["frame_id"]):
            return record
        labels = self._labels(log, poses, frames)
        _, lengths = np.unique(frames["run"], return_counts=True)
        record |= {"frames": len(frames["frame_id"]), "runs": lengths.tolist()}
        record["file"] = self._file.name
        record["labelled"] = {
            n: int(labels[f"{n}_valid"].sum()) for n in LABEL_SHAPES if n in labels
        }
        private = _private(log, frames["mono_time"]) if self.options.keep_private else ({}, {})
        said = {key: str(record[key]) for key in ("labels", "camera", "digest")}
        shards.write_shard(
            self._file,
            {**frames, **labels, **private[0]},
            {**said, **private[1], "record": json.dumps(record)},
        )
        return record

    def _digest(self) -> str:
        """Return a digest of the segment's files and of the options that matter."""
        used = [*self.segment.files.values()]
        if self.options.labels == "pose" and self.after is not None and self.after.log is not None:
            used.append(self.after.log)
        kept = asdict(self.options)
        chosen = [f"{name}={kept[name]}" for name in ("labels", "sampling", "keep_private")]
        return " ".join([digest_of(used), shards.FORMAT, *chosen])

    @property
    def _file(self) -> Path:
        return self.out / f"{self.segment.name}{shards.SUFFIX}"

    def _written(self) -> Record | None:
        """Return the record stored in the file, if there is one."""
        if not self._file.is_file():
            return None
        try:
            said = shards.shard_metadata(self._file)
            return {**json.loads(said["record"]), "digest": said["digest"]}
        except (CheckpointError, KeyError, ValueError):
            return None

    def _is_there(self, record: Record) -> bool:
        written = self._written() if "file" in record else record
        return written is not None and written["digest"] == record["digest"]

    def _logs(self, path: Path) -> tuple[Log, Poses]:
        after = self.after.log if self.after is not None else None
        after = after if self.options.labels == "pose" else None
        if self.readers is None:
            return _read(path, after)
        return self.readers.submit(_read, path, after).result()

    def _labels(self, log: Log, poses: Poses, frames: shards.Arrays) -> shards.Arrays:
        if self.options.labels == "modelV2":
            return _logged_labels(log, frames["frame_id"])
        found = path_labels(poses, frames["mono_time"], frames["rpy_calib"])
        made = {n: value for n, (value, known) in found.items() if known.any()}
        return made | {f"{n}_valid": known for n, (_, known) in found.items() if known.any()}


def _read(path: Path, after: Path | None) -> tuple[Log, Poses]:
    """Read a log, and the device's motion in it and in the next one."""
    log = read_log(path)
    tables = [log.tables["livePose"]]
    if after is not None:
        try:
            tables.append(read_log(after, only=POSES).tables["livePose"])
        except OSError as error:
            log.problems[f"the log after it cannot be read ({error.strerror})"] += 1
    table = np.concatenate(tables)
    table = table[np.unique(table["time"], return_index=True)[1]]
    return log, Poses(table["time"], table["velocity"], table["turning"], table["valid"])


def _logged_labels(log: Log, frame_ids: np.ndarray) -> shards.Arrays:
    """Return the labels that modelV2 and cameraOdometry logged for exactly these frames."""
    odometry = log.tables["cameraOdometry"]
    poses = {int(row["frame_id"]): row["pose"].astype(np.float32) for row in odometry}
    made: shards.Arrays = {}
    for name, shape in LABEL_SHAPES.items():
        values = np.zeros((len(frame_ids), *shape), np.float32)
        valid = np.zeros(len(frame_ids), bool)
        for row, one in enumerate(frame_ids.tolist()):
            found = poses.get(one) if name == "pose" else log.labels.get(one, {}).get(name)
            if found is not None:
                values[row], valid[row] = found, True
        if valid.any():
            made |= {name: values, f"{name}_valid": valid}
    return made


def _private(log: Log, times: np.ndarray) -> tuple[shards.Arrays, dict[str, str]]:
    gps = log.tables["gps"]
    if not len(gps):
        return {}, dict(log.private)
    row = np.clip(np.searchsorted(gps["time"], times, "right") - 1, 0, None)
    return {"gps": gps["place"][row]}, dict(log.private)


def summary(records: Iterable[Record]) -> dict[str, Any]:
    """Return totals over segments: frames, runs, and left-out frames and problems by reason."""
    totals: dict[str, Counter[str]] = {"skipped": Counter(), "problems": Counter()}
    frames, runs, segments = 0, 0, 0
    for record in records:
        segments += 1
        frames += record["frames"]
        runs += len(record["runs"])
        for name, total in totals.items():
            total.update(record[name])
    return {
        "segments": segments,
        "frames": frames,
        "runs": runs,
        **{name: dict(total.most_common()) for name, total in totals.items()},
    }
