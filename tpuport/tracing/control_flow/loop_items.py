"""What a loop goes over besides a range: the rows of tensors, alone, numbered or side by side.

In a `lax.scan` an item is known by the number of its round: a row is a slice of the array that the
scan goes over. It is a view, as in eager, so what a round keeps of it is known to be shared.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.plain_loops import Items
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.storage import Storage
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import TracedTensor, meta_of, view_of
from tpuport.tracing.core.view_steps import Moving
from tpuport.tracing.dynamic_shapes.extents import along, extents_of

Refuse = Callable[[], NoReturn]


@dataclass(frozen=True)
class Counted:
    """The numbers of a range."""

    numbers: range
    tensors: tuple[TracedTensor, ...] = ()

    @property
    def count(self) -> int:
        """Return how many there are."""
        return len(self.numbers)

    @property
    def key(self) -> Any:
        """Return what tells it from others."""
        return self.numbers

    def plain(self) -> Iterable[Any]:
        """Return what Python goes over."""
        return self.numbers

    def first(self, number: int) -> Any:
        """Return the item with a known number, made before the first round."""
        return self.numbers[number]

    def arrays(self, peel: int) -> list[jax.Array]:
        """Return the arrays that hold the items after the first ones, one row an item."""
        del peel
        return []

    def item(
        self, peel: int, index: NumberNode, arrays: Iterator[jax.Array], refuse: Refuse
    ) -> Any:
        """Return the item with a traced number, given its rows of the arrays.

        `refuse` is called where it is used as it could not be for every round.
        """
        del arrays, refuse
        step = self.numbers.step
        return sym_numbers.from_node(along(index, self.numbers.start + peel * step, step))


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor, which are views."""

    base: TracedTensor
    dim: int

    @property
    def count(self) -> int:
        """Return how many there are."""
        return torch.Tensor.size(self.base, self.dim)

    @property
    def key(self) -> Any:
        """Return what tells it from others."""
        return tuple(torch.Tensor.size(self.base)), self.base.dtype, self.dim

    @property
    def tensors(self) -> tuple[TracedTensor, ...]:
        """Return the tensors whose rows the items are."""
        return (self.base,)

    @cached_property
    def _is_wide(self) -> bool:
        """Return whether the tensor has 64 bits, which a scan does not go over."""
        return int64.is_wide(self.base._held)

    def plain(self) -> Iterable[Any]:
        """Return what Python goes over."""
        return self.base.unbind(self.dim)

    def first(self, number: int) -> Any:
        """Return the item with a known number, made before the first round."""
        return _as_one_of_many(self.base.select(self.dim, number))

    def arrays(self, peel: int) -> list[jax.Array]:
        """Return the arrays that hold the items after the first ones, one row an item."""
        return [] if self._is_wide else [jnp.moveaxis(self.base._held, self.dim, 0)[peel:]]

    def item(
        self, peel: int, index: NumberNode, arrays: Iterator[jax.Array], refuse: Refuse
    ) -> Any:
        """Return the item with a traced number, given its rows of the arrays.

        `refuse` is called where it is used as it could not be for every round.
        """
        array, place = None if self._is_wide else next(arrays), index.value + peel

        def read(value: jax.Array) -> jax.Array:
            if array is not None:
                return array
            return jax.lax.dynamic_index_in_dim(value, place, self.dim, keepdims=False)

        step = Moving(read, lambda _, new: refuse(), refuse)
        return _as_one_of_many(view_of(self.base, step, meta_of(self.base).select(self.dim, 0)))


def _as_one_of_many(row: Any) -> Any:
    """Return a view to which autograd refuses writes, as to each that one op returns."""
    row._unwritable = row._unwritable or (
        "Output 0 of UnbindBackward0 is a view and is being modified inplace. This view is the"
        " output of a function that returns multiple views. Such functions do not allow the output"
        " views to be modified inplace."
    )
    return row


Series = Counted | Rows


def series_of(items: Any) -> Series | None:
    """Return what a loop goes over; None if its items are not known by their numbers."""
    if type(items) is range:
        return Counted(items)
    if type(items) is TracedTensor:
        return _rows(items, 0)
    if type(items) is not Items:
        return None
    name, source, given = _called(items)
    if name == "unbind" and _takes(given, items.named, "dim"):
        return _rows(source, *given, **items.named)
    return None


def _called(items: Items) -> tuple[str, Any, tuple[Any, ...]]:
    """Return the name of a method of a tensor, the tensor and what it is called with."""
    function, given = items.function, items.given
    if function is torch.unbind and given:
        return "unbind", given[0], given[1:]
    source = getattr(function, "__self__", None)
    is_own = type(source) is TracedTensor and not isinstance(function, type)
    return (getattr(function, "__name__", ""), source, given) if is_own else ("", None, ())


def _takes(given: tuple[Any, ...], named: dict[str, Any], *names: str) -> bool:
    """Return whether a call has no more than some arguments."""
    return len(given) + len(named) <= len(names) and set(named) <= set(names[len(given) :])


def _rows(source: Any, dim: Any = 0) -> Rows | None:
    if type(source) is not TracedTensor or extents_of(source) or type(dim) is not int:
        return None
    rank = source.dim()
    if not -rank <= dim < rank:
        return None
    return Rows(source, dim % rank)


class ItemsWatch:
    """What shows that the rounds of a loop use its items as they could not in a scan."""

    def __init__(self, series: Series) -> None:
        self._before = [(one._storage, one._storage.held) for one in series.tensors]
        self._is_refused = False

    @cached_property
    def storages(self) -> list[Storage]:
        """Return the memory of the items."""
        return [storage for storage, _ in self._before]

    def refuse(self) -> NoReturn:
        """Raise, and note that, as the code may catch it."""
        self._is_refused = True
        raise _refusal()

    def check(self) -> None:
        """Raise if a round has written to its items or asked where they are.

        Raises:
            PortError: it has.
        """
        if self._is_refused or any(storage.held is not held for storage, held in self._before):
            raise _refusal()


def _refusal() -> Exception:
    return port_error(
        "a loop over the rows of a tensor writes to them, or asks where they are in memory",
        code="TPU104",
        remedy="write to a copy: row.clone()",
    )
