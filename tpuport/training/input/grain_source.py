"""Batches from grain, which has its own order, workers and iterator state."""

import base64
import itertools
import json
from collections.abc import Iterator
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.training.input.reading import Reader, as_tensors, num_rows
from tpuport.training.input.sources import ArrayPlace, HostShard, Read


def is_grain(value: Any) -> bool:
    """Return whether something is an object of grain, without importing grain."""
    return any(cls.__module__.partition(".")[0] == "grain" for cls in type(value).__mro__)


def is_random_access(value: Any) -> bool:
    """Return whether it has samples by index (a grain `MapDataset`)."""
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


class GrainSource:
    """The batches of a grain `DataLoader`, `IterDataset` or batched `MapDataset`.

    grain decides which part of the data each process reads (`ShardOptions`, slices), so each
    batch counts as this process's rows.

    Args:
        dataset: a dataset or loader of grain.
        reader: pads ragged entries.
    """

    num_batches = None
    # Its iterators read ahead by themselves.
    in_background = True

    def __init__(self, dataset: Any, reader: Reader) -> None:
        self.dataset, self.reader = dataset, reader

    def read(self, place: ArrayPlace, share: HostShard) -> Iterator[Read]:
        """Yield batches from a place on, each with the loader's state after it."""
        share.common_length(self.reader.buckets)
        for epoch in itertools.count(place.epoch):
            start = place if epoch == place.epoch else ArrayPlace(epoch)
            items = iter(self.dataset)
            if start.inner is not None:
                items.set_state(_from_json(start.inner))
            else:
                for _ in range(start.batch):
                    next(items, None)
            before: Read | None = None
            for number, item in enumerate(items, start.batch):
                if before is not None:
                    yield before
                batch = self._batch(item)
                # States of several processes differ, and a position is one for all processes.
                inner = _as_json(items.get_state()) if share.count == 1 else None
                rows = num_rows(batch) * share.count
                before = Read(batch, ArrayPlace(epoch, number + 1, inner), None, rows)
            if before is None:
                raise UsageError(
                    f"the grain {type(self.dataset).__name__} gave no batch in epoch {epoch} after"
                    f" the first {start.batch}. What to do: make sure that it has some"
                )
            yield Read(before.batch, ArrayPlace(epoch + 1), None, before.size, ends=True)

    def _batch(self, item: Any) -> Any:
        batch = as_tensors(item)
        return batch if self.reader.buckets is None else self.reader.buckets.pad_batch(batch, None)

    def close(self) -> None:
        """Do nothing: grain's workers end with its iterators."""


def _as_json(state: Any) -> Any:
    """Convert an iterator state to JSON-ready data: dicts stay, bytes become text."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return {"state": json.loads(json.dumps(state))}


def _from_json(state: Any) -> Any:
    return base64.b64decode(state["base64"]) if "base64" in state else state["state"]
