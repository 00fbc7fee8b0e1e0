"""What `zip` and `enumerate` give over rows whose number depends on data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.concretize import refuse_rows
from tpuport.tracing.core.row_list import RowIterator, RowList
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.dynamic_shapes.extents import extents_of, strip

# Iterators over a known number of items, which nobody else has.
_KNOWN = (type(iter([])), type(iter(())), type(iter(range(0))))


@dataclass
class JoinedRows:
    """Rows that a loop takes together.

    Attributes:
        most: The largest number of rounds.
        counts: How many rows there are, of each source whose number depends on data.
        item: Returns what the loop gets in a round.
    """

    most: int
    counts: list[jax.Array]
    item: Callable[[int], Any]

    def rounds(self) -> Iterator[tuple[Any, jax.Array]]:
        """Yield what each round gets, and whether it is there."""
        for number in range(self.most):
            present = jnp.stack([number < count for count in self.counts]).all()
            yield self.item(number), present


def joined_rows(rows: Any) -> JoinedRows | None:
    """Return what `zip` or `enumerate` goes over; None if no number of rows depends on data.

    Raises:
        PortError: they go over something else, too, whose items are not known.
    """
    if not isinstance(rows, (zip, enumerate)) or not _has_rows(rows):
        return None
    return _joined(rows)


def _has_rows(source: Any) -> bool:
    if isinstance(source, (zip, enumerate)):
        return any(map(_has_rows, _sources(source)))
    return isinstance(source, RowIterator)


def _sources(source: Any) -> tuple[Any, ...]:
    """Return the iterators below, without taking an item from one."""
    given = source.__reduce__()[1]
    return given[:1] if isinstance(source, enumerate) else given


def _joined(source: Any) -> JoinedRows:
    if isinstance(source, RowIterator):
        return _rows(source.source)
    if isinstance(source, enumerate):
        given: Any = source.__reduce__()[1]
        inner, start = given
        below = _joined(inner)
        return JoinedRows(below.most, below.counts, lambda n: (start + n, below.item(n)))
    if isinstance(source, zip):
        if len(source.__reduce__()) > 2:  # strict=True
            raise refuse_rows()
        parts = [_joined(one) for one in _sources(source)]
        counts = [count for part in parts for count in part.counts]
        most = min(part.most for part in parts)
        return JoinedRows(most, counts, lambda n: tuple(part.item(n) for part in parts))
    if not isinstance(source, _KNOWN):
        raise refuse_rows()
    items = list(source)
    return JoinedRows(len(items), [], items.__getitem__)


def _rows(source: RowList | TracedTensor) -> JoinedRows:
    tensor = source.rows if isinstance(source, RowList) else source
    plain: torch.Tensor = strip(tensor)
    count = extents_of(tensor)[0].value
    if isinstance(source, RowList):
        return JoinedRows(plain.shape[0], [count], lambda n: plain[n].tolist())
    return JoinedRows(plain.shape[0], [count], lambda n: plain[n])
