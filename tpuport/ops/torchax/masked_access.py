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
    array_of,
    compact,
    fixed,
    is_same_selection,
    poisoned,
    refuse,
    wrap,
)


class Inverse:
    """`~mask`, which remembers the mask."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.mask = mask


@dataclass(frozen=True)
class SelectedPlace:
    """The elements that an index with a mask selects.

    Attributes:
        basic: The index without the mask: slices and numbers.
        axis: The first axis of the mask in the result of `basic`.
        rank: How many axes the mask covers.
        keep: bool[M]: which rows the mask selects, its axes joined.
        piece: The identity of the selection.
    """

    basic: tuple[Any, ...]
    axis: int
    rank: int
    keep: jax.Array
    piece: RowPiece


class Access:
    """A proxy of a tensor, for `masked(x)[mask]`."""

    def __init__(self, tensor: Any, *, cut: bool = False) -> None:
        self.tensor, self.cut = tensor, cut

    def __getitem__(self, index: Any) -> Any:
        place = find_place(self.tensor, index)
        if place is None:
            return self.tensor[_plain(index)]
        return select(array_of(self.tensor), place)

    def __setitem__(self, index: Any, value: Any) -> None:
        place = find_place(self.tensor, index)
        if place is None:
            self.tensor[_plain(index)] = value
            return
        part = array_of(self.tensor)[place.basic]
        made, wrong = written(part, place, value, cut=self.cut)
        if place.basic:
            self.tensor[place.basic] = wrap(made)
        else:
            self.tensor[...] = wrap(made)
        if self.cut:
            self.tensor._tpuport_mismatched = wrong


def _plain(index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    made = tuple(~item.mask if isinstance(item, Inverse) else item for item in items)
    return made if isinstance(index, tuple) else made[0]


def find_place(tensor: Any, index: Any) -> SelectedPlace | None:
    """Return what an index with a traced mask selects; None if it has no such mask."""
    items = list(index) if isinstance(index, tuple | list) else [index]
    masks = [n for n, item in enumerate(items) if _is_traced_mask(item)]
    if not masks:
        return None
    if len(masks) > 1 or any(
        isinstance(item, torch.Tensor) for n, item in enumerate(items) if n not in masks
    ):
        raise refuse("be selected by several index tensors at once")
    number = masks[0]
    item = items[number]
    mask = item.mask if isinstance(item, Inverse) else item
    flags = array_of(mask)
    before, after = items[:number], items[number + 1 :]
    used = sum(part is not None and part is not Ellipsis for part in (*before, *after))
    gap = [slice(None)] * (tensor.ndim - used - flags.ndim)
    before = [piece for part in before for piece in (gap if part is Ellipsis else [part])]
    after = [piece for part in after for piece in (gap if part is Ellipsis else [part])]
    basic = (*before, *[slice(None)] * flags.ndim, *after)
    axis = sum(not isinstance(part, int) for part in before)
    sizes = jax.eval_shape(lambda a: a[basic], array_of(tensor)).shape
    covered = sizes[axis : axis + flags.ndim]
    if covered != flags.shape:
        raise IndexError(
            f"The shape of the mask {list(flags.shape)} does not match the shape of the indexed"
            f" tensor {list(tensor.shape)}"
        )
    negated = isinstance(item, Inverse)
    keep = flags.reshape(-1)
    piece = RowPiece(_key(mask), negated, keep.shape[0])
    trivial = all(isinstance(part, slice) and part == slice(None) for part in basic)
    return SelectedPlace(
        () if trivial else basic, axis, flags.ndim, ~keep if negated else keep, piece
    )


def _is_traced_mask(item: Any) -> bool:
    if isinstance(item, Inverse):
        return True
    if (
        not isinstance(item, torch.Tensor)
        or item.dtype is not torch.bool
        or not hasattr(item, "jax")
    ):
        return False
    return isinstance(array_of(item), jax.core.Tracer)


def _key(mask: Any) -> tuple[Any, ...]:
    """Return the array of a mask; for a view the array of its source, and the steps of the view."""
    if hasattr(mask, "get_transformation_chain"):
        return (mask.source_jax(), *mask.get_transformation_chain())
    return (array_of(mask),)


def select(array: jax.Array, place: SelectedPlace) -> MaskedRows:
    """Return the rows of an array that a mask selects."""
    part = array[place.basic]
    joined = _joined(part, place)
    right = joined.ndim - place.axis
    keep = place.keep
    if keep.shape[0]:
        # What is not selected becomes a copy of the first selected row (`masked_rows` says why).
        filler = jnp.take(joined, jnp.argmax(keep), axis=place.axis)
        filler = jnp.expand_dims(filler, place.axis)
        filler = jnp.where(jnp.any(keep), filler, jnp.ones_like(filler))
        flags = keep.reshape((-1,) + (1,) * (right - 1))
        joined = jnp.where(flags, joined, filler)
    return MaskedRows(wrap(joined), keep, right, (place.piece,))


def _joined(part: jax.Array, place: SelectedPlace) -> jax.Array:
    """Join the axes that the mask covers into one."""
    shape = part.shape
    return part.reshape(
        *shape[: place.axis], place.keep.shape[0], *shape[place.axis + place.rank :]
    )


def count(tensor: Any, mask: Any) -> torch.Tensor:
    """Return how many rows a mask selects, as int32[]."""
    place = find_place(tensor, mask)
    keep = array_of(mask) if place is None else place.keep
    return wrap(jnp.sum(keep, dtype=jnp.int32))


def written(
    part: jax.Array, place: SelectedPlace, value: Any, *, cut: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Return an array after `part[mask] = value`, and whether the number of rows was wrong.

    Only integers that do not fit go unnoticed: there is no NaN to write, and torchax does not
    notice it for the plain `x[mask] = rows` either.
    """
    joined = _joined(part, place)
    target = MaskedRows(wrap(joined), place.keep, joined.ndim - place.axis, (place.piece,))
    if isinstance(value, MaskedRows):
        new, wrong = _matched(value, target)
    else:
        value = value if isinstance(value, torch.Tensor) else wrap(jnp.asarray(value, part.dtype))
        axis = value.ndim - target.right
        if axis < 0 or value.shape[axis] == 1:
            new, wrong = array_of(value), None
        else:
            value = fixed(value, target.right)
            new, wrong = _in_place(value, target)
            if not jnp.issubdtype(part.dtype, jnp.inexact):
                wrong = None
    new = new.astype(part.dtype)
    if not cut:
        new, wrong = poisoned(new, wrong), None
    elif wrong is not None:
        new = poisoned(new, value.count < target.count)
    made = jnp.where(target.spread(place.keep), new, joined)
    return made.reshape(part.shape), wrong


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
    number = jnp.clip(jnp.cumsum(target.keep, dtype=jnp.int32) - 1, 0, value.bound - 1)
    number = jnp.where(count == 1, 0, number)
    return jnp.take(array_of(front.values), number, axis=front.axis), wrong


def chosen(wrong: jax.Array, value: Any, otherwise: Any) -> torch.Tensor:
    """Return `value if wrong else otherwise`, for two numbers."""
    return wrap(jnp.where(wrong, value, otherwise))
