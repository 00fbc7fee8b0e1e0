"""Sinks for the numbers of a run: lines of JSON, TensorBoard, Weights & Biases."""

import importlib
import importlib.util
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

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
    """Scalars for TensorBoard, by tensorboardX or by torch's own writer.

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
        if _has("tensorboardX"):
            made: Any = importlib.import_module("tensorboardX")
        else:
            made = importlib.import_module("torch.utils.tensorboard")
        # TensorBoard hides events of earlier files from purge_step on.
        self._writer = made.SummaryWriter(str(self.directory), purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar for each number."""
        if self._writer is None:
            self.start(step)
        writer: Any = self._writer
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write out and close."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class WandB:
    """A run of Weights & Biases.

    Args:
        project: the project of the run.
        **options: arguments of `wandb.init`; with `id=` a resumed run is the same run.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, project: str, **options: Any) -> None:
        if not _has("wandb"):
            raise MissingExtraError("WandB", "wandb", "log")
        self.options = {"project": project, "resume": "allow", **options}
        self._run: Any = None

    def start(self, step: int) -> None:
        """Start or resume the run."""
        del step
        self.close()
        made: Any = importlib.import_module("wandb")
        self._run = made.init(**self.options)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step."""
        if self._run is None:
            self.start(step)
        run: Any = self._run
        run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


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
