"""Reductions.

They accumulate in float32 or in the requested dtype, with torch's gradients at ties and at zero.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpuport.foundation.interop import backend
from tpuport.tracing.core.cumulative import cumulative
from tpuport.tracing.core.lowering_registry import SAME, lowering
from tpuport.tracing.lowerings._numeric import (
    absolute,
    at_least_1d,
    axes_of,
    extreme,
    factors,
    is_float,
    lowest,
    nan_gradient,
    value_and_gradient,
    wide,
)
from tpuport.tracing.lowerings.basic import cast

aten = torch.ops.aten
_IGNORES_DTYPE = "torchax ignores dtype=, and so accumulates in the narrow type"
_TIES = (
    "torchax shares the gradient among equal elements;"
    " torch gives it to the one whose index it returns"
)

_OF_NAN = "torchax's gradient of a maximum that is nan is nan, torch gives it to those elements"


def _held(x: jax.Array, dtype: torch.dtype | None) -> jax.Array:
    return x if dtype is None else cast(x, backend.jax_dtype(dtype))


def _summed(x: jax.Array, dtype: torch.dtype | None) -> jax.Array:
    """Convert `x` to the dtype that a sum or product accumulates in.

    Low precision of the requested dtype is widened, and integers become int64 (int32 without x64).
    """
    x = _held(x, dtype)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        is_64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]  (by name)
        return x.astype(jnp.int64 if is_64 else jnp.int32)
    return wide(x)


# -- sums ------------------------------------------------------------------------------------------


@lowering(aten.sum.default, aten.sum.dim_IntList, reason=_IGNORES_DTYPE)
def _sum(
    x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> jax.Array:
    return jnp.sum(_summed(x, dtype), axes_of(dim, x.ndim), keepdims=keepdim)


@lowering(aten.nansum.default, reason="torchax has none; nanmean of nans has a gradient of nan")
def _nansum(
    x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> jax.Array:
    x, axes = _summed(x, dtype), axes_of(dim, x.ndim)
    value = jnp.nansum(x, axes, keepdims=keepdim)
    if not is_float(x):
        return value
    counted = (~jnp.isnan(x)).astype(x.dtype)
    # torch multiplies by the mask: the mean of no number has a gradient of nan.
    return value_and_gradient(value, jnp.sum(x * factors(counted), axes, keepdims=keepdim))


@lowering(aten.mean.default, aten.mean.dim, reason=_IGNORES_DTYPE)
def _mean(
    x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> jax.Array:
    return jnp.mean(wide(_held(x, dtype)), axes_of(dim, x.ndim), keepdims=keepdim)


@lowering(aten.prod.default, aten.prod.dim_int, reason="torchax multiplies bfloat16 in bfloat16")
def _prod(
    x: jax.Array, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> jax.Array:
    x, axes = _summed(x, dtype), axes_of(dim, x.ndim)
    value = jnp.prod(x, axes, keepdims=keepdim)
    if not jnp.issubdtype(x.dtype, jnp.inexact) or not x.size:
        return value
    zeros = jnp.sum(x == 0)
    if dim is None:
        # Of all elements, several zeros leave no gradient, whatever the others are.
        value = value_and_gradient(value, jnp.where(zeros > 1, 0, jnp.prod(_unless(zeros > 1, x))))
    # Without a zero torch divides the product by the element.
    undefined = nan_gradient(x, (zeros == 0) & ~jnp.isfinite(x))
    return value_and_gradient(value, value + jnp.sum(undefined, axes, keepdims=keepdim))


def _unless(condition: jax.Array, x: jax.Array) -> jax.Array:
    """Return zeros instead of `x` under a condition, so that a gradient is not 0 * nan."""
    return jnp.where(condition, jnp.zeros_like(x), x)


@lowering(aten.cumsum.default, reason="torchax accumulates bfloat16 in bfloat16")
def _cumsum(x: jax.Array, dim: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    return at_least_1d(partial(cumulative, jnp.cumsum))(_summed(x, dtype), dim)


@lowering(aten.cumprod.default, reason="torchax accumulates bfloat16 in bfloat16")
def _cumprod(x: jax.Array, dim: int, *, dtype: torch.dtype | None = None) -> jax.Array:
    return at_least_1d(partial(cumulative, jnp.cumprod))(_summed(x, dtype), dim)


@lowering(
    aten.logcumsumexp.default, reason="torchax takes no negative dim and accumulates in bfloat16"
)
def _logcumsumexp(x: jax.Array, dim: int) -> jax.Array:
    if not x.ndim or not x.size:
        return x
    x = wide(x)
    running = partial(cumulative, lax.cumlogsumexp)
    value, infinite = running(x, dim % x.ndim), jnp.isposinf(x)
    # In torch a sum that is infinite gives its terms no gradient, and its infinite term nan.
    finite = running(jnp.where(infinite, lowest(x.dtype), x), dim % x.ndim)
    source = jnp.where(jnp.isposinf(value), 0, finite) + nan_gradient(x, infinite)
    return value_and_gradient(value, source)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _log_of_summed_exp(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    top = jnp.max(x, axes, keepdims=True, initial=-math.inf)
    top = jnp.where(jnp.isinf(top), 0.0, top)
    return jnp.log(jnp.sum(jnp.exp(x - top), axes, keepdims=True)) + top


@_log_of_summed_exp.defjvp
def _share_by_exp(
    axes: tuple[int, ...], primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    result = _log_of_summed_exp(primals[0], axes)
    return result, jnp.sum(jnp.exp(primals[0] - result) * tangents[0], axes, keepdims=True)


@lowering(
    aten.logsumexp.default,
    reason="the decomposition's gradient goes through the maximum: 0/0 where the compiler computes"
    " the elements twice, rounded differently, and so finds none equal to it",
)
def _logsumexp(x: jax.Array, dim: Any, keepdim: bool = False) -> jax.Array:
    axes = axes_of(dim, x.ndim)
    given = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
    result = _log_of_summed_exp(wide(given), axes)
    return (result if keepdim else jnp.squeeze(result, axes)).astype(given.dtype)


# -- moments ---------------------------------------------------------------------------------------


def _variance(
    x: jax.Array, dim: Any, correction: Any, keepdim: bool
) -> tuple[jax.Array, jax.Array]:
    """Return variance and mean.

    Without a degree of freedom the division by zero gives nan or inf, as in torch.
    """
    x = wide(x)
    axes = axes_of(dim, x.ndim)
    count = math.prod(x.shape[a] for a in axes)
    mean = jnp.mean(x, axes, keepdims=True)
    centred = x - mean
    squares = centred.real**2 + centred.imag**2 if jnp.iscomplexobj(x) else jnp.square(centred)
    freedom = max(count - (1 if correction is None else correction), 0)
    total = jnp.sum(squares, axes, keepdims=keepdim)
    variance = total / jnp.asarray(freedom, total.dtype)
    return variance, mean if keepdim else jnp.squeeze(mean, axes)


@lowering(aten.var.correction, reason="torchax divides by a negative count and squares in bfloat16")
def _var(
    x: jax.Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> jax.Array:
    return _variance(x, dim, correction, keepdim)[0]


def _zero_safe_sqrt(x: jax.Array) -> jax.Array:
    """Return the square root with zero gradient at zero, as torch has for norms and deviations."""
    positive = x != 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), jnp.zeros_like(x))


@lowering(
    aten.std.correction, reason="torchax's gradient at constant input is nan; torch's is zero"
)
def _std(
    x: jax.Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> jax.Array:
    return _zero_safe_sqrt(_variance(x, dim, correction, keepdim)[0])


@lowering(aten.var_mean.correction, reason="as var")
def _var_mean(
    x: jax.Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _variance(x, dim, correction, keepdim)


@lowering(aten.std_mean.correction, reason="as std")
def _std_mean(
    x: jax.Array, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    variance, mean = _variance(x, dim, correction, keepdim)
    return _zero_safe_sqrt(variance), mean


# -- norms -----------------------------------------------------------------------------------------


@lowering(
    aten.linalg_vector_norm.default,
    reason=(
        "torchax's gradient of the norm of a zero vector is nan, torch's zero;"
        " torchax ignores dtype="
    ),
)
def vector_norm(
    x: jax.Array,
    ord: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> jax.Array:
    x = wide(_held(x, dtype))
    axes = axes_of(dim, x.ndim)
    ord = float(ord)
    if ord == 2:
        square = x.real**2 + x.imag**2 if jnp.iscomplexobj(x) else x * x
        return _zero_safe_sqrt(jnp.sum(square, axes, keepdims=keepdim))
    size = absolute(x)
    if math.isinf(ord):
        # The maximum norm of no elements is 0 in torch; their minimum norm is an error.
        empty: dict[str, Any] = {"initial": 0.0} if ord > 0 else {}
        return (jnp.max if ord > 0 else jnp.min)(size, axes, keepdims=keepdim, **empty)
    if ord == 0:
        return jnp.sum(size != 0, axes, keepdims=keepdim).astype(size.dtype)
    if ord == 1:
        return jnp.sum(size, axes, keepdims=keepdim)
    return _power_norm(size, ord, axes, keepdim)


def _power_norm(size: jax.Array, ord: float, axes: tuple[int, ...], keepdim: bool) -> jax.Array:
    some = size != 0
    total = jnp.sum(jnp.where(some, jnp.where(some, size, 1) ** ord, 0), axes, keepdims=keepdim)
    # One zero makes a norm of negative order zero; its gradient is zero there, as torch chooses.
    positive = jnp.all(some, axes, keepdims=keepdim) if ord < 0 else total != 0
    positive = positive | jnp.isnan(total)
    value = jnp.where(positive, jnp.where(positive, total, 1) ** (1.0 / ord), 0)
    # In torch a zero multiplies a power of the norm.
    whole = value if keepdim else jnp.expand_dims(value, axes)
    undefined = jnp.isnan(whole) | ((ord < 1) & jnp.isinf(whole))
    zeros = jnp.sum(nan_gradient(size, ~some & undefined), axes, keepdims=keepdim)
    return value_and_gradient(value, value + zeros)


# -- extremes --------------------------------------------------------------------------------------


def _best(x: jax.Array, dim: int | None, keepdim: bool, largest: bool) -> jax.Array:
    if x.dtype in (jnp.int64, jnp.uint64):
        return _best_of_64(x, dim, keepdim, largest)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.int8)
    return (jnp.argmax if largest else jnp.argmin)(x, dim, keepdims=keepdim)


def _best_of_64(x: jax.Array, dim: int | None, keepdim: bool, largest: bool) -> jax.Array:
    """Return the first place of the extreme: where jax holds 32 bits, it lowers no argmax of 64."""
    is_it = x == (jnp.max if largest else jnp.min)(x, dim, keepdims=True)
    if dim is None:
        place = lax.argmax(is_it.reshape(-1).astype(jnp.int8), 0, jnp.int32)
        return place.reshape((1,) * x.ndim) if keepdim else place
    place = lax.argmax(is_it.astype(jnp.int8), dim % x.ndim, jnp.int32)
    return jnp.expand_dims(place, dim) if keepdim else place


@at_least_1d
def _extreme(x: jax.Array, dim: int, keepdim: bool, largest: bool) -> tuple[jax.Array, jax.Array]:
    index = _best(x, dim, True, largest)
    value = jnp.take_along_axis(x, index, dim, mode="clip")
    return (value, index) if keepdim else (jnp.squeeze(value, dim), jnp.squeeze(index, dim))


@lowering(aten.max.dim, reason=_TIES)
def _max(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return _extreme(x, dim, keepdim, True)


@lowering(aten.min.dim, reason=_TIES)
def _min(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return _extreme(x, dim, keepdim, False)


@lowering(aten.max.default, reason=_OF_NAN)
def _max_of_all(x: jax.Array) -> jax.Array:
    return extreme(jnp.max, x, axes_of(None, x.ndim), True) if is_float(x) else jnp.max(x)


@lowering(aten.min.default, reason=_OF_NAN)
def _min_of_all(x: jax.Array) -> jax.Array:
    return extreme(jnp.min, x, axes_of(None, x.ndim), True) if is_float(x) else jnp.min(x)


@lowering(aten.argmax.default, reason="torchax keeps no dims for keepdim=True without a dim")
def _argmax(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    return at_least_1d(_best)(x, dim, keepdim and x.ndim > 0, True)


@lowering(aten.argmin.default, reason="as argmax")
def _argmin(x: jax.Array, dim: int | None = None, keepdim: bool = False) -> jax.Array:
    return at_least_1d(_best)(x, dim, keepdim and x.ndim > 0, False)


@lowering(aten.aminmax.default, reason=SAME)
def _aminmax(
    x: jax.Array, *, dim: int | None = None, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _amin(x, dim, keepdim), _amax(x, dim, keepdim)


def _running(x: jax.Array, dim: int, largest: bool) -> tuple[jax.Array, jax.Array]:
    """Return the running extreme and the index of its latest occurrence; a nan stays."""
    if not x.size:
        return x, jnp.zeros(x.shape, jnp.int32)
    dim %= x.ndim
    where = lax.broadcasted_iota(jnp.int32, x.shape, dim)

    def later(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> Any:
        wins = b[0] >= a[0] if largest else b[0] <= a[0]
        if is_float(x):
            wins = jnp.isnan(b[0]) | (wins & ~jnp.isnan(a[0]))
        return jnp.where(wins, b[0], a[0]), jnp.where(wins, b[1], a[1])

    _, index = lax.associative_scan(later, (lax.stop_gradient(x), where), axis=dim)
    return jnp.take_along_axis(x, index, dim, mode="clip"), index


@lowering(
    aten.cummax.default, reason="torchax drops nan and shares the gradient among equal elements"
)
def _cummax(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return at_least_1d(_running)(x, dim, True)


@lowering(aten.cummin.default, reason="as cummax")
def _cummin(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return at_least_1d(_running)(x, dim, False)


# -- counts ----------------------------------------------------------------------------------------


@lowering(
    aten.histc.default, reason="torchax takes the range of the data only if both bounds are 0"
)
def _histc(x: jax.Array, bins: int = 100, min: Any = 0, max: Any = 0) -> jax.Array:
    """Count `x` in equal bins over [min, max]; min == max means the range of the data."""
    x = wide(x).reshape(-1)
    if not x.size:
        return jnp.zeros(bins, x.dtype)
    low, high = jnp.asarray(min, x.dtype), jnp.asarray(max, x.dtype)
    if min == max:
        low, high = jnp.min(x), jnp.max(x)
    flat = low == high
    low, high = jnp.where(flat, low - 1, low), jnp.where(flat, high + 1, high)
    inside = (x >= low) & (x <= high)
    position = ((x - low) / (high - low) * bins).astype(jnp.int32)
    position = jnp.where(inside, jnp.minimum(position, bins - 1), bins)
    return jnp.zeros(bins, x.dtype).at[position].add(1, mode="drop")


@lowering(aten.any.default, aten.any.dim, aten.any.dims, reason=SAME)
def _any(x: jax.Array, dim: Any = None, keepdim: bool = False) -> jax.Array:
    return cast(x, jnp.bool_) if dim == [] else jnp.any(x, axes_of(dim, x.ndim), keepdims=keepdim)


@lowering(aten._is_all_true.default)
def _is_all_true(x: jax.Array) -> jax.Array:
    return jnp.all(x)


@lowering(aten._is_any_true.default)
def _is_any_true(x: jax.Array) -> jax.Array:
    return jnp.any(x)


@lowering(aten.all.default, aten.all.dim, aten.all.dims, reason=SAME)
def _all(x: jax.Array, dim: Any = None, keepdim: bool = False) -> jax.Array:
    return cast(x, jnp.bool_) if dim == [] else jnp.all(x, axes_of(dim, x.ndim), keepdims=keepdim)


@lowering(aten.amax.default, reason="torchax fails on a list of dims with keepdim of a 0-d tensor")
def _amax(x: jax.Array, dim: Any = (), keepdim: bool = False) -> jax.Array:
    return _extreme_of(jnp.max, x, dim, keepdim)


@lowering(aten.amin.default, reason="as amax")
def _amin(x: jax.Array, dim: Any = (), keepdim: bool = False) -> jax.Array:
    return _extreme_of(jnp.min, x, dim, keepdim)


def _extreme_of(reduce: Callable[..., jax.Array], x: jax.Array, dim: Any, keep: bool) -> jax.Array:
    axes = axes_of(dim, x.ndim)
    if not is_float(x):
        return reduce(x, axes, keepdims=keep)
    value = extreme(reduce, x, axes, False)
    return jnp.expand_dims(value, axes) if keep else value
