"""`masked(x)[mask]` under plain torchax: reads give `MaskedRows`, writes select by position."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import torch

from tpuport.ops.torchax.masked_rows import (
    MaskedRows,
    RowPiece,
    compact,
    fixed,
    is_same_selection,
    poisoned,
    refuse,
)
from tpuport.ops.torchax.values import array_of, wrap
from tpuport.tracing.core.cumulative import cumulative


@dataclass(frozen=True)
class Inverse:
    """`~mask`, which remembers the mask."""

    mask: torch.Tensor


@dataclass(frozen=True)
class Access:
    """A proxy of a tensor, for `masked(x)[mask]`; a write with `cut` drops rows too many."""

    tensor: Any
    cut: bool = False

    def __getitem__(self, index: Any) -> Any:
        found = find_place(self.tensor, index)
        return self.tensor[_plain(index)] if found is None else _filled(found[1])

    def __setitem__(self, index: Any, value: Any) -> None:
        found = find_place(self.tensor, index)
        if found is None:
            self.tensor[_plain(index)] = value
            return
        basic, place = found
        made, wrong = written(place, value, cut=self.cut)
        part = array_of(self.tensor)[basic]
        self.tensor[basic or ...] = wrap(made.reshape(part.shape))
        if self.cut:
            self.tensor._tpuport_mismatched = wrong


def _plain(index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    made = tuple(~item.mask if isinstance(item, Inverse) else item for item in items)
    return made if isinstance(index, tuple) else made[0]


def find_place(tensor: Any, index: Any) -> tuple[tuple[Any, ...], MaskedRows] | None:
    """Return what an index with a traced mask selects; None if it has no such mask.

    It is the index without the mask (slices and numbers, or nothing), and the rows of the part that
    this gives, with the axes that the mask covers joined into one.
    """
    items = list(index) if isinstance(index, tuple | list) else [index]
    masks = [n for n, item in enumerate(items) if _is_traced_mask(item)]
    if not masks:
        return None
    if len(masks) > 1 or any(
        isinstance(item, torch.Tensor) for n, item in enumerate(items) if n not in masks
    ):
        raise refuse("be selected by several index tensors at once")
    item = items[masks[0]]
    negated = isinstance(item, Inverse)
    mask: Any = item.mask if negated else item
    flags = array_of(mask)
    before, after = items[: masks[0]], items[masks[0] + 1 :]
    used = sum(part is not None and part is not Ellipsis for part in (*before, *after))
    gap = [slice(None)] * (tensor.ndim - used - flags.ndim)
    before, after = (
        [piece for part in side for piece in (gap if part is Ellipsis else [part])]
        for side in (before, after)
    )
    basic = (*before, *[slice(None)] * flags.ndim, *after)
    basic = () if all(part == slice(None) for part in basic) else basic
    axis = sum(not isinstance(part, int) for part in before)
    array = array_of(tensor)[basic]
    shape = array.shape
    if shape[axis : axis + flags.ndim] != flags.shape:
        raise IndexError(
            f"The shape of the mask {list(flags.shape)} does not match the shape of the indexed"
            f" tensor {list(tensor.shape)}"
        )
    joined = array.reshape(*shape[:axis], flags.size, *shape[axis + flags.ndim :])
    keep = flags.reshape(-1)
    # A view is made anew each time that it is written, so its source tells which mask it is.
    is_view = hasattr(mask, "get_transformation_chain")
    source = (mask.source_jax(), mask.get_transformation_chain()) if is_view else (flags, ())
    piece = RowPiece(*source, negated, flags.size)
    keep = ~keep if negated else keep
    return basic, MaskedRows(wrap(joined), keep, joined.ndim - axis, (piece,))


def _is_traced_mask(item: Any) -> bool:
    if isinstance(item, Inverse):
        return True
    is_mask = isinstance(item, torch.Tensor) and item.dtype is torch.bool and hasattr(item, "jax")
    return is_mask and isinstance(array_of(item), jax.core.Tracer)


def _filled(rows: MaskedRows) -> MaskedRows:
    """Replace what is not selected by the first selected row (`masked_rows` says why)."""
    if not rows.bound:
        return rows
    array = array_of(rows.values)
    filler = jnp.expand_dims(jnp.take(array, jnp.argmax(rows.keep), axis=rows.axis), rows.axis)
    filler = jnp.where(jnp.any(rows.keep), filler, jnp.ones_like(filler))
    values = wrap(jnp.where(rows.spread, array, filler))
    return MaskedRows(values, rows.keep, rows.right, rows.pieces)


def count(tensor: Any, mask: Any) -> torch.Tensor:
    """Return how many rows a mask selects, as int32[]."""
    found = find_place(tensor, mask)
    return wrap(jnp.sum(array_of(mask), dtype=jnp.int32) if found is None else found[1].count)


def written(target: MaskedRows, value: Any, *, cut: bool) -> tuple[jax.Array, jax.Array | None]:
    """Return an array with other selected rows, and whether the number of rows was wrong.

    Only integers that do not fit go unnoticed: there is no NaN to write, and torchax does not
    notice it for the plain `x[mask] = rows` either.
    """
    array = array_of(target.values)
    if isinstance(value, MaskedRows):
        new, wrong = _matched(value, target)
    else:
        value = value if isinstance(value, torch.Tensor) else wrap(jnp.asarray(value, array.dtype))
        axis = value.ndim - target.right
        new, wrong = array_of(value), None
        if axis >= 0 and value.shape[axis] != 1:
            value = fixed(value, target.right)
            new, wrong = _in_place(value, target)
            wrong = wrong if jnp.issubdtype(array.dtype, jnp.inexact) else None
    new = new.astype(array.dtype)
    if not cut:
        new, wrong = poisoned(new, wrong), None
    elif wrong is not None:
        new = poisoned(new, value.count < target.count)
    return jnp.where(target.spread, new, array), wrong


def _matched(value: MaskedRows, target: MaskedRows) -> tuple[jax.Array, jax.Array | None]:
    """Put rows at the places that a mask selects."""
    if value.right != target.right:
        raise refuse("be written along another axis than the mask selects")
    if is_same_selection(value, target):
        return array_of(value.values), value.wrong
    return _in_place(value, target)


def _in_place(value: MaskedRows, target: MaskedRows) -> tuple[jax.Array, jax.Array | None]:
    """Move rows to the places that another mask selects, in order."""
    if not value.bound:
        return array_of(target.values), target.count != 0
    front = compact(value, value.bound)
    count, wanted = value.count, target.count
    wrong = (count != wanted) & (count != 1)
    if value.wrong is not None:
        wrong = wrong | value.wrong
    order = cumulative(jnp.cumsum, target.keep.astype(jnp.int32), 0) - 1
    number = jnp.clip(order, 0, value.bound - 1)
    number = jnp.where(count == 1, 0, number)
    return jnp.take(array_of(front.values), number, axis=front.axis), wrong


def chosen(wrong: jax.Array, value: Any, otherwise: Any) -> torch.Tensor:
    """Return `value if wrong else otherwise`, for two numbers."""
    return wrap(jnp.where(wrong, value, otherwise))
