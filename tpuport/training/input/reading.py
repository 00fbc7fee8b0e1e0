"""Reads the samples of a batch; imports neither jax nor torchax, as worker processes need none."""

import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from tpuport.errors import UsageError
from tpuport.training.input.buckets import Buckets

# Ends the seed of what `collate` draws.
_COLLATING = 1


@dataclass(frozen=True)
class Job:
    """One batch to read: in each process its own rows.

    Attributes:
        indices: of the samples, with repetitions where the batch was short.
        seed: of the run, and `epoch`: what the random numbers of each sample follow from.
        epoch: which pass over the data.
        length: what ragged entries are padded to; None for the smallest bucket that fits.
    """

    indices: tuple[int, ...]
    seed: int
    epoch: int
    length: int | None = None


class Reader:
    """Samples to batches, as `torch.utils.data.Dataset`s are read: by `reader[job]`.

    Each sample finds torch's, numpy's and Python's global random numbers seeded by the run's seed,
    the epoch and its index: augmentations do not depend on workers, processes or on where a run
    was resumed. `collate` finds them seeded by the indices of the rows that this process reads.

    Args:
        dataset: with `dataset[index]`, or `__getitems__` for several.
        collate: a list of samples to a batch; None for torch's, with the ragged entries padded.
            `dataset[index]` is a batch already where it is False.
        buckets: to which lengths; None pads nothing.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | bool | None, buckets: Any
    ) -> None:
        self.dataset, self.buckets = dataset, buckets
        self.collate = collate

    def __getitem__(self, job: Job) -> Any:
        """The batch of a job, with tensors for arrays."""
        with own_randomness():
            samples = self._samples(job)
            if self.collate is False:
                (batch,) = samples
                return as_tensors(self.padded(batch, job.length))
            # Numbers that no sample drew.
            seed_all(job.seed, job.epoch, *job.indices, _COLLATING)
            return as_tensors(self.collated(samples, job.length))

    def collated_alone(self, samples: list[Any], *numbers: int) -> Any:
        """One batch of samples without indices; what `collate` draws follows from the numbers."""
        with own_randomness():
            seed_all(*numbers, _COLLATING)
            return as_tensors(self.collated(samples, None))

    def collated(self, samples: list[Any], length: int | None) -> Any:
        """One batch of samples."""
        buckets: Buckets | None = self.buckets
        if callable(self.collate):
            return self.padded(self.collate(samples), length)
        if buckets is not None:
            samples = buckets.pad_samples(samples, length)
        return default_collate(samples)

    def padded(self, batch: Any, length: int | None) -> Any:
        """A batch with its ragged entries padded."""
        return batch if self.buckets is None else self.buckets.pad_batch(batch, length)

    def _samples(self, job: Job) -> list[Any]:
        many = getattr(self.dataset, "__getitems__", None)
        if callable(many):
            seed_all(job.seed, job.epoch, job.indices[0])
            found: Any = many(list(job.indices))
            return list(found)
        samples = []
        for index in job.indices:
            seed_all(job.seed, job.epoch, index)
            samples.append(self.dataset[index])
        return samples


def seed_all(*numbers: int) -> None:
    """Seed the global random numbers of torch's CPU, numpy and Python."""
    state = np.random.SeedSequence(numbers).generate_state(4)
    torch.default_generator.manual_seed(int(state[0]) << 32 | int(state[1]))
    np.random.seed(state[2])
    random.seed(int(state[3]))


@contextlib.contextmanager
def own_randomness() -> Iterator[None]:
    """Leave the global random numbers as they were."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


class WorkerStart:
    """What a worker process does first: it stays off the accelerator, which is its parent's.

    Args:
        then: the user's own `worker_init_fn`.
    """

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        """Called by torch with the worker's number."""
        # One for the whole group is for the parent, which still needs batches to save its state.
        signal.signal(signal.SIGTERM, _end_next_time)
        os.environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules:
            # Imported with the user's script, and no device asked for yet.
            sys.modules["jax"].config.update("jax_platforms", "cpu")
        if self.then is not None:
            self.then(worker)


def _end_next_time(number: int, frame: Any) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)


def as_is(value: Any) -> Any:
    """In place of a collating function, where there is nothing to do."""
    return value


def as_tensors(value: Any) -> Any:
    """The same structure with torch tensors for numpy arrays and numbers.

    Raises:
        UsageError: an array of objects or strings.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in "biufc":
            if isinstance(value, np.ndarray):
                raise UsageError(
                    f"a batch has an array of dtype {value.dtype}: expected numbers. What to do:"
                    " leave it out in collate, or make it a list"
                )
            return value.item()
        return torch.from_numpy(np.array(value))
    if isinstance(value, dict):
        made = {key: as_tensors(one) for key, one in value.items()}
        return made if type(value) is dict else _same_kind(value, made)
    if isinstance(value, tuple):
        parts = [as_tensors(one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return [as_tensors(one) for one in value] if isinstance(value, list) else value


def _same_kind(value: Any, made: dict[Any, Any]) -> Any:
    """A mapping of the same class (BatchFeature, ModelOutput) with other values."""
    for key, one in made.items():
        if one is not value[key]:
            value[key] = one
    return value


def rows_of(value: Any, start: int, stop: int, size: int) -> Any:
    """Rows of a whole batch: tensors whose first dim is the batch, and lists of that length."""
    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.ndim and value.shape[0] == size else value
    if isinstance(value, dict):
        return {key: rows_of(one, start, stop, size) for key, one in value.items()}
    if isinstance(value, tuple):
        parts = [rows_of(one, start, stop, size) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        if len(value) == size and not any(isinstance(one, torch.Tensor) for one in value):
            return value[start:stop]
        return [rows_of(one, start, stop, size) for one in value]
    return value


def num_rows(value: Any) -> int:
    """The length of the first dim of the first tensor that has dims; 0 if there is none."""
    if isinstance(value, torch.Tensor):
        return value.shape[0] if value.ndim else 0
    parts: Sequence[Any] = ()
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    return next((n for n in map(num_rows, parts) if n), 0)


def first_dims(value: Any) -> set[int]:
    """The lengths of the first dims of all tensors that have dims."""
    if isinstance(value, torch.Tensor):
        return {value.shape[0]} if value.ndim else set()
    parts: Sequence[Any] = ()
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    return {length for part in parts for length in first_dims(part)}
