"""Rows selected by a mask in a program of plain torchax, where no size can depend on data.

`MaskedRows` holds every row that might be selected, in order, and which of them are. A row that is
not selected is a copy of the first selected one, so that no function, and no gradient of one, meets
a value that it would not meet in eager PyTorch. Where two masks meet, a stable sort moves the
selected rows to the front: the first `count` rows are real. If two counts differ that eager PyTorch
needs to be equal, the result is NaN.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.errors import PortError

REMEDY = "use tpuport.convert, which carries such sizes, or rewrite it with torch.where"


def refuse(what: str) -> PortError:
    """Return the error for an operation that an unknown number of rows does not support."""
    return PortError(f"rows that a traced mask selects cannot {what}", code="TPU210", remedy=REMEDY)


def wrap(array: jax.Array) -> torch.Tensor:
    """Wrap an array in a tensor of torchax."""
    from torchax import default_env
    from torchax.tensor import Tensor

    return Tensor(array, default_env())


def array_of(value: Any) -> jax.Array:
    """Return the array of a tensor; a CPU tensor becomes a constant of the program."""
    if hasattr(value, "jax"):
        return value.jax()
    if isinstance(value, torch.Tensor):
        return jnp.asarray(value.detach().numpy())
    return jnp.asarray(value)


@dataclass(frozen=True, eq=False)
class RowPiece:
    """A run of rows: those of one mask, or with `negated` those that it leaves out.

    `key` identifies the mask: its array, or for a view the array of its source and the steps of the
    view.
    """

    key: tuple[Any, ...]
    negated: bool
    size: int

    def is_same(self, other: "RowPiece") -> bool:
        """Return whether both select the same rows."""
        return self.negated == other.negated and self.is_of_same_mask(other)

    def is_of_same_mask(self, other: "RowPiece") -> bool:
        """Return whether both come from one mask."""
        (array, *steps), (other_array, *other_steps) = self.key, other.key
        return array is other_array and steps == other_steps


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
    wrong: jax.Array | None = field(default=None)

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

    def spread(self, flags: jax.Array) -> jax.Array:
        """Reshape flags of the rows so that they broadcast against the values."""
        return flags.reshape((-1,) + (1,) * (self.right - 1))

    # What Python and torch ask of a tensor.

    @property
    def shape(self) -> tuple[Any, ...]:
        """Return the sizes; that of the rows is an `UnknownSize`."""
        sizes: list[Any] = list(self.values.shape)
        sizes[self.axis] = UnknownSize()
        return tuple(sizes)

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return self.values.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the values."""
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        """Return whether the values take part in gradients."""
        return self.values.requires_grad

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
        each, per_row = 1, 1
        for size in rest:
            each *= size
        for size in self.values.shape[1:]:
            per_row *= size
        if each == 0 or per_row % each:
            raise refuse(f"be cut into pieces of shape {rest}, which do not fill a row")
        factor = per_row // each
        values = self.values.reshape(self.bound * factor, *rest)
        pieces = self.pieces if factor == 1 else None
        keep = self.keep if factor == 1 else jnp.repeat(self.keep, factor)
        return replace(self, values=values, keep=keep, right=values.ndim, pieces=pieces)

    view = reshape

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> "MaskedRows":
        """Join axes, beginning with the first."""
        end = end_dim % self.ndim
        if start_dim % self.ndim != 0:
            raise refuse("be flattened from another axis than the first")
        return self.reshape(-1, *self.values.shape[end + 1 :])

    def __getitem__(self, index: Any) -> "MaskedRows":
        items = index if isinstance(index, tuple) else (index,)
        first, rest = items[0], items[1:]
        whole = first is Ellipsis or (isinstance(first, slice) and first == slice(None, first.stop))
        if self.axis != 0 or not whole or sum(item is not None for item in rest) >= self.ndim:
            raise refuse("be indexed by the number of a row, or sliced from another than the first")
        rows = self if first is Ellipsis or first.stop is None else self._first(first.stop)
        if not rest:
            return rows
        start = Ellipsis if first is Ellipsis else slice(None)
        values = as_tensor(rows.values[(start, *rest)])
        return replace(rows, values=values, right=values.ndim)

    def _first(self, stop: Any) -> "MaskedRows":
        rows = compact(self, self.bound)
        last = array_of(stop)
        last = jnp.where(last < 0, rows.count + last, last)
        keep = rows.keep & (jnp.arange(rows.bound) < last)
        return replace(rows, keep=keep, pieces=None)

    def __getattr__(self, name: str) -> Any:
        from tpuport.ops.torchax.masked_functions import method

        return method(self, name)


class UnknownSize:
    """The number of rows that a mask selects: it is unknown, and can only be printed."""

    def __repr__(self) -> str:
        return "?"

    def _refuse(self, *_: Any) -> Any:
        raise refuse("be counted while the program is traced")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __int__ = __index__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __float__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = _refuse
    __hash__ = None  # pyright: ignore[reportAssignmentType]


def as_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor of its own, where torchax returns a view."""
    return wrap(array_of(value))


def _operator(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def apply(self: MaskedRows, *others: Any) -> Any:
        from tpuport.ops.torchax.masked_functions import elementwise

        return elementwise(function, (*others, self) if swapped else (self, *others), {})

    return apply


def _install_operators() -> None:
    import operator

    names = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
    for name in names:
        function = getattr(operator, f"__{name}__")
        setattr(MaskedRows, f"__{name}__", _operator(function))
        setattr(MaskedRows, f"__r{name}__", _operator(function, swapped=True))
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs", "pos"):
        setattr(MaskedRows, f"__{name}__", _operator(getattr(operator, f"__{name}__")))


_install_operators()


# Several selections at once.


def fixed(value: torch.Tensor, right: int) -> MaskedRows:
    """Convert a tensor to `MaskedRows` that are all selected."""
    size = value.shape[value.ndim - right]
    return MaskedRows(as_tensor(value), jnp.ones(size, bool), right)


def compact(rows: MaskedRows, bound: int) -> MaskedRows:
    """Move the selected rows to the front, in order, and pad to `bound` rows with copies."""
    order = jnp.argsort(~rows.keep, stable=True)
    order = jnp.pad(order, (0, bound - rows.bound), mode="constant")
    values = jnp.take(array_of(rows.values), order, axis=rows.axis) if rows.bound else None
    if values is None:
        shape = list(rows.values.shape)
        shape[rows.axis] = bound
        values = jnp.zeros(shape, array_of(rows.values).dtype)
    keep = jnp.arange(bound) < rows.count
    return replace(rows, values=wrap(values), keep=keep, pieces=None)


def align(parts: Sequence[MaskedRows]) -> tuple[list[MaskedRows], MaskedRows]:
    """Line up the rows of several selections; return them, and a template for the result.

    As in eager PyTorch their counts must be equal, or one: a single row is broadcast to all of the
    others. A mismatch is known only when the program runs, and is recorded in `wrong`.
    """
    first = parts[0]
    if any(part.right != first.right for part in parts):
        raise refuse("be combined along different axes")
    wrongs = [part.wrong for part in parts if part.wrong is not None]
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
    keep = jnp.arange(bound) < total
    return moved, replace(moved[0], keep=keep, wrong=any_of(wrongs))


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
    if first.pieces is None or second.pieces is None or first.bound != second.bound:
        return False
    pairs = list(zip(first.pieces, second.pieces, strict=False))
    return len(first.pieces) == len(second.pieces) and all(a.is_same(b) for a, b in pairs)


def any_of(flags: Sequence[jax.Array]) -> jax.Array | None:
    """Return whether any of several traced flags holds; None if there are none."""
    result = None
    for flag in flags:
        result = flag if result is None else result | flag
    return result


def poisoned(array: jax.Array, wrong: jax.Array | None) -> jax.Array:
    """Replace an array by NaN where eager PyTorch would have raised."""
    if wrong is None:
        return array
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise refuse("be matched with others here: there is no NaN to tell that they do not fit")
    return jnp.where(wrong, jnp.asarray(jnp.nan, array.dtype), array)
