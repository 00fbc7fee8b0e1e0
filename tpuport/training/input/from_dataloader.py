"""The source for a data set, and settings taken over from an existing loader."""

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)
from torch.utils.data.distributed import DistributedSampler

from tpuport.foundation.errors import UsageError
from tpuport.training.input.buckets import Buckets
from tpuport.training.input.grain_source import GrainSource, is_grain, is_random_access
from tpuport.training.input.order import Order
from tpuport.training.input.reading import Reader, as_is
from tpuport.training.input.sources import Indexed, ReadWorkers, StreamSource

# The setting of a loader that keeps short batches.
_KEEP = "keep"


@dataclass(frozen=True)
class DataLoaderOptions:
    """The arguments of `Batches`; None, or `...` for the batch size, where one was not given.

    Attributes:
        dataset: the data to read.
        batch_size: rows of a batch; None if items are batches.
        shuffle: a new order in each epoch.
        seed: random seed of the order and of the samples.
        collate: makes a batch of samples.
        last: the treatment of a short last batch, "pad" or "drop".
        workers: the processes that read samples.
        buckets: lengths for ragged entries.
        prefetch: number of batches to read ahead.
        sampler: an order of the user's own.
        grouped: the sampler gives batches of indices.
    """

    dataset: Any
    batch_size: int | EllipsisType | None
    shuffle: bool | None
    seed: int
    collate: Callable[[list[Any]], Any] | None
    last: str | None
    workers: ReadWorkers
    buckets: Buckets | None
    prefetch: int
    sampler: Any = None
    grouped: bool = False


def settled(asked: DataLoaderOptions) -> DataLoaderOptions:
    """Fill in defaults, and the settings of a loader if the dataset is one."""
    last = asked.last
    if isinstance(asked.dataset, DataLoader):
        asked = _of_loader(asked, asked.dataset)
    if asked.batch_size is ...:
        if is_grain(asked.dataset):
            asked = replace(asked, batch_size=None)
        else:
            raise UsageError(
                "batch_size was not given. What to do: say how many samples make a batch (of all"
                " processes together), or batch_size=None if the items are batches already"
            )
    size = asked.batch_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise UsageError(f"batch_size={size!r}: expected a number of samples, 1 or more, or None")
    if last not in (None, "pad", "drop"):
        raise UsageError(f"last={last!r}: expected 'pad' or 'drop'")
    if size is None:
        if last is not None:
            raise UsageError(
                f"last={last!r}: the items are batches already (batch_size=None), and taken as they"
                " are. What to do: leave it out, and pad or leave out a short one where it is made"
            )
        asked = replace(asked, last=None)
    shuffle = asked.shuffle
    if shuffle is None:
        shuffle = (
            asked.sampler is None and _has_indices(asked.dataset) and not is_grain(asked.dataset)
        )
    made = replace(asked, shuffle=shuffle, last=asked.last or "drop")
    return _without_short(made) if made.last == _KEEP else made


def _without_short(made: DataLoaderOptions) -> DataLoaderOptions:
    """Drop the short last batch that a loader keeps, if there is provably none.

    Raises:
        UsageError: there is one, or may be one.
    """
    size, giving = made.batch_size, made.sampler if made.sampler is not None else made.dataset
    known = _has_indices(made.dataset) and isinstance(giving, Sized) and not made.grouped
    if known and isinstance(size, int) and len(giving) % size == 0:
        return replace(made, last="drop")
    raise UsageError(
        "the loader keeps a last batch that may be short (drop_last=False), and shapes have to stay"
        " the same. What to do: last='drop' leaves it out; last='pad' fills it with rows that"
        " 'sample_mask' tells the loss not to count"
    )


def source_of(settings: DataLoaderOptions) -> Indexed | StreamSource | GrainSource:
    """Return the source that batches are read from.

    Raises:
        UsageError: the data set is of an unknown kind, or cannot be shuffled.
    """
    dataset, size = settings.dataset, settings.batch_size
    assert size is not ...
    pad = settings.last == "pad"
    reader = Reader(dataset, settings.collate if size is not None else False, settings.buckets)
    if is_grain(dataset) and not (is_random_access(dataset) and size is not None):
        if size is not None or settings.shuffle:
            raise UsageError(
                f"a grain {type(dataset).__name__} makes its own batches and its own order. What to"
                " do: leave batch_size= and shuffle= out, and use .batch() and .shuffle() of grain"
            )
        return GrainSource(dataset, reader)
    if _has_indices(dataset):
        order = Order(
            len(dataset if settings.sampler is None or settings.grouped else settings.sampler),
            size,
            shuffle=bool(settings.shuffle),
            seed=settings.seed,
            pad=pad,
            sampler=settings.sampler,
            grouped=settings.grouped,
        )
        return Indexed(reader, order, settings.workers, settings.seed)
    if not hasattr(dataset, "__iter__"):
        raise UsageError(
            f"dataset is a {type(dataset).__name__}: expected one with __getitem__ and __len__, an"
            " iterable, a torch DataLoader, or one of grain's"
        )
    if settings.shuffle:
        raise UsageError(
            f"a {type(dataset).__name__} has no indices (__len__ and __getitem__), so it cannot be"
            " shuffled. What to do: shuffle=False, and shuffle in the dataset itself"
        )
    if isinstance(dataset, IterableDataset) and settings.workers.count:
        dataset = Spread(dataset, settings.workers, settings.seed)
    elif settings.workers.count:
        raise UsageError(
            f"workers={settings.workers.count}: a {type(dataset).__name__} cannot be read by"
            " several processes. What to do: workers=0, or a torch Dataset"
        )
    return StreamSource(dataset, size, reader, pad, settings.seed)


class Spread:
    """A torch `IterableDataset` read by worker processes, among which it splits its samples itself.

    Args:
        dataset: splits its samples as described in `torch.utils.data.get_worker_info`.
        workers: the processes that read.
        seed: random seed of the workers.
    """

    def __init__(self, dataset: Any, workers: ReadWorkers, seed: int) -> None:
        self.dataset, self.workers, self.seed, self.epoch = dataset, workers, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of the data set if it has a `set_epoch`."""
        self.epoch = epoch
        tell = getattr(self.dataset, "set_epoch", None)
        if callable(tell):
            tell(epoch)

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        loader: Any = DataLoader(
            self.dataset,
            batch_size=None,
            collate_fn=as_is,
            generator=generator,
            **self.workers.options(),
        )
        return iter(loader)


def _has_indices(dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return False
    return isinstance(dataset, Sized)


def _of_loader(asked: DataLoaderOptions, loader: Any) -> DataLoaderOptions:
    """Take over the settings of a torch DataLoader that the user did not give."""
    if asked.shuffle is not None:
        raise UsageError("shuffle: a DataLoader has its own order. What to do: leave it out")
    workers = ReadWorkers(
        asked.workers.count or loader.num_workers,
        loader.prefetch_factor or asked.workers.prefetch,
        loader.worker_init_fn,
        loader.timeout,
    )
    own = loader.collate_fn
    collate = None if own in (default_collate, default_convert) else own
    made = replace(asked, dataset=loader.dataset, workers=workers, collate=asked.collate or collate)
    if isinstance(loader.dataset, IterableDataset):
        made = replace(made, shuffle=False, batch_size=_first(asked.batch_size, loader.batch_size))
        return replace(made, last=made.last or _last_of(loader.drop_last))
    if loader.batch_sampler is None:
        made = _ordered(replace(made, batch_size=_first(asked.batch_size, None)), loader.sampler)
        return made
    if type(loader.batch_sampler) is not BatchSampler:
        _check_share(loader.batch_sampler)
        _check_share(getattr(loader.batch_sampler, "sampler", None))
        size = _first(asked.batch_size, getattr(loader.batch_sampler, "batch_size", ...))
        return replace(
            made,
            sampler=loader.batch_sampler,
            grouped=True,
            shuffle=False,
            batch_size=size,
            last=made.last or _last_of(getattr(loader.batch_sampler, "drop_last", False)),
        )
    made = replace(made, batch_size=_first(asked.batch_size, loader.batch_size))
    return _ordered(
        replace(made, last=made.last or _last_of(loader.drop_last)), loader.batch_sampler.sampler
    )


def _first(asked: Any, otherwise: Any) -> Any:
    return otherwise if asked is ... else asked


def _last_of(drop_last: bool) -> str:
    return "drop" if drop_last else _KEEP


def _ordered(made: DataLoaderOptions, sampler: Any) -> DataLoaderOptions:
    """Take over the order of a sampler: for torch's own, the same kind of order, made by us."""
    if type(sampler) is SequentialSampler:
        return replace(made, shuffle=False)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return replace(made, shuffle=True)
    if type(sampler) is DistributedSampler:
        size = made.batch_size
        # Its loader's batch size is per process, ours is over all processes.
        whole = size * sampler.num_replicas if isinstance(size, int) else size
        return replace(made, shuffle=sampler.shuffle, seed=sampler.seed, batch_size=whole)
    _check_share(sampler)
    return replace(made, sampler=sampler, shuffle=False)


def _check_share(sampler: Any) -> None:
    """Refuse a sampler that gives one process its part: here batches are split afterwards."""
    for name in ("num_replicas", "num_processes", "world_size"):
        count = getattr(sampler, name, None)
        if isinstance(count, int) and count > 1:
            raise UsageError(
                f"the {type(sampler).__name__} gives one of {count} processes its samples"
                f" ({name}={count}), and batches of all samples are shared out here: they would be"
                f" cut twice. What to do: make it for one process ({name}=1), with the batch_size"
                " of all processes together"
            )
