"""Rows selected by a mask in a program of plain torchax, where no size can depend on data.

`MaskedRows` holds every row that might be selected, in order, and which of them are. A row that is
not selected is a copy of the first selected one, so that no function, and no gradient of one, meets
a value that it would not meet in eager PyTorch. Where two masks meet, a stable sort moves the
selected rows to the front: the first `count` rows are real. If two counts differ that eager PyTorch
needs to be equal, the result is NaN.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.errors import PortError
from tpuport.ops.torchax.values import array_of, number_of, wrap
from tpuport.source.inference.rowwise import HOST_ATTRIBUTES

REMEDY = "use tpuport.convert, which carries such sizes, or rewrite it with torch.where"


def refuse(what: str) -> PortError:
    """Return the error for an operation that an unknown number of rows does not support."""
    return PortError(f"rows that a traced mask selects cannot {what}", code="TPU210", remedy=REMEDY)


@dataclass(frozen=True, eq=False)
class RowPiece:
    """A run of rows: those of one mask, or with `negated` those that it leaves out.

    The mask is known by its array, or for a view by the array of its source and its steps.
    """

    mask: jax.Array
    steps: Sequence[Any]
    negated: bool
    size: int

    def is_of_same_mask(self, other: "RowPiece") -> bool:
        """Return whether both come from one mask."""
        return self.mask is other.mask and self.steps == other.steps


@dataclass(frozen=True, eq=False)
class MaskedRows:
    """Rows that a mask selects.

    Attributes:
        values: All rows, [..., M, ...].
        keep: bool[M]: which of them are selected.
        right: The axis of the rows, counted from the right: 1 is the last.
        pieces: The selections that the rows were joined from, if they are known.
        wrong: bool[]: whether counts of rows differ that have to be equal; None if they cannot.
    """

    values: torch.Tensor
    keep: jax.Array
    right: int
    pieces: tuple[RowPiece, ...] | None = None
    wrong: jax.Array | None = None

    is_rows = True

    @property
    def axis(self) -> int:
        """Return the axis of the rows."""
        return self.values.ndim - self.right

    @property
    def bound(self) -> int:
        """Return how many rows there are at most."""
        return self.keep.shape[0]

    @property
    def count(self) -> jax.Array:
        """Return how many rows are selected, as int32[]."""
        return jnp.sum(self.keep, dtype=jnp.int32)

    @property
    def spread(self) -> jax.Array:
        """Return which rows are selected, in a shape that broadcasts against the values."""
        return self.keep.reshape((-1,) + (1,) * (self.right - 1))

    # What Python and torch ask of a tensor.

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return the sizes; that of the rows is a traced number."""
        sizes: list[Any] = list(self.values.shape)
        sizes[self.axis] = number_of(self.count, int)
        return tuple(sizes)

    def dim(self) -> int:
        """Return the number of axes."""
        return self.values.ndim

    def size(self, dim: int | None = None) -> Any:
        """Return one size, or all of them."""
        return self.shape if dim is None else self.shape[dim]

    def reshape(self, *shape: Any) -> "MaskedRows":
        """Cut each row into several: the first size has to be -1."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if self.axis != 0 or not sizes or not isinstance(sizes[0], int) or sizes[0] != -1:
            raise refuse("be given a size, except that the first one may be -1")
        rest = tuple(int(size) for size in sizes[1:])
        each, per_row = math.prod(rest), math.prod(self.values.shape[1:])
        if each == 0 or per_row % each:
            raise refuse(f"be cut into pieces of shape {rest}, which do not fill a row")
        factor = per_row // each
        values = self.values.reshape(self.bound * factor, *rest)
        if factor == 1:
            return replace(self, values=values, right=values.ndim)
        keep = jnp.repeat(self.keep, factor)
        return replace(self, values=values, keep=keep, right=values.ndim, pieces=None)

    view = reshape

    def flatten(self) -> "MaskedRows":
        """Cut each row into its elements."""
        return self.reshape(-1)

    def __getitem__(self, index: Any) -> "MaskedRows":
        first, *rest = index if isinstance(index, tuple) else (index,)
        whole = first is Ellipsis or (isinstance(first, slice) and first == slice(None, first.stop))
        if self.axis != 0 or not whole or sum(item is not None for item in rest) >= self.dim():
            raise refuse("be indexed by the number of a row, or sliced from another than the first")
        rows = self if first is Ellipsis or first.stop is None else self._first(first.stop)
        if not rest:
            return rows
        start = Ellipsis if first is Ellipsis else slice(None)
        # A tensor of its own, where torchax returns a view.
        values = wrap(array_of(rows.values[(start, *rest)]))
        return replace(rows, values=values, right=values.ndim)

    def _first(self, stop: Any) -> "MaskedRows":
        rows = compact(self, self.bound)
        last = array_of(stop)
        last = jnp.where(last < 0, rows.count + last, last)
        keep = rows.keep & (jnp.arange(rows.bound) < last)
        return replace(rows, keep=keep, pieces=None)

    def __getattr__(self, name: str) -> Any:
        from tpuport.ops.torchax.masked_functions import method

        return getattr(self.values, name) if name in HOST_ATTRIBUTES else method(self, name)


def _operator(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def apply(self: MaskedRows, *others: Any) -> Any:
        from tpuport.ops.torchax.masked_functions import elementwise

        return elementwise(function, (*others, self) if swapped else (self, *others), {})

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"):
    _function = getattr(operator, f"__{_name}__")
    setattr(MaskedRows, f"__{_name}__", _operator(_function))
    setattr(MaskedRows, f"__r{_name}__", _operator(_function, swapped=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs", "pos"):
    setattr(MaskedRows, f"__{_name}__", _operator(getattr(operator, f"__{_name}__")))


# Several selections at once.


def fixed(value: torch.Tensor, right: int) -> MaskedRows:
    """Convert a tensor to `MaskedRows` that are all selected."""
    size = value.shape[value.ndim - right]
    return MaskedRows(wrap(array_of(value)), jnp.ones(size, bool), right)


def compact(rows: MaskedRows, bound: int) -> MaskedRows:
    """Move the selected rows to the front, in order, and pad to `bound` rows with copies."""
    array = array_of(rows.values)
    if rows.bound:
        order = jnp.argsort(~rows.keep, stable=True)
        order = jnp.pad(order, (0, bound - rows.bound), mode="constant")
        values = jnp.take(array, order, axis=rows.axis)
    else:
        shape = (*array.shape[: rows.axis], bound, *array.shape[rows.axis + 1 :])
        values = jnp.zeros(shape, array.dtype)
    return replace(rows, values=wrap(values), keep=jnp.arange(bound) < rows.count, pieces=None)


def align(parts: Sequence[MaskedRows]) -> tuple[list[MaskedRows], MaskedRows]:
    """Line up the rows of several selections; return them, and a template for the result.

    As in eager PyTorch their counts must be equal, or one: a single row is broadcast to all of the
    others. A mismatch is known only when the program runs, and is recorded in `wrong`.
    """
    first = parts[0]
    if any(part.right != first.right for part in parts):
        raise refuse("be combined along different axes")
    wrongs = [part.wrong for part in parts]
    if all(is_same_selection(part, first) for part in parts):
        return list(parts), replace(first, wrong=any_of(wrongs))
    bound = max(part.bound for part in parts)
    counts = [part.count for part in parts]
    total = counts[0]
    for count in counts[1:]:
        wrongs.append((count != total) & (count != 1) & (total != 1))
        fewest = jnp.minimum(count, total)
        total = jnp.where(total == 1, count, jnp.where(count == 1, total, fewest))
    moved = [
        _repeated(compact(part, bound), count) for part, count in zip(parts, counts, strict=True)
    ]
    return moved, replace(moved[0], keep=jnp.arange(bound) < total, wrong=any_of(wrongs))


def _repeated(rows: MaskedRows, count: jax.Array) -> MaskedRows:
    """Repeat the first row at all places, if `count` is one."""
    array = array_of(rows.values)
    if not rows.bound:
        return rows
    single = jax.lax.slice_in_dim(array, 0, 1, axis=rows.axis)
    return replace(rows, values=wrap(jnp.where(count == 1, single, array)))


def is_same_selection(first: MaskedRows, second: MaskedRows) -> bool:
    """Return whether two selections surely take the same rows of the same number of rows."""
    if first.keep is second.keep:
        return True
    ours, theirs = first.pieces, second.pieces
    if ours is None or theirs is None or first.bound != second.bound or len(ours) != len(theirs):
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(a.is_of_same_mask(b) and a.negated == b.negated for a, b in pairs)


def any_of(flags: Sequence[jax.Array | None]) -> jax.Array | None:
    """Return whether any of several traced flags holds; None if there are none."""
    given = [flag for flag in flags if flag is not None]
    return functools.reduce(operator.or_, given) if given else None


def poisoned(array: jax.Array, wrong: jax.Array | None) -> jax.Array:
    """Replace an array by NaN where eager PyTorch would have raised."""
    if wrong is None:
        return array
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise refuse("be matched with others here: there is no NaN to tell that they do not fit")
    return jnp.where(wrong, jnp.asarray(jnp.nan, array.dtype), array)
