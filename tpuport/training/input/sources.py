"""Sources of batches: samples by index, streams of samples, and loaders with their own state.

Each yields one endless sequence over all epochs, from any batch on.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from tpuport.foundation.errors import UsageError
from tpuport.training.input.buckets import Buckets
from tpuport.training.input.order import Order
from tpuport.training.input.reading import (
    Job,
    Reader,
    WorkerStart,
    as_is,
    as_tensors,
    first_dims,
    num_rows,
    rows_of,
)


@dataclass(frozen=True)
class ArrayPlace:
    """A place in the data: the number of completed epochs, and of batches of the next one.

    Attributes:
        epoch: number of the epoch, from 0.
        batch: number of the next batch to read.
        inner: the JSON-ready state of a loader that keeps its own.
    """

    epoch: int = 0
    batch: int = 0
    inner: Any = None


@dataclass(frozen=True)
class HostShard:
    """The rows of a batch that this process reads.

    Attributes:
        index: number of this part among `count` equal parts, in order.
        count: number of parts; 1 where every process reads all rows.
    """

    index: int = 0
    count: int = 1

    def rows(self, size: int) -> slice:
        """Return the rows of this part.

        Raises:
            UsageError: the batch does not divide evenly.
        """
        if size % self.count:
            raise UsageError(
                f"a batch of {size} does not divide over {self.count} processes. What to do: give"
                f" a batch_size that is a multiple of {self.count}"
            )
        part = size // self.count
        return slice(self.index * part, (self.index + 1) * part)

    def of(self, batch: Any) -> Any:
        """Return this part of a batch that every process has read.

        Raises:
            UsageError: its tensors do not agree on its rows, or these do not divide.
        """
        if self.count == 1:
            return batch
        if len(first_dims(batch)) > 1:
            raise UsageError(
                f"a batch has tensors of {sorted(first_dims(batch))} rows, so which rows each of"
                f" {self.count} processes takes is not known. What to do: give every entry the"
                " batch as its first dim"
            )
        size = num_rows(batch)
        rows = self.rows(size)
        return rows_of(batch, rows.start, rows.stop, size)

    def common_length(self, buckets: Buckets | None, length: int | None = None) -> None:
        """Refuse ragged batches whose length each process would choose by itself.

        Raises:
            UsageError: there are several lengths, and none is given.
        """
        if buckets is None or self.count == 1 or length is not None or len(buckets.lengths) == 1:
            return
        raise UsageError(
            "buckets: processes have to choose the same length, and each sees its own samples. What"
            " to do: one length; or, of what has indices, Buckets(lengths, sizes=...) with the"
            " length of each sample"
        )


@dataclass(frozen=True)
class Read:
    """One batch.

    Attributes:
        batch: this process's rows.
        after: place of the next batch.
        kept: number of rows of the global batch that are not padding; None for all.
        size: rows of the global batch, over all processes; None if unknown.
        ends: whether it is the last one of its epoch.
    """

    batch: Any
    after: ArrayPlace
    kept: int | None = None
    size: int | None = None
    ends: bool = False


@dataclass(frozen=True)
class ReadWorkers:
    """The processes that samples are read in.

    Attributes:
        count: number of processes; 0 reads in the process itself.
        prefetch: batches that each one reads ahead.
        start: the user's `worker_init_fn`.
        timeout: seconds to wait for a batch, 0 for ever.
    """

    count: int = 0
    prefetch: int = 2
    start: Callable[[int], Any] | None = None
    timeout: float = 0

    def options(self) -> dict[str, Any]:
        """Return the arguments of torch's DataLoader.

        Processes are spawned: a forked one inherits locks that JAX's threads hold, and waits for
        ever. Nothing is pinned, as that is for copies to a CUDA device.
        """
        if not self.count:
            return {"num_workers": 0, "pin_memory": False}
        return {
            "num_workers": self.count,
            "pin_memory": False,
            "multiprocessing_context": "spawn",
            "prefetch_factor": self.prefetch,
            "worker_init_fn": WorkerStart(self.start),
            "timeout": self.timeout,
        }


class Indexed:
    """Batches of samples with indices: a map-style dataset or any sequence.

    Args:
        reader: reads the samples.
        order: gives the indices of an epoch's batches.
        workers: the processes that read.
        seed: random seed of the run.
    """

    def __init__(self, reader: Reader, order: Order, workers: ReadWorkers, seed: int) -> None:
        self.reader, self.order, self.workers, self.seed = reader, order, workers, seed

    @property
    def num_batches(self) -> int | None:
        """Return the number of batches of one epoch."""
        return self.order.num_batches

    @property
    def in_background(self) -> bool:
        """Return whether worker processes read."""
        return self.workers.count > 0

    def read(self, place: ArrayPlace, share: HostShard) -> Iterator[Read]:
        """Yield batches from a place on, over all epochs."""
        sent: list[Read] = []  # jobs that workers were given and did not answer yet, in order
        jobs = self._jobs(place, share, sent)
        if not self.workers.count:
            for job in jobs:
                yield self._answer(sent, self.reader[job], share)
        loader: Any = DataLoader(
            self.reader,  # pyright: ignore[reportArgumentType]
            batch_size=None,
            sampler=_Once(jobs),  # pyright: ignore[reportArgumentType]
            collate_fn=as_is,
            **self.workers.options(),
        )
        for batch in loader:
            yield self._answer(sent, batch, share)

    def _answer(self, sent: list[Read], batch: Any, share: HostShard) -> Read:
        return replace(sent.pop(0), batch=share.of(batch) if self.order.whole else batch)

    def _jobs(self, place: ArrayPlace, share: HostShard, sent: list[Read]) -> Iterator[Job]:
        buckets = self.reader.buckets
        for epoch in itertools.count(place.epoch):
            batches = self.order.epoch(epoch)
            start = place.batch if epoch == place.epoch else 0
            for number, (indices, kept) in enumerate(batches[start:], start):
                size = len(indices)
                mine = indices if self.order.whole else indices[share.rows(size)]
                length = None if buckets is None else buckets.length_of(indices)
                share.common_length(buckets, length)
                ends = number + 1 == len(batches)
                after = ArrayPlace(epoch + 1) if ends else ArrayPlace(epoch, number + 1)
                sent.append(Read(None, after, kept, size, ends))
                yield Job(tuple(int(i) for i in mine), self.seed, epoch, length)

    def close(self) -> None:
        """Do nothing: workers end with the iterator that reads from them."""


class _Once:
    """A sampler over an iterator, which can be iterated over once."""

    def __init__(self, items: Iterator[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return self.items


class StreamSource:
    """Batches of a stream, which has no indices and is read from its start in each epoch.

    Args:
        dataset: anything that can be iterated over more than once.
        batch_size: rows of a batch; None where items are batches.
        reader: collates samples.
        pad: fill the last batch; else leave it out.
        seed: random seed of what `collate` draws.
    """

    in_background = False
    num_batches = None

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int | None,
        reader: Reader,
        pad: bool,
        seed: int = 0,
    ) -> None:
        self.dataset, self.batch_size, self.reader, self.pad = dataset, batch_size, reader, pad
        self.seed = seed

    def read(self, place: ArrayPlace, share: HostShard) -> Iterator[Read]:
        """Yield batches from a place on; earlier samples are read and skipped."""
        share.common_length(self.reader.buckets)
        for epoch in itertools.count(place.epoch):
            set_epoch = getattr(self.dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            start = place.batch if epoch == place.epoch else 0
            before: Read | None = None
            for number, (batch, kept, size) in enumerate(self._epoch(epoch, start, share)):
                if before is not None:
                    yield before
                if number >= start:
                    before = Read(batch, ArrayPlace(epoch, number + 1), kept, size)
            if before is None:
                raise UsageError(
                    f"the {type(self.dataset).__name__} gave no batch"
                    + (f" after the first {start}" if start else "")
                    + f" in epoch {epoch}. What to do: give what can be iterated over again, such"
                    " as a list or a class with __iter__"
                )
            yield replace(before, after=ArrayPlace(epoch + 1), ends=True)

    def _epoch(
        self, epoch: int, start: int, share: HostShard
    ) -> Iterator[tuple[Any, int | None, int]]:
        """Yield the batches of one epoch; those before `start` are not collated."""
        if self.batch_size is None:
            for item in self.dataset:
                batch = as_tensors(self.reader.padded(item, None))
                yield share.of(batch), None, num_rows(batch)
            return
        samples = iter(self.dataset)
        for number in itertools.count():
            group = list(itertools.islice(samples, self.batch_size))
            kept = len(group)
            if kept < self.batch_size and not (self.pad and kept):
                return
            mine = [group[i % kept] for i in range(self.batch_size)][share.rows(self.batch_size)]
            batch = None
            if number >= start:
                batch = self.reader.collated_alone(mine, self.seed, epoch, number, share.index)
            yield batch, kept, self.batch_size

    def close(self) -> None:
        """Do nothing: there are no workers to end."""
