"""Batches from grain, which keeps its own order, workers and place."""

import base64
import itertools
import json
from collections.abc import Iterator
from typing import Any

from tpuport.errors import UsageError
from tpuport.training.input.reading import Reader, as_tensors, num_rows
from tpuport.training.input.sources import Place, Read, Share


def is_grain(value: Any) -> bool:
    """Whether something is of grain, which is not imported for asking."""
    return any(cls.__module__.partition(".")[0] == "grain" for cls in type(value).__mro__)


def is_random_access(value: Any) -> bool:
    """Whether it has samples by index (a grain `MapDataset`)."""
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


class GrainSource:
    """What a grain `DataLoader`, `IterDataset` or batched `MapDataset` gives, batch by batch.

    Which part of the data each process reads is said in grain (`ShardOptions`, slices), so each
    batch is taken for this process's rows.

    Args:
        dataset: one of these.
        reader: pads ragged entries.
    """

    num_batches = None
    # Its iterators read ahead by themselves.
    in_background = True

    def __init__(self, dataset: Any, reader: Reader) -> None:
        self.dataset, self.reader = dataset, reader

    def read(self, place: Place, share: Share) -> Iterator[Read]:
        """Batches from there on; each has the loader's state after it as its place."""
        share.common_length(self.reader.buckets)
        for epoch in itertools.count(place.epoch):
            start = place if epoch == place.epoch else Place(epoch)
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
                # Those of several processes differ, and there is one place for all.
                inner = _as_json(items.get_state()) if share.count == 1 else None
                rows = num_rows(batch) * share.count
                before = Read(batch, Place(epoch, number + 1, inner), None, rows)
            if before is None:
                raise UsageError(
                    f"the grain {type(self.dataset).__name__} gave no batch in epoch {epoch} after"
                    f" the first {start.batch}. What to do: make sure that it has some"
                )
            yield Read(before.batch, Place(epoch + 1), None, before.size, ends=True)

    def _batch(self, item: Any) -> Any:
        batch = as_tensors(item)
        return batch if self.reader.buckets is None else self.reader.buckets.pad_batch(batch, None)

    def close(self) -> None:
        """Its workers end with its iterators."""


def _as_json(state: Any) -> Any:
    """A state as JSON has it: a dict as it is, bytes as text."""
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    return {"state": json.loads(json.dumps(state))}


def _from_json(state: Any) -> Any:
    return base64.b64decode(state["base64"]) if "base64" in state else state["state"]
