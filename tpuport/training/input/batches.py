"""Batches of fixed shapes in a resumable order, each process reading its own rows."""

import json
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import EllipsisType
from typing import Any, Literal, Self

import torch

from tpuport.foundation.errors import UsageError
from tpuport.training.input.buckets import Buckets, as_buckets
from tpuport.training.input.from_dataloader import DataLoaderOptions, settled, source_of
from tpuport.training.input.prefetch import OnDevice
from tpuport.training.input.sources import ArrayPlace, HostShard, Indexed, Read, ReadWorkers

# The entry that marks the rows of a padded batch that are samples.
MASK = "sample_mask"


class BatchesWarning(UserWarning):
    """The input settings look unintended."""


class Batches:
    """The batches of a training run: endless, of fixed shapes, and resumable after a restart.

        batches = Batches(dataset, batch_size=64, workers=4)
        for batch in batches.device_iterator(step):  # on the devices, read ahead
            state, metrics = step(state, batch)
            saved.save(state, batches.position)

    The order of an epoch depends on the seed and the epoch's number. The random numbers that a
    sample draws depend on the seed, the epoch and its index. Neither depends on workers, processes
    or the step at which a run was resumed.

    Args:
        dataset: a torch `Dataset` or any sequence; an iterable; a torch `DataLoader`, whose
            settings are taken over; or a loader or data set of grain.
        batch_size: rows of a batch over all processes, of which each reads its part. None
            if the items are batches already. By default that of a loader.
        shuffle: a new order in each epoch; by default datasets with indices are shuffled.
        seed: random seed of the order and of the random numbers that samples draw.
        collate: makes a batch from a list of samples; by default torch's.
        last: the treatment of a short last batch: "drop" leaves it out; "pad" fills it with
            samples that it has already, and every batch tells which rows count in an entry
            "sample_mask" (rows,), bool, at the end of it if it is a tuple. By default "drop"; a
            loader that keeps short batches (`drop_last=False`) and has some needs a choice.
        workers: the number of processes that read samples. They are spawned, so the script needs
            `if __name__ == "__main__":`. 0 reads in the process itself.
        buckets: lengths that ragged entries are padded to, or `Buckets`.
        prefetch: the number of batches to read ahead.

    Raises:
        UsageError: an argument is invalid.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | EllipsisType | None = ...,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        last: Literal["pad", "drop"] | None = None,
        workers: int = 0,
        buckets: Buckets | Any = None,
        prefetch: int = 2,
    ) -> None:
        if workers < 0 or prefetch < 0:
            raise UsageError(f"workers={workers}, prefetch={prefetch}: expected 0 or more")
        self._settings = settled(
            DataLoaderOptions(
                dataset,
                batch_size,
                shuffle,
                seed,
                collate,
                last,
                ReadWorkers(workers, max(prefetch, 1)),
                as_buckets(buckets),
                prefetch,
            )
        )
        self._source = source_of(self._settings)
        self._place, self._times_restored = ArrayPlace(), 0
        self._live: tuple[Iterator[Read], ArrayPlace, HostShard] | None = None
        self._readers: weakref.WeakSet[OnDevice] = weakref.WeakSet()

    # -- length and padding ------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches of an epoch.

        Raises:
            UsageError: the dataset is a stream, whose length is unknown.
        """
        if self._source.num_batches is None:
            raise UsageError(
                f"how many batches an epoch of a {type(self._settings.dataset).__name__} has is not"
                " known before its end"
            )
        return self._source.num_batches

    def __bool__(self) -> bool:
        """Return True, as only reading shows whether there are batches."""
        return True

    @property
    def num_batches(self) -> int | None:
        """Return the number of batches of an epoch, or None for a stream."""
        return self._source.num_batches

    @property
    def pads(self) -> bool:
        """Return whether some batches are padded with repeated rows, which "sample_mask" marks."""
        if self._settings.last != "pad" or self._settings.batch_size is None:
            return False
        if isinstance(self._source, Indexed) and not self._source.order.grouped:
            return self._source.order.short_by > 0
        return True

    # -- position ----------------------------------------------------------------------------------

    @property
    def position(self) -> dict[str, Any]:
        """Return the position after the last batch that was returned, as JSON-ready data."""
        place = {"epoch": self._place.epoch, "batch": self._place.batch}
        inner = {} if self._place.inner is None else {"inner": self._place.inner}
        return {**place, **inner, **self._order()}

    def _order(self) -> dict[str, Any]:
        """Return the settings that the order depends on."""
        settings, source = self._settings, self._source
        length = source.order.length if isinstance(source, Indexed) else None
        return {
            "seed": settings.seed,
            "batch_size": settings.batch_size,
            "shuffle": settings.shuffle,
            "last": settings.last,
            "length": length,
        }

    def restore(self, position: Mapping[str, Any]) -> None:
        """Resume from a position, with the batch that would have come next.

        Raises:
            UsageError: it is not a position, or its data, batch size or order differs.
        """
        if not isinstance(position, Mapping) or not {"epoch", "batch"} <= position.keys():
            raise UsageError(f"expected a position that Batches gave, got {position!r}")
        for name, value in self._order().items():
            if position.get(name, value) != value:
                raise UsageError(
                    f"the position is of batches with {name}={json.dumps(position[name])}, and"
                    f" these have {name}={json.dumps(value)}: other samples would come. What to do:"
                    f" give them the same {name}, or begin anew in another directory"
                )
        self._place = ArrayPlace(
            int(position["epoch"]), int(position["batch"]), position.get("inner")
        )
        self._times_restored += 1

    # -- reading -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield batches of torch tensors on the host from the position on, over all epochs."""
        while True:
            yield self._taken()[0]

    def epoch(self) -> Iterator[Any]:
        """Yield the batches up to the end of the epoch; the next call continues with the next."""
        ends = False
        while not ends:
            batch, ends = self._taken()
            yield batch

    def device_iterator(self, step: Any) -> OnDevice:
        """Return the same batches on the devices of a step, `prefetch` of them ahead.

        Over a mesh each process reads the rows that its chips hold. Batches that worker processes
        or grain read are placed by a thread; an error in either is raised with the next batch.

        Args:
            step: a step made by `make_train_step`; for anything else the batches stay on the host.
        """
        reader = OnDevice(self, step, self._settings.prefetch)
        self._readers.add(reader)
        return reader

    def _taken(self) -> tuple[Any, bool]:
        read = self._read(self._place, default_share())
        batch = self._masked(read, default_share())
        self._place = read.after
        return batch, read.ends

    def _read(self, place: ArrayPlace, share: HostShard) -> Read:
        """Read the batch at a place, with the live iterator if it is already there."""
        if self._live is None or self._live[1:] != (place, share):
            self._stop()
            self._live = self._source.read(place, share), place, share
        reading = self._live[0]
        self._live = None  # after an error the iterator is made again
        read = next(reading)
        self._live = reading, read.after, share
        return read

    def _masked(self, read: Read, share: HostShard) -> Any:
        """Return a batch with the mask of its rows, if short batches are padded."""
        size = read.size
        if self._settings.last != "pad" or read.kept is None or size is None:
            return read.batch
        mask = (torch.arange(size) < read.kept)[share.rows(size)]
        batch = read.batch
        if isinstance(batch, torch.Tensor):
            return batch, mask
        if type(batch) in (tuple, list):
            return type(batch)([*batch, mask])
        if not isinstance(batch, dict):
            raise UsageError(
                f"last='pad': a {type(batch).__name__} has no place for the mask of its rows. What"
                " to do: give dicts from collate, or last='drop'"
            )
        if MASK in batch:
            raise UsageError(f"last='pad': a batch has an entry {MASK!r} already")
        return {**batch, MASK: mask}

    # -- ending ------------------------------------------------------------------------------------

    def _stop(self) -> None:
        live, self._live = self._live, None
        close = getattr(live[0], "close", None) if live is not None else None
        if close is not None:
            close()

    def close(self) -> None:
        """End threads and worker processes; iterating again starts at the position."""
        for reader in list(self._readers):
            reader.close()
        self._stop()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def default_share() -> HostShard:
    """Return this process's part of a batch where no mesh decides it."""
    import jax

    return HostShard(jax.process_index(), jax.process_count())


def tell(message: str) -> None:
    """Warn of settings that look unintended."""
    warnings.warn(message, BatchesWarning, stacklevel=3)
