"""Sinks for the numbers and pictures of a run: lines of JSON, TensorBoard, Weights & Biases."""

import importlib
import importlib.util
import json
import math
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tpuport.foundation.errors import MissingExtraError, UsageError
from tpuport.foundation.files import explained, replacing_file


class Sink(Protocol):
    """Something that `fit` logs to; only the first of several processes does."""

    def start(self, step: int) -> None:
        """Start at `step` and drop records of later steps, left by a run that crashed."""
        ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a step, by name."""
        ...

    def close(self) -> None:
        """Flush the remaining records."""
        ...


@runtime_checkable
class PictureSink(Protocol):
    """A sink that takes pictures, too."""

    def write_pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        """Write the pictures of a step (height, width, 3) of 8 bits, by name."""
        ...


class JsonLines:
    """A file with one JSON object a line: `{"step": 10, "loss": 1.25, ...}`.

    Each line is written atomically. When a run resumes, lines of steps that
    will come again and a line that was cut off are removed. A number that JSON does not have
    (NaN, infinity) is null, and its name is in "nonfinite".

    Args:
        path: the file, made with its directory if it is missing.

    Raises:
        CheckpointError: by `start` and `write`: the disk is full, or the file cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: int | None = None

    def start(self, step: int) -> None:
        """Open the file, and keep only the lines up to that step."""
        self.close()
        with explained(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._keep(step)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def _keep(self, step: int) -> None:
        text = self.path.read_bytes()
        kept = b"".join(line for line in text.splitlines(keepends=True) if _is_until(line, step))
        if kept == text:
            return
        with replacing_file(self.path) as temporary:
            temporary.write_bytes(kept)
            os.chmod(temporary, self.path.stat().st_mode)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        if self._file is None:
            self.start(step)
        assert self._file is not None
        shown: dict[str, Any] = {"step": step}
        bad = [name for name, value in values.items() if not math.isfinite(value)]
        shown |= {name: None if name in bad else value for name, value in values.items()}
        if bad:
            shown["nonfinite"] = bad
        with explained(self.path):
            self._append(json.dumps(shown).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        """Append a line entirely or not at all: a full disk may take its beginning only."""
        assert self._file is not None
        before = os.fstat(self._file).st_size
        done = 0
        try:
            while done < len(line):
                done += os.write(self._file, line[done:])
        except OSError:
            if done:
                os.ftruncate(self._file, before)
            raise

    def close(self) -> None:
        """Close the file; writing opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _is_until(line: bytes, step: int) -> bool:
    """Return whether a line is complete and of that step or one before it."""
    try:
        return line.endswith(b"\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


class TensorBoard:
    """Scalars and pictures for TensorBoard, by tensorboardX or by torch's own writer.

    What was written is in the file when `write` returns, so that a killed run loses none of it.

    Args:
        directory: the folder of the run.

    Raises:
        MissingExtraError: neither is installed.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not _has("tensorboardX") and not _has("tensorboard"):
            raise MissingExtraError("TensorBoard", "tensorboardX", "log")
        self._writer: Any = None

    def start(self, step: int) -> None:
        """Start a file of events, which hides later steps in earlier files."""
        self.close()
        # TensorBoard reads files in the order of their names, which begin with whole seconds.
        suffix = f".{step:09d}.{os.getpid()}"
        if _has("tensorboardX"):
            self._writer = _EventFile(self.directory, step + 1, suffix)
        else:
            made: Any = importlib.import_module("torch.utils.tensorboard")
            # TensorBoard hides events of earlier files from purge_step on.
            self._writer = made.SummaryWriter(
                str(self.directory), purge_step=step + 1, filename_suffix=suffix
            )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar for each number."""
        writer = self._started(step)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def write_pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        """Write each picture."""
        writer = self._started(step)
        for name, picture in pictures.items():
            writer.add_image(name, picture, step, dataformats="HWC")
        writer.flush()

    def _started(self, step: int) -> Any:
        if self._writer is None:
            self.start(step - 1)
        return self._writer

    def close(self) -> None:
        """Write out and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _EventFile:
    """A file of events of tensorboardX, without the thread that its SummaryWriter writes by.

    That one's `flush` does not wait for the events in its queue, so a kill loses them.
    """

    def __init__(self, directory: Path, purge_step: int, suffix: str) -> None:
        self._summary: Any = importlib.import_module("tensorboardX.summary")
        self._proto: Any = importlib.import_module("tensorboardX.proto.event_pb2")
        events: Any = importlib.import_module("tensorboardX.event_file_writer")
        with explained(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = events.EventsWriter(str(directory / "events"), suffix)
        begun = self._proto.SessionLog(status=self._proto.SessionLog.START)
        self._add(purge_step, session_log=begun)
        self.flush()

    def _add(self, step: int, **content: Any) -> None:
        self._file.write_event(self._proto.Event(wall_time=time.time(), step=step, **content))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._add(step, summary=self._summary.scalar(name, value))

    def add_image(self, name: str, picture: np.ndarray, step: int, *, dataformats: str) -> None:
        self._add(step, summary=self._summary.image(name, picture, dataformats=dataformats))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandB:
    """A run of Weights & Biases.

    Args:
        project: the project of the run.
        id_file: a file that keeps the run's id, so that a resumed run is the same one. Its service
            then ignores steps that it has already.
        **options: arguments of `wandb.init`; with `id=` a resumed run is the same run.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, project: str, id_file: str | Path | None = None, **options: Any) -> None:
        if not _has("wandb"):
            raise MissingExtraError("WandB", "wandb", "log")
        self.options = {"project": project, "resume": "allow", **options}
        self._id_file = None if id_file is None else Path(id_file)
        self._run: Any = None

    def start(self, step: int) -> None:
        """Start or resume the run."""
        del step
        self.close()
        if self._id_file is not None:
            self.options["id"] = _kept_id(self._id_file)
        made: Any = importlib.import_module("wandb")
        self._run = made.init(**self.options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        self._log(step, dict(values))

    def write_pictures(self, step: int, pictures: Mapping[str, np.ndarray]) -> None:
        """Log the pictures of a step."""
        made: Any = importlib.import_module("wandb")
        self._log(step, {name: made.Image(picture) for name, picture in pictures.items()})

    def _log(self, step: int, values: dict[str, Any]) -> None:
        if self._run is None:
            self.start(step)
        run: Any = self._run
        run.log(values, step=step)

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _kept_id(path: Path) -> str:
    """Return the id that a file keeps, or write a new one."""
    with explained(path):
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing_file(path) as temporary:
                temporary.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
        return path.read_text(encoding="utf-8").strip()


def as_sinks(given: Any) -> list[Sink]:
    """Return a list of sinks from one or several.

    Raises:
        UsageError: something else is among them.
    """
    many = [given] if hasattr(given, "write") else list(given)
    for one in many:
        if not all(callable(getattr(one, name, None)) for name in ("start", "write", "close")):
            raise UsageError(
                f"sinks: a {type(one).__name__} has no start, write and close. What to do: give"
                " JsonLines('log.jsonl'), TensorBoard(...), WandB(...) or an object with these"
            )
    return many


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
