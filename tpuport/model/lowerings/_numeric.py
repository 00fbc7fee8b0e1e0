"""What several families of lowerings share.

Accumulation dtypes, dims, and values with a gradient of their own.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Number = bool | int | float | complex


def wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype torch computes in.

    Bfloat16 and float16 in float32, integers and bools too.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(jnp.float32)
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def is_low(x: Any) -> bool:
    """Whether `x` is an array of a float dtype below 32 bits."""
    if not isinstance(x, jax.Array):
        return False
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4


def broadcast_wide(x: Any, shape: tuple[int, ...]) -> Any:
    """A bfloat16 or float16 operand that is smaller than the result, broadcast by way of float32.

    Its value is the same; its gradient, a sum over what it was broadcast to, is accumulated in
    float32 as torch does. jax would accumulate it in bfloat16, which stops growing at 256 ones.
    """
    if not is_low(x) or not x.ndim or x.size == math.prod(shape):
        return x
    return jnp.broadcast_to(x.astype(jnp.float32), shape).astype(x.dtype)


def is_float(x: Any) -> bool:
    """Whether an array or Python number is real floating."""
    return isinstance(x, float) if isinstance(x, Number) else jnp.issubdtype(x.dtype, jnp.floating)


def is_complex(x: Any) -> bool:
    """Whether an array or Python number is complex."""
    if isinstance(x, Number):
        return isinstance(x, complex)
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def axes_of(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dims of a reduction as torch takes them: None and an empty list mean all of them.

    A tensor without dims takes dim 0 and -1, and has nothing to reduce.
    """
    if dim is None or (isinstance(dim, Sequence) and not dim):
        return tuple(range(ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return tuple(sorted(d % ndim for d in dims)) if ndim else ()


def at_least_1d(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function written for arrays with dims take one without.

    Every result loses the dim again.
    """

    def wrapped(x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        if x.ndim:
            return function(x, *args, **kwargs)
        return jax.tree.map(lambda r: r.reshape(()), function(x.reshape(1), *args, **kwargs))

    return wrapped


@jax.custom_jvp
def value_and_gradient(value: jax.Array, source: jax.Array) -> jax.Array:
    """`value`, with the gradient of `source` (an array of the same shape and dtype)."""
    del source
    return value


@value_and_gradient.defjvp
def _value_and_gradient_jvp(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1]


def absolute(x: jax.Array) -> jax.Array:
    """|x|, with torch's gradient: 0 at 0 (where jax has 1) and for nan."""
    if jnp.iscomplexobj(x):
        nonzero = x != 0
        return jnp.where(nonzero, jnp.abs(jnp.where(nonzero, x, 1)), 0)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.abs(x)
    sign = jnp.where(x > 0, 1, jnp.where(x < 0, -1, 0)).astype(x.dtype)
    return value_and_gradient(jnp.abs(x), x * sign)


def lowest(dtype: Any) -> Any:
    """The smallest value of a dtype: -inf, False, or the least integer."""
    if dtype == jnp.bool_:
        return False
    return -math.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def highest(dtype: Any) -> Any:
    """The largest value of a dtype: inf, True, or the greatest integer."""
    if dtype == jnp.bool_:
        return True
    return math.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max
