"""Elementwise ops: integer arithmetic, gradients at ties, and one rounding per op in bfloat16."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpuport.foundation.interop import backend
from tpuport.tracing.core.lowering_registry import lowering
from tpuport.tracing.lowerings._numeric import (
    absolute,
    is_complex,
    is_float,
    is_low,
    value_and_gradient,
    wide,
)
from tpuport.tracing.lowerings.attention import masked_softmax
from tpuport.tracing.lowerings.basic import cast

aten = torch.ops.aten
_ROUNDS = "torchax rounds to bfloat16 after each step; torch computes in float32 and rounds once"


# -- arithmetic with Python numbers ----------------------------------------------------------------


def _with_numbers(op: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], jax.Array]:
    """Widen low-precision operands that meet a Python float.

    jax would round the number to bfloat16 before the operation.
    """

    @functools.wraps(op)
    def run(x: Any, y: Any) -> jax.Array:
        if is_low(x) and isinstance(y, float):
            x = wide(x)
        elif is_low(y) and isinstance(x, float):
            y = wide(y)
        return op(x, y)

    return run


@lowering(aten.mul.Tensor, aten.mul.Scalar, reason=_ROUNDS)
def _mul(x: Any, y: Any) -> jax.Array:
    kind = jnp.result_type(x, y)
    x, y = (cast(v, kind) if getattr(v, "dtype", None) == jnp.bool_ else v for v in (x, y))
    return _with_numbers(jnp.multiply)(x, y)


def _scaled(y: Any, alpha: Any) -> Any:
    if isinstance(alpha, int | float) and alpha == 1:
        return y
    return (wide(y) if is_low(y) and isinstance(alpha, float) else y) * alpha


@lowering(aten.add.Tensor, aten.add.Scalar, reason=_ROUNDS)
def _add(x: Any, y: Any, alpha: Any = 1) -> jax.Array:
    return _with_numbers(jnp.add)(x, _scaled(y, alpha))


@lowering(aten.sub.Tensor, aten.sub.Scalar, reason=_ROUNDS)
def _sub(x: Any, y: Any, alpha: Any = 1) -> jax.Array:
    return _with_numbers(jnp.subtract)(x, _scaled(y, alpha))


@lowering(aten.rsub.Tensor, aten.rsub.Scalar, reason=_ROUNDS)
def _rsub(x: Any, y: Any, alpha: Any = 1) -> jax.Array:
    return _with_numbers(jnp.subtract)(y, _scaled(x, alpha))


# -- division --------------------------------------------------------------------------------------


def _promoted(x: Any, y: Any) -> tuple[jax.Array, jax.Array]:
    dtype = jnp.result_type(x, y)
    left, right = jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(y, dtype))
    return left, right


@lowering(
    aten.div.Tensor,
    aten.div.Scalar,
    aten.div.Tensor_mode,
    aten.div.Scalar_mode,
    reason="torchax divides integers in float32, wrong above 2**24, and rounds numbers to bfloat16",
)
def _div(x: Any, y: Any, rounding_mode: str | None = None) -> jax.Array:
    """Return x / y; with a rounding mode integers are divided as integers."""
    if rounding_mode is None:
        return _with_numbers(jnp.true_divide)(x, y)
    if rounding_mode == "floor":
        return _floor_divide(x, y)
    a, b = _promoted(x, y)
    # The quotient is rounded to bfloat16 before it is truncated, in torch too.
    return jnp.trunc(a / b) if is_float(a) else lax.div(a, b)


@lowering(
    aten.floor_divide.default, aten.floor_divide.Scalar, reason="torchax gives nan for x // 0.0"
)
def _floor_divide(x: Any, y: Any) -> jax.Array:
    """Divide and round down, without gradient.

    Floats divided by zero give the plain quotient (inf or nan), as in torch.
    """
    a, b = lax.stop_gradient(_promoted(x, y))
    if not is_float(a):
        return jnp.floor_divide(a, b)
    a, b = wide(a), wide(b)
    zero = b == 0
    return jnp.where(zero, a / b, jnp.floor_divide(a, jnp.where(zero, 1, b)))


@lowering(
    aten.fmod.Tensor,
    aten.fmod.Scalar,
    reason="torchax subtracts a rounded quotient, inexact and wrong for inf",
)
def _fmod(x: Any, y: Any) -> jax.Array:
    return lax.rem(*_promoted(x, y))


@lowering(aten.gcd.default, reason="jax's loop does not end for the least number of a dtype")
def _gcd(x: jax.Array, y: jax.Array) -> jax.Array:
    kind = jnp.result_type(x, y)
    size = jnp.iinfo(kind).bits
    x, y = (lax.convert_element_type(jnp.abs(v.astype(kind)), f"uint{size}") for v in (x, y))
    return jnp.gcd(x, y).astype(kind)


@lowering(
    aten.remainder.Tensor,
    aten.remainder.Scalar,
    aten.remainder.Scalar_Tensor,
    reason=_ROUNDS,
)
def _remainder(x: Any, y: Any) -> jax.Array:
    """Return the remainder with the sign of `y`; torch too rounds a Python number to bfloat16."""
    x, y = _promoted(x, y)
    if is_low(x):
        x, y = wide(x), wide(y)
    return jnp.remainder(x, y)


# -- powers ----------------------------------------------------------------------------------------


@lowering(
    aten.pow.Tensor_Scalar,
    aten.pow.Tensor_Tensor,
    aten.pow.Scalar,
    reason="torchax raises integers in float32, wrong above 2**24",
)
def _pow(x: Any, y: Any) -> jax.Array:
    """Return x ** y; integers wrap around.

    A negative integer power of an integer is 0 unless the base is 1 or -1.
    """
    integers = not any(is_float(v) or is_complex(v) for v in (x, y))
    if integers:
        return _integer_pow(*_promoted(x, y))
    if isinstance(y, int | float) and not is_complex(x):
        return _static_pow(wide(x), float(np.asarray(y, x.dtype)) if is_low(x) else y)
    x, y = _promoted(x, y)
    if is_low(x):
        x, y = wide(x), wide(y)
    if is_complex(x):
        return jnp.power(jnp.where(y == 0, lax.stop_gradient(x), x), y)
    return _real_pow(x, y)


@jax.custom_jvp
def _real_pow(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.power(x, y)


@_real_pow.defjvp
def _real_pow_jvp(primals: Any, tangents: Any) -> Any:
    """Give 0 ** 0 no gradient for the base, and 0 ** -1 that of -inf for the exponent."""
    (x, y), (dx, dy) = primals, tangents
    value, constant = _real_pow(x, y), y == 0
    by_base = jnp.where(constant, 0, y * _real_pow(x, jnp.where(constant, 1, y - 1)))
    flat = (x == 0) & (y >= 0)
    by_exponent = jnp.where(flat, 0, value * jnp.log(jnp.where(flat, 1, x)))
    return value, dx * by_base + dy * by_exponent


def _static_pow(x: jax.Array, y: float) -> jax.Array:
    if y == 0.5:
        return jnp.sqrt(x)
    if y == -0.5:
        return lax.rsqrt(x)
    if float(y).is_integer() and abs(y) <= 4:
        return lax.integer_pow(x, int(y))
    return jnp.power(x, y)


def _integer_pow(x: jax.Array, y: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x | ~y
    result = jnp.power(x, jnp.maximum(y, 0))
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return result
    odd = jnp.where(y % 2 == 0, 1, -1).astype(x.dtype)
    inverse = jnp.where(x == 1, 1, jnp.where(x == -1, odd, 0)).astype(x.dtype)
    return jnp.where(y < 0, inverse, result)


# -- limits ----------------------------------------------------------------------------------------


@lowering(
    aten.clamp.default,
    aten.clamp.Tensor,
    reason="jnp.clip halves the gradient of a value at a bound; torch passes it whole",
)
def _clamp(x: jax.Array, min: Any = None, max: Any = None) -> jax.Array:
    """Limit to [min, max]; the upper bound wins where they cross, and a nan bound gives nan."""
    dtype = jnp.result_type(*(v for v in (x, min, max) if v is not None))
    x = x.astype(dtype)
    if isinstance(min, jax.Array) and isinstance(max, jax.Array):
        min = jnp.where(min < max, min, lax.stop_gradient(min))
    if min is not None:
        x = _limited(x, min, jnp.greater_equal, jnp.maximum)
    if max is not None:
        x = _limited(x, max, jnp.less_equal, jnp.minimum)
    return x


def _limited(
    x: jax.Array, limit: Any, within: Callable[..., jax.Array], beyond: Callable[..., jax.Array]
) -> jax.Array:
    """Return `x` where it is within a limit, else the limit; a nan of either has no gradient."""
    bound = jnp.asarray(limit, x.dtype)
    kept = within(x, bound)
    outside = lax.stop_gradient(beyond(x, bound))
    if isinstance(limit, jax.Array) and is_float(x):
        outside = jnp.where(jnp.isnan(outside), outside, bound)
    return jnp.where(kept, x, outside)


@lowering(aten.clamp_min.default, aten.clamp_min.Tensor, reason="as clamp")
def _clamp_min(x: jax.Array, min: Any) -> jax.Array:
    return _clamp(x, min, None)


@lowering(aten.clamp_max.default, aten.clamp_max.Tensor, reason="as clamp")
def _clamp_max(x: jax.Array, max: Any) -> jax.Array:
    return _clamp(x, None, max)


_AT_ZERO = "torchax's gradient is nan at zero"
_OF_NAN = "torch gives the gradient of a result that is nan to both operands"
_AT_TIES = "torchax's gradient of equal operands goes to the second"


# -- logarithms and exponentials -------------------------------------------------------------------


@lowering(aten._softmax.default, reason=_ROUNDS)
def _softmax(x: jax.Array, dim: int, half_to_float: Any = False) -> jax.Array:
    wider = wide(x)
    return jax.nn.softmax(wider, dim) if x.ndim else jax.nn.softmax(wider[None])[0]


@lowering(aten._log_softmax.default, reason=_ROUNDS)
def _log_softmax(x: jax.Array, dim: int, half_to_float: Any = False) -> jax.Array:
    wider = wide(x)
    return jax.nn.log_softmax(wider, dim) if x.ndim else jax.nn.log_softmax(wider[None])[0]


@lowering(
    aten.logit.default, reason="torchax's gradient is halved at eps and 1 - eps; bfloat16 rounding"
)
def _logit(x: jax.Array, eps: float | None = None) -> jax.Array:
    x = wide(x)
    if eps is not None:
        x = _clamp(x, eps, 1.0 - eps)
    # The quotient's gradient at 1 would be nan; torch's is infinite, and nan outside of [0, 1].
    slope = jnp.where((x >= 0) & (x <= 1), 1, jnp.nan)
    return value_and_gradient(jnp.log(x / (1.0 - x)), (jnp.log(x) - jnp.log1p(-x)) * slope)


@lowering(aten.log2.default, reason=_ROUNDS)
def _log2(x: jax.Array) -> jax.Array:
    return jnp.log2(wide(x))


@lowering(aten.log10.default, reason=_ROUNDS)
def _log10(x: jax.Array) -> jax.Array:
    return jnp.log10(wide(x))


@lowering(aten._safe_softmax.default, reason="torchax's gradient of a row of -inf is nan")
def _safe_softmax(x: jax.Array, dim: int, dtype: torch.dtype | None = None) -> jax.Array:
    wider = wide(x if dtype is None else x.astype(backend.jax_dtype(dtype)))
    if not x.ndim:
        return masked_softmax(wider[None])[0]
    return jnp.moveaxis(masked_softmax(jnp.moveaxis(wider, dim, -1)), -1, dim)


@lowering(aten.rsqrt.default, reason="torchax refuses bool")
def _rsqrt(x: jax.Array) -> jax.Array:
    return _rsqrt_of(wide(x))


@jax.custom_jvp
def _rsqrt_of(x: jax.Array) -> jax.Array:
    return lax.rsqrt(x)


@_rsqrt_of.defjvp
def _rsqrt_jvp(primals: Any, tangents: Any) -> Any:
    value = _rsqrt_of(primals[0])
    return value, tangents[0] * (-0.5 * value**3)


@lowering(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other, reason=_AT_ZERO)
def _xlogy(x: Any, y: Any) -> jax.Array:
    """Return x * log(y), which is 0 where x is 0; its gradient there is not."""
    return _times_log(x, y, jnp.log, 0)


@lowering(
    aten.special_xlog1py.default,
    aten.special_xlog1py.self_scalar,
    aten.special_xlog1py.other_scalar,
    reason=_AT_ZERO,
)
def _xlog1py(x: Any, y: Any) -> jax.Array:
    return _times_log(x, y, jnp.log1p, -1)


# One function for all calls, so that two traces of it are the same program.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(log: Callable[[Any], jax.Array], pole: int, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(y), y, jnp.where(x == 0, 0, x * log(y)))


def _product_forward(
    log: Callable[[Any], jax.Array], pole: int, x: jax.Array, y: jax.Array
) -> tuple[jax.Array, Any]:
    return _product(log, pole, x, y), (x, y)


def _product_backward(
    log: Callable[[Any], jax.Array], pole: int, given: Any, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, y = given
    # Where no gradient comes back, torch's is 0, even if the logarithm is infinite.
    by_first = jnp.where((x == 0) & (y <= pole), 0, _product(log, pole, cotangent, y))
    return by_first, cotangent * (x / (y - pole))


_product.defvjp(_product_forward, _product_backward)


def _times_log(x: Any, y: Any, log: Callable[[Any], jax.Array], pole: int) -> jax.Array:
    return _product(log, pole, *(wide(v) for v in _promoted(x, y)))


def _shared_at_ties(value: jax.Array, x: jax.Array, y: jax.Array, first: jax.Array) -> jax.Array:
    """Return `value`, with the gradient of `x` where it is `first`, and of both at ties and nan."""
    if not is_float(value):
        return value
    second = ~first & (x != y) & ~(jnp.isnan(x) | jnp.isnan(y))
    both = jnp.where(second, 0, x) + jnp.where(first, 0, y)
    return value_and_gradient(value, jnp.where(x == y, both / 2, both))


@lowering(aten.maximum.default, reason=_OF_NAN)
def _maximum(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = _promoted(x, y)
    return _shared_at_ties(jnp.maximum(x, y), x, y, x > y)


@lowering(aten.minimum.default, reason=_OF_NAN)
def _minimum(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = _promoted(x, y)
    return _shared_at_ties(jnp.minimum(x, y), x, y, x < y)


@lowering(aten.fmax.default, reason=_AT_TIES)
def _fmax(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = _promoted(x, y)
    return jnp.where((x >= y) | (y != y), x, y)


@lowering(aten.fmin.default, reason=_AT_TIES)
def _fmin(x: jax.Array, y: jax.Array) -> jax.Array:
    x, y = _promoted(x, y)
    return jnp.where((x <= y) | (y != y), x, y)


# -- signs and parts -------------------------------------------------------------------------------


@lowering(
    aten.sign.default, aten.sgn.default, reason="torchax refuses bool; its sign of nan is nan"
)
def _sign(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x
    return jnp.where((x == 0) | jnp.isnan(x), 0, jnp.sign(x)) if is_float(x) else jnp.sign(x)


@lowering(aten.copysign.Tensor, aten.copysign.Scalar, reason="torchax's gradient at zero is not 0")
def _copysign(x: jax.Array, y: Any) -> jax.Array:
    """Return `x` with the sign of `y`, which has no gradient."""
    dtype = jnp.result_type(x, y)
    dtype = dtype if jnp.issubdtype(dtype, jnp.floating) else jnp.float32
    x, y = jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(y, dtype))
    value = jnp.copysign(x, y)
    ratio = jnp.where(x == 0, 0, value / jnp.where(x == 0, 1, x))
    return value_and_gradient(value, x * lax.stop_gradient(ratio))


@lowering(aten.nextafter.default, reason="jax has no gradient of it")
def _nextafter(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the number after `x` towards `y`, with the gradient of `x` where they differ."""
    x, y = jnp.broadcast_arrays(x, y)
    value = jnp.nextafter(lax.stop_gradient(x), lax.stop_gradient(y))
    return value_and_gradient(value, jnp.where(x == y, y * 0, x))


@lowering(aten.abs.default, reason="jnp.abs has gradient 1 at zero, torch 0")
def _abs(x: jax.Array) -> jax.Array:
    return absolute(x)


@lowering(aten.neg.default, reason="torchax multiplies by -1, which unsigned integers cannot hold")
def _neg(x: jax.Array) -> jax.Array:
    return lax.neg(x)


@lowering(aten.round.decimals, reason="torchax rounds numbers of 1e-decimals in bfloat16")
def _round_decimals(x: jax.Array, *, decimals: int = 0) -> jax.Array:
    if not is_float(x):
        return x
    scale = 10.0 ** abs(decimals)
    x = wide(x)
    return jnp.round(x * scale) / scale if decimals >= 0 else jnp.round(x / scale) * scale
