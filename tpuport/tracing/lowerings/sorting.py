"""Sorting and searching.

Sorts are stable as torch's on CPU, nan is greatest, and the picked element gets the gradient.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpuport.tracing.core.lowering_registry import lowering
from tpuport.tracing.lowerings._numeric import at_least_1d, is_float, value_and_gradient

aten = torch.ops.aten


def _order(x: jax.Array, dim: int, descending: bool) -> jax.Array:
    """Return indices that sort `x` along a dim; equal elements keep their order, nan comes last.

    A descending sort has nan first.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int8)
    if not descending:
        return jnp.argsort(x, dim, stable=True)
    # Sorting the reversed array and reversing the result keeps the order of equal elements.
    order = jnp.flip(jnp.argsort(jnp.flip(x, dim), dim, stable=True), dim)
    return x.shape[dim] - 1 - order


@at_least_1d
def _sorted(x: jax.Array, dim: int, descending: bool) -> tuple[jax.Array, jax.Array]:
    order = _order(lax.stop_gradient(x), dim, descending)
    return jnp.take_along_axis(x, order, dim, mode="clip"), order


@lowering(
    aten.sort.default, aten.sort.stable, reason="torchax's descending sort reverses equal elements"
)
def _sort(
    x: jax.Array, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    return _sorted(x, dim, descending)


@lowering(
    aten.topk.default,
    reason="torchax negates to find the smallest (wrong for bool, unsigned and nan)",
)
def _topk(
    x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[jax.Array, jax.Array]:
    return _top(x, k, dim, largest)


@at_least_1d
def _top(x: jax.Array, k: int, dim: int, largest: bool) -> tuple[jax.Array, jax.Array]:
    key = jnp.moveaxis(lax.stop_gradient(x), dim, -1)
    if key.dtype == jnp.bool_:
        key = key.astype(jnp.int8)
    if is_float(key):
        # XLA orders nan by sign; torch counts every nan as greatest.
        key = jnp.where(jnp.isnan(key), jnp.inf, key) if not largest else key
        key = key if largest else -key
        key = jnp.where(jnp.isnan(key), jnp.nan, key)
    elif not largest:
        key = ~key
    _, order = lax.top_k(key, k)
    order = jnp.moveaxis(order, -1, dim)
    return jnp.take_along_axis(x, order, dim, mode="clip"), order


@lowering(
    aten.kthvalue.default, reason="torchax's index is not the element's, for equal elements and nan"
)
def _kthvalue(
    x: jax.Array, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _picked(x, dim, keepdim, lambda ordered: k - 1)


@at_least_1d
def _picked(x: jax.Array, dim: int, keepdim: bool, rank: Any) -> tuple[jax.Array, jax.Array]:
    """Return the element of a rank along a dim, with its index.

    `rank(sorted)` is a number or an array of [..., 1, ...].
    """
    values, order = _sorted(x, dim, False)
    which = jnp.asarray(rank(values), jnp.int32)
    shape = tuple(1 if d == dim % x.ndim else n for d, n in enumerate(x.shape))
    which = jnp.broadcast_to(which, shape)
    found = [jnp.take_along_axis(a, which, dim, mode="clip") for a in (values, order)]
    value, index = found if keepdim else [jnp.squeeze(a, dim) for a in found]
    return value, index


def _middle(values: jax.Array, *, dim: int, skip_nan: bool) -> jax.Array:
    """Return the rank of the lower median; any nan is the median unless nans are skipped."""
    count = values.shape[dim]
    if not is_float(values):
        return jnp.asarray((count - 1) // 2)
    nans = jnp.sum(jnp.isnan(values), dim, keepdims=True)
    if skip_nan:
        return jnp.maximum(count - nans - 1, 0) // 2
    # nan sorts last, so the first one is at count - nans.
    return jnp.where(nans > 0, count - nans, (count - 1) // 2)


@lowering(aten.median.dim, reason="torchax rounds large integers and misplaces nan")
def _median_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return _picked(x, dim, keepdim, functools.partial(_middle, dim=dim, skip_nan=False))


@lowering(aten.nanmedian.dim, reason="as median")
def _nanmedian_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return _picked(x, dim, keepdim, functools.partial(_middle, dim=dim, skip_nan=True))


_SHARED = "torchax gives the whole gradient to one element, torch shares it among equal ones"


def _median_of_all(x: jax.Array, skip_nan: bool) -> jax.Array:
    """Return the median, whose gradient is shared equally by all elements equal to it."""
    flat = x.reshape(-1)
    if is_float(x) and not flat.size:
        return jnp.asarray(jnp.nan, x.dtype)
    middle = functools.partial(_middle, dim=0, skip_nan=skip_nan)
    value = _picked(flat, 0, False, middle)[0]
    if not is_float(x):
        return value
    equal = (flat == value) | (jnp.isnan(flat) & jnp.isnan(value))
    shared = jnp.sum(jnp.where(equal, flat, 0)) / jnp.sum(equal).astype(x.dtype)
    return value_and_gradient(value, shared.astype(x.dtype))


@lowering(aten.median.default, reason=_SHARED)
def _median(x: jax.Array) -> jax.Array:
    return _median_of_all(x, skip_nan=False)


@lowering(aten.nanmedian.default, reason=_SHARED)
def _nanmedian(x: jax.Array) -> jax.Array:
    return _median_of_all(x, skip_nan=True)


@lowering(
    aten.mode.default,
    reason="torchax gives the first index of the most frequent value, torch the last",
)
def _mode(x: jax.Array, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    """Return the most frequent value, the smallest if several are, and its last index."""
    return _most_frequent(x, dim, keepdim)


@at_least_1d
def _most_frequent(x: jax.Array, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    dim %= x.ndim
    values, order = _sorted(lax.stop_gradient(x), dim, False)
    same = jnp.zeros(values.shape, bool)
    after = lax.slice_in_dim(values, 1, None, axis=dim) == lax.slice_in_dim(values, 0, -1, axis=dim)
    same = lax.dynamic_update_slice_in_dim(same, after, 1, dim)
    position = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    start = lax.cummax(jnp.where(same, 0, position), axis=dim)
    # The run that first reaches the greatest length ends at the mode's last index.
    last = jnp.argmax(position - start, dim, keepdims=True)
    index = jnp.take_along_axis(order, last, dim, mode="clip")
    value = jnp.take_along_axis(x, index, dim, mode="clip")
    return (value, index) if keepdim else (jnp.squeeze(value, dim), jnp.squeeze(index, dim))


# -- searching -------------------------------------------------------------------------------------


@lowering(
    aten.searchsorted.Tensor,
    aten.searchsorted.Scalar,
    reason="torchax ignores right=, side=, sorter= and batches",
)
def _searchsorted(
    sequence: jax.Array,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: jax.Array | None = None,
) -> jax.Array:
    """Return insertion points of `values` [..., m] into sorted rows `sequence` [..., n] or [n]."""
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, -1)
    values = jnp.asarray(values)
    search = functools.partial(
        jnp.searchsorted, side="right" if right or side == "right" else "left"
    )
    if sequence.ndim == 1:
        return search(sequence, values)
    if not values.size:
        return jnp.zeros(values.shape, jnp.int32)
    rows = sequence.reshape(-1, sequence.shape[-1])
    return jax.vmap(search)(rows, values.reshape(rows.shape[0], -1)).reshape(values.shape)


@lowering(
    aten.bucketize.Tensor,
    aten.bucketize.Scalar,
    reason="torchax digitizes in the boundaries' dtype",
)
def _bucketize(
    values: Any, boundaries: jax.Array, *, out_int32: bool = False, right: bool = False
) -> jax.Array:
    return jnp.searchsorted(boundaries, jnp.asarray(values), side="right" if right else "left")
