"""Helpers that several families of lowerings share.

Accumulation dtypes, dims, and values with a gradient of their own.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Number = bool | int | float | complex


def wide(x: jax.Array) -> jax.Array:
    """Return `x` in the dtype that torch computes in.

    Bfloat16 and float16 become float32, and so do integers and bools.

    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(jnp.float32)
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def is_low(x: Any) -> bool:
    """Return whether `x` is an array of a float dtype below 32 bits."""
    if not isinstance(x, jax.Array):
        return False
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4


def broadcast_wide(x: Any, shape: tuple[int, ...]) -> Any:
    """Broadcast a bfloat16 or float16 operand that is smaller than the result, through float32.

    The value is the same. The gradient, a sum over the broadcast dims, is accumulated in float32 as
    in torch. jax would accumulate it in bfloat16, where a sum of ones stops growing at 256.
    """
    if not is_low(x) or not x.ndim or x.size == math.prod(shape):
        return x
    return jnp.broadcast_to(x.astype(jnp.float32), shape).astype(x.dtype)


def is_float(x: Any) -> bool:
    """Return whether an array or Python number is real floating."""
    return isinstance(x, float) if isinstance(x, Number) else jnp.issubdtype(x.dtype, jnp.floating)


def is_complex(x: Any) -> bool:
    """Return whether an array or Python number is complex."""
    if isinstance(x, Number):
        return isinstance(x, complex)
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def axes_of(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return the dims of a reduction as torch reads them: None and an empty list mean all.

    A tensor without dims takes dim 0 and -1, and has nothing to reduce.
    """
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return tuple(sorted(d % ndim for d in dims)) if ndim else ()


def at_least_1d(function: Callable[..., Any]) -> Callable[..., Any]:
    """Extend a function for arrays with dims to arrays without.

    Such an array gets a dim, which every result loses again.

    """

    def wrapped(x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        if x.ndim:
            return function(x, *args, **kwargs)
        return jax.tree.map(lambda r: r.reshape(()), function(x.reshape(1), *args, **kwargs))

    return wrapped


@jax.custom_jvp
def value_and_gradient(value: jax.Array, source: jax.Array) -> jax.Array:
    """Return `value`, with the gradient of `source` (an array of the same shape and dtype)."""
    del source
    return value


@value_and_gradient.defjvp
def _value_and_gradient_jvp(primals: Any, tangents: Any) -> Any:
    # By itself, so that a second derivative is that of `source` too.
    return value_and_gradient(*primals), tangents[1]


@partial(jax.custom_jvp, nondiff_argnums=(0, 2, 3))
def extreme(
    reduce: Callable[[jax.Array, tuple[int, ...]], jax.Array],
    x: jax.Array,
    axes: tuple[int, ...],
    nans_are_equal: bool,
) -> jax.Array:
    """Reduce dims by `jnp.max` or `jnp.min`, with a gradient that all equal elements share.

    Where the result is nan, the elements that are nan share it too if these are equal, and all
    gradients are nan otherwise. torch has both.
    """
    return reduce(x, axes)


@extreme.defjvp
def _extreme_jvp(
    reduce: Callable[[jax.Array, tuple[int, ...]], jax.Array],
    axes: tuple[int, ...],
    nans_are_equal: bool,
    primals: tuple[jax.Array],
    tangents: tuple[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    # A compiler that computes x twice may round it differently, and then no element is equal.
    x = lax.optimization_barrier(primals[0])
    value = extreme(reduce, x, axes, nans_are_equal)
    row = jnp.expand_dims(value, axes)
    equal = x == row
    if nans_are_equal:
        equal = equal | (jnp.isnan(x) & jnp.isnan(row))
    share = equal.astype(x.dtype) / jnp.sum(equal, axes, keepdims=True).astype(x.dtype)
    if not nans_are_equal:
        share = jnp.where(jnp.isnan(row), jnp.nan, share).astype(x.dtype)
    return value, jnp.sum(tangents[0] * share, axes)


def factors(mask: jax.Array) -> jax.Array:
    """Return a mask of numbers that XLA multiplies by, where it would select: 0 * inf is nan."""
    return lax.optimization_barrier(mask)


def nan_gradient(x: jax.Array, where: jax.Array) -> jax.Array:
    """Return an array to add to the source of a gradient, which makes it nan at places of `x`."""
    return jnp.where(where, x, 0) * jnp.where(where, jnp.nan, 0).astype(x.dtype)


def replaced(x: jax.Array, where: Any, new: jax.Array, mode: str | None = None) -> jax.Array:
    """Return `x` with `new` at places; `mode` is that of jax's `.at[...].set`.

    Of several values for one place each gets the gradient of that place, as in torch; in jax only
    the one that is kept.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.at[where].set(new, mode=mode)
    # Outside of a jit, what is left without its gradient may be an array of numpy.
    fixed = jnp.asarray(lax.stop_gradient(x))
    value = fixed.at[where].set(lax.stop_gradient(new), mode=mode)
    kept = jnp.ones(x.shape, bool).at[where].set(False, mode=mode)
    return value_and_gradient(value, jnp.where(kept, x, 0).at[where].add(new, mode=mode))


def absolute(x: jax.Array) -> jax.Array:
    """Return |x| with torch's gradient: 0 for nan, and 0 at 0, where jax has 1."""
    if jnp.iscomplexobj(x):
        nonzero = x != 0
        return jnp.where(nonzero, jnp.abs(jnp.where(nonzero, x, 1)), 0)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.abs(x)
    sign = jnp.where(x > 0, 1, jnp.where(x < 0, -1, 0)).astype(x.dtype)
    return value_and_gradient(jnp.abs(x), x * sign)


def lowest(dtype: Any) -> Any:
    """Return the smallest value of a dtype: -inf, False, or the least integer."""
    if dtype == jnp.bool_:
        return False
    return -math.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """Return the largest value of a dtype: inf, True, or the greatest integer."""
    if dtype == jnp.bool_:
        return True
    return math.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max
