"""Reading the samples of a batch, without jax and torchax, which worker processes do not need."""

import contextlib
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from tpuport.foundation.errors import UsageError
from tpuport.training.input.buckets import Buckets

# Appended to the seed of the random numbers that `collate` draws.
_COLLATING = 1


@dataclass(frozen=True)
class Job:
    """One batch to read: in each process its own rows.

    Attributes:
        indices: indices of the samples, with repetitions where the batch was short.
        seed: random seed of the run, which with `epoch` seeds the random numbers of each sample.
        epoch: number of the pass over the data.
        length: length to pad ragged entries to; None for the smallest bucket that fits.
    """

    indices: tuple[int, ...]
    seed: int
    epoch: int
    length: int | None = None


class Reader:
    """A dataset of batches for torch's `DataLoader`, read by `reader[job]`.

    For each sample torch's, numpy's and Python's global random numbers are seeded by the run's
    seed, the epoch and its index, so augmentations do not depend on workers, processes or where a
    run was resumed. For `collate` they are seeded by the indices of this process's rows.

    Args:
        dataset: with `dataset[index]`, or `__getitems__` for several.
        collate: makes a batch of a list of samples; None for torch's, with ragged entries padded.
            If False, `dataset[index]` is a batch already.
        buckets: lengths to pad to; None pads nothing.
    """

    def __init__(
        self, dataset: Any, collate: Callable[[list[Any]], Any] | bool | None, buckets: Any
    ) -> None:
        self.dataset, self.buckets = dataset, buckets
        self.collate = collate

    def __getitem__(self, job: Job) -> Any:
        """Return the batch of a job, with arrays converted to tensors."""
        with own_randomness():
            samples = self._samples(job)
            if self.collate is False:
                (batch,) = samples
                return as_tensors(self.padded(batch, job.length))
            # Seeds that no sample has used.
            seed_all(job.seed, job.epoch, *job.indices, _COLLATING)
            return as_tensors(self.collated(samples, job.length))

    def collated_alone(self, samples: list[Any], *numbers: int) -> Any:
        """Collate samples without indices; the numbers seed what `collate` draws."""
        with own_randomness():
            seed_all(*numbers, _COLLATING)
            return as_tensors(self.collated(samples, None))

    def collated(self, samples: list[Any], length: int | None) -> Any:
        """Collate samples to one batch."""
        buckets: Buckets | None = self.buckets
        if callable(self.collate):
            return self.padded(self.collate(samples), length)
        if buckets is not None:
            samples = buckets.pad_samples(samples, length)
        return default_collate(samples)

    def padded(self, batch: Any, length: int | None) -> Any:
        """Return a batch with its ragged entries padded."""
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
    """Restore the global random numbers after the block."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


class WorkerStart:
    """The start of a worker process, which keeps it off the accelerator of its parent.

    Args:
        then: the user's own `worker_init_fn`.
    """

    def __init__(self, then: Callable[[int], Any] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        """Set up the worker; torch calls this with the worker's number."""
        # A first SIGTERM, sent to the process group, is for the parent, which still needs batches.
        signal.signal(signal.SIGTERM, _end_next_time)
        os.environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules:
            # The user's script has imported it, but not initialized its backends yet.
            sys.modules["jax"].config.update("jax_platforms", "cpu")
        if self.then is not None:
            self.then(worker)


def _end_next_time(number: int, frame: Any) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)


def as_is(value: Any) -> Any:
    """Return the value: a collate function for batches that are complete already."""
    return value


def as_tensors(value: Any) -> Any:
    """Convert numpy arrays and numbers in a structure to torch tensors.

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
    made = _mapped(as_tensors, value)
    if isinstance(value, dict) and type(value) is not dict:
        # A mapping of another class (ModelOutput) stays one.
        for key, one in made.items():
            if one is not value[key]:
                value[key] = one
        return value
    return made


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the entries of a container; anything else stays."""
    if isinstance(value, dict):
        return {key: function(one) for key, one in value.items()}
    if isinstance(value, tuple):
        parts = map(function, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return [function(one) for one in value] if isinstance(value, list) else value


def rows_of(value: Any, start: int, stop: int, size: int) -> Any:
    """Slice the rows of a batch: of tensors whose first dim is `size`, and lists of that length."""
    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.ndim and value.shape[0] == size else value
    names = isinstance(value, list) and not any(isinstance(one, torch.Tensor) for one in value)
    if names and len(value) == size:
        return value[start:stop]
    return _mapped(lambda one: rows_of(one, start, stop, size), value)


def num_rows(value: Any) -> int:
    """Return the length of the first dim of the first tensor with dims; 0 if there is none."""
    return next((length for length in _first_dims(value) if length), 0)


def first_dims(value: Any) -> set[int]:
    """Return the lengths of the first dims of all tensors that have dims."""
    return set(_first_dims(value))


def _first_dims(value: Any) -> Iterator[int]:
    if isinstance(value, torch.Tensor) and value.ndim:
        yield value.shape[0]
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        for part in parts:
            yield from _first_dims(part)
