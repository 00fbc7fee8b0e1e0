"""Batches of fixed shapes in an order that can be gone on with, each process its own rows."""

import json
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import EllipsisType
from typing import Any, Literal, Self

import torch

from tpuport.errors import UsageError
from tpuport.training.input.ahead import OnDevice
from tpuport.training.input.buckets import Buckets, as_buckets
from tpuport.training.input.sources import Indexed, Place, Read, Share, Workers
from tpuport.training.input.taken_over import Settings, settled, source_of

# The entry that says which rows of a padded batch are samples.
MASK = "sample_mask"


class BatchesWarning(UserWarning):
    """Something of the input may not be meant."""


class Batches:
    """The batches of a training run: endless, of fixed shapes, and gone on with after a restart.

        batches = Batches(dataset, batch_size=64, workers=4)
        for batch in batches.on(step):  # on the devices, read ahead
            state, metrics = step(state, batch)
            saved.save(state, batches.position)

    The order of an epoch follows from the seed and the epoch's number, the random numbers that a
    sample draws from the seed, the epoch and its index: neither depends on workers, on processes
    or on where a run was resumed.

    Args:
        dataset: a torch `Dataset` or any sequence; an iterable; a torch `DataLoader`, whose
            settings are taken over; or a loader or data set of grain.
        batch_size: rows of a batch, of all processes together: each reads its part of them. None
            if the items are batches already. Of a loader it is its own.
        shuffle: another order in each epoch; by default what has indices is shuffled.
        seed: of the order, and of the random numbers that samples draw.
        collate: a list of samples to a batch; by default as torch does.
        last: what becomes of a short last batch: "drop" leaves it out; "pad" fills it with
            samples that it has already, and every batch says which rows count in an entry
            "sample_mask" (rows,), bool, at the end of it if it is a tuple. By default "drop"; a
            loader that keeps short batches (`drop_last=False`) and has some needs a word.
        workers: processes that read samples; they are spawned, so a script that has some needs
            `if __name__ == "__main__":`. 0 reads in the process itself.
        buckets: lengths that ragged entries are padded to, or `Buckets`.
        prefetch: batches that are read ahead.

    Raises:
        UsageError: an argument is of no use.
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
            Settings(
                dataset,
                batch_size,
                shuffle,
                seed,
                collate,
                last,
                Workers(workers, max(prefetch, 1)),
                as_buckets(buckets),
                prefetch,
            )
        )
        self._source = source_of(self._settings)
        self._place, self._times_restored = Place(), 0
        self._live: tuple[Iterator[Read], Place, Share] | None = None
        self._readers: weakref.WeakSet[OnDevice] = weakref.WeakSet()

    # -- what there is -----------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches of an epoch.

        Raises:
            UsageError: it is a stream, and not known.
        """
        if self._source.num_batches is None:
            raise UsageError(
                f"how many batches an epoch of a {type(self._settings.dataset).__name__} has is not"
                " known before its end"
            )
        return self._source.num_batches

    def __bool__(self) -> bool:
        """Always: whether there are batches is known when they are read."""
        return True

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch, or None for a stream."""
        return self._source.num_batches

    @property
    def pads(self) -> bool:
        """Whether some batches have rows that repeat others, which "sample_mask" tells apart."""
        if self._settings.last != "pad" or self._settings.batch_size is None:
            return False
        if isinstance(self._source, Indexed) and not self._source.order.grouped:
            return self._source.order.short_by > 0
        return True

    # -- where it is -------------------------------------------------------------------------------

    @property
    def position(self) -> dict[str, Any]:
        """Where the next batch is, as JSON has it: of those that were given out, not read ahead."""
        place = {"epoch": self._place.epoch, "batch": self._place.batch}
        inner = {} if self._place.inner is None else {"inner": self._place.inner}
        return {**place, **inner, **self._order()}

    def _order(self) -> dict[str, Any]:
        """What the order depends on."""
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
        """Go on from a position, with the batch that would have come next.

        Raises:
            UsageError: it is of other data, another batch size or another order, or no position.
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
        self._place = Place(int(position["epoch"]), int(position["batch"]), position.get("inner"))
        self._times_restored += 1

    # -- reading -----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Batches of torch tensors on the host from the position on, over all epochs."""
        while True:
            yield self._taken()[0]

    def epoch(self) -> Iterator[Any]:
        """The batches up to the end of the epoch; the next call gives those of the next one."""
        ends = False
        while not ends:
            batch, ends = self._taken()
            yield batch

    def on(self, step: Any) -> OnDevice:
        """The same batches on the devices of a step, `prefetch` of them ahead.

        Over a mesh each process reads the rows that its chips hold. What worker processes or
        grain read is put there by a thread; an error in either is raised by the next batch.

        Args:
            step: what `make_train_step` gave; of anything else the batches stay on the host.
        """
        reader = OnDevice(self, step, self._settings.prefetch)
        self._readers.add(reader)
        return reader

    def _taken(self) -> tuple[Any, bool]:
        read = self._read(self._place, default_share())
        batch = self._masked(read, default_share())
        self._place = read.after
        return batch, read.ends

    def _read(self, place: Place, share: Share) -> Read:
        """The batch at a place; the reading goes on where it is already."""
        if self._live is None or self._live[1:] != (place, share):
            self._stop()
            self._live = self._source.read(place, share), place, share
        reading = self._live[0]
        self._live = None  # what failed is begun again
        read = next(reading)
        self._live = reading, read.after, share
        return read

    def _masked(self, read: Read, share: Share) -> Any:
        """A batch with the mask of its rows, if short ones are padded."""
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
        """End threads and worker processes; iterating again begins at the position."""
        for reader in list(self._readers):
            reader.close()
        self._stop()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def default_share() -> Share:
    """This process's part of a batch where no mesh says more."""
    import jax

    return Share(jax.process_index(), jax.process_count())


def tell(message: str) -> None:
    """Warn of what may not be meant."""
    warnings.warn(message, BatchesWarning, stacklevel=3)
