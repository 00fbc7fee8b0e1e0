"""What a loop goes over besides a range: the rows and parts of tensors, numbered or side by side.

In a `lax.scan` an item is known by the number of its round: a row is a slice of the array that the
scan goes over. It is a view, as in eager, so what a round keeps of it is known to be shared.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.plain_loops import Items
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.errors import port_error
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

    def first(self, number: int) -> Any:
        """Return the item with a known number, made before the first round."""
        return self.numbers[number]

    def arrays(self, rounds: slice) -> list[jax.Array]:
        """Return the arrays that hold the items of some rounds, one row an item."""
        del rounds
        return []

    def item(
        self, peel: int, index: NumberNode, arrays: Iterator[jax.Array], refuse: Refuse
    ) -> Any:
        """Return the item of a round, given its rows of the arrays.

        Args:
            peel: How many rounds there were before those that are counted.
            index: The traced number of the round.
            arrays: Rows of what `arrays` returned.
            refuse: Called where the item is used as it could not be for every round.
        """
        del arrays, refuse
        step = self.numbers.step
        return sym_numbers.from_node(along(index, self.numbers.start + peel * step, step))


@dataclass(frozen=True)
class Rows:
    """The rows of a tensor, or its equal parts of some rows each, which are views."""

    base: TracedTensor
    dim: int
    size: int | None = None

    @property
    def count(self) -> int:
        """Return how many there are."""
        return torch.Tensor.size(self.base, self.dim) // (self.size or 1)

    @property
    def key(self) -> Any:
        """Return what tells it from others."""
        return tuple(torch.Tensor.size(self.base)), self.base.dtype, self.dim, self.size

    @property
    def tensors(self) -> tuple[TracedTensor, ...]:
        """Return the tensors whose rows the items are."""
        return (self.base,)

    @cached_property
    def _is_wide(self) -> bool:
        """Return whether the tensor has 64 bits, which a scan does not go over."""
        return int64.is_wide(self.base._held)

    def _part(self, tensor: torch.Tensor, number: int) -> Any:
        if self.size is None:
            return tensor.select(self.dim, number)
        return tensor.narrow(self.dim, number * self.size, self.size)

    def first(self, number: int) -> Any:
        """Return the item with a known number, made before the first round."""
        return self._as_one_of_many(self._part(self.base, number))

    def arrays(self, rounds: slice) -> list[jax.Array]:
        """Return the arrays that hold the items of some rounds, one row an item."""
        if self._is_wide:
            return []
        value, dim = self.base._held, self.dim
        if self.size is not None:
            shape = (*value.shape[:dim], self.count, self.size, *value.shape[dim + 1 :])
            value = value.reshape(shape)
        return [jnp.moveaxis(value, dim, 0)[rounds]]

    def item(
        self, peel: int, index: NumberNode, arrays: Iterator[jax.Array], refuse: Refuse
    ) -> Any:
        """Return the item of a round, given its rows of the arrays; see `Counted.item`."""
        array, number = None if self._is_wide else next(arrays), index.value + peel

        def read(value: jax.Array) -> jax.Array:
            if array is not None:
                return array
            if self.size is None:
                return jax.lax.dynamic_index_in_dim(value, number, self.dim, keepdims=False)
            return jax.lax.dynamic_slice_in_dim(value, number * self.size, self.size, self.dim)

        step = Moving(read, lambda _, new: refuse(), refuse)
        return self._as_one_of_many(view_of(self.base, step, self._part(meta_of(self.base), 0)))

    def _as_one_of_many(self, row: Any) -> Any:
        """Return a view to which autograd refuses writes, as to each that one op returns."""
        name = "Unbind" if self.size is None else "Split"
        row._unwritable = row._unwritable or (
            f"Output 0 of {name}Backward0 is a view and is being modified inplace. This view is the"
            " output of a function that returns multiple views. Such functions do not allow the"
            " output views to be modified inplace."
        )
        return row


@dataclass(frozen=True)
class Zipped:
    """The items of several series side by side, as tuples."""

    parts: "tuple[Series, ...]"

    @property
    def count(self) -> int:
        """Return how many there are."""
        return min(part.count for part in self.parts)

    @property
    def key(self) -> Any:
        """Return what tells it from others."""
        return tuple(part.key for part in self.parts)

    @property
    def tensors(self) -> tuple[TracedTensor, ...]:
        """Return the tensors whose rows the items are."""
        return tuple(tensor for part in self.parts for tensor in part.tensors)

    def first(self, number: int) -> Any:
        """Return the item with a known number, made before the first round."""
        return tuple(part.first(number) for part in self.parts)

    def arrays(self, rounds: slice) -> list[jax.Array]:
        """Return the arrays that hold the items of some rounds, one row an item."""
        return [array for part in self.parts for array in part.arrays(rounds)]

    def item(
        self, peel: int, index: NumberNode, arrays: Iterator[jax.Array], refuse: Refuse
    ) -> Any:
        """Return the item of a round, given its rows of the arrays; see `Counted.item`."""
        return tuple(part.item(peel, index, arrays, refuse) for part in self.parts)


Series = Counted | Rows | Zipped


def series_of(items: Any) -> Series | None:
    """Return what a loop goes over; None if its items are not known by their numbers."""
    if type(items) is range:
        return Counted(items)
    if type(items) is TracedTensor:
        return _rows(items)
    if type(items) is not Items:
        return None
    function, given, named = items.function, items.given, items.named
    if function is enumerate:
        return _numbered(*given, **named)
    if function is zip:
        return _zipped(*given, **named)
    if function in (torch.unbind, torch.split, torch.chunk) and given:
        source, *given = given
    else:
        source = getattr(function, "__self__", None)
    names = _ARGUMENTS.get(getattr(function, "__name__", ""))
    if type(source) is not TracedTensor or names is None or len(given) > len(names):
        return None
    bound = dict(zip(names, given, strict=False))
    if set(named) - set(names[len(given) :]):
        return None
    return _rows(source, **bound, **named)


# Of methods of tensors that return views of all their parts.
_ARGUMENTS = {"unbind": ("dim",), "split": ("split_size", "dim"), "chunk": ("chunks", "dim")}


def _numbered(items: Any, start: Any = 0) -> Series | None:
    inner = series_of(items)
    if inner is None or type(start) is not int:
        return None
    return Zipped((Counted(range(start, start + inner.count)), inner))


def _zipped(*items: Any, strict: Any = False) -> Series | None:
    parts = [one for one in map(series_of, items) if one is not None]
    if not parts or len(parts) < len(items):
        return None
    is_alike = len({part.count for part in parts}) == 1
    return Zipped(tuple(parts)) if is_alike or strict is False else None


def _rows(source: TracedTensor, dim: Any = 0, **parts: Any) -> Rows | None:
    """Return the rows of a tensor, or its parts if there is a size of them, or their number."""
    numbers, rank = (dim, *parts.values()), source.dim()
    if extents_of(source) or any(type(n) is not int for n in numbers) or not -rank <= dim < rank:
        return None
    (most,) = parts.values() or (1,)
    rows = torch.Tensor.size(source, dim)
    if most < 1 or rows < 1:
        return None
    if not parts:
        return Rows(source, dim % rank)
    size = -(-rows // most) if "chunks" in parts else most
    return Rows(source, dim % rank, size) if rows % size == 0 else None


class ItemsWatch:
    """What shows that the rounds of a loop use its items as they could not in a scan."""

    def __init__(self, series: Series) -> None:
        self._before = [(one._storage, one._storage.held) for one in series.tensors]
        self._is_refused = False

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
