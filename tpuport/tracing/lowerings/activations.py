"""Activation functions, with torch's gradients at corners and where an exponential overflows."""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.lowering_registry import lowering
from tpuport.tracing.lowerings._numeric import value_and_gradient, wide

aten = torch.ops.aten
_ROUNDS = "torchax rounds to bfloat16 after each step; torch computes in float32 and rounds once"
_AT_BOUNDS = "torchax halves the gradient at a bound, or passes it"
_OVERFLOWS = "the gradient of torch's decomposition is nan where an exponential overflows"


@jax.custom_jvp
def _rectified(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)


@_rectified.defjvp
def _rectified_jvp(primals: Any, tangents: Any) -> Any:
    return _rectified(primals[0]), jnp.where(primals[0] <= 0, 0, tangents[0])


@lowering(aten.relu.default, reason="torch passes the gradient of nan on, jax.nn.relu does not")
def _relu(x: jax.Array) -> jax.Array:
    return _rectified(x)


@lowering(
    aten.leaky_relu.default,
    reason="torchax has gradient 1 at zero, torch the slope; bfloat16 rounding",
)
def _leaky_relu(x: jax.Array, negative_slope: float = 0.01) -> jax.Array:
    wider = wide(x)
    return jnp.where(wider > 0, wider, wider * negative_slope)


@lowering(aten.elu.default, reason=_OVERFLOWS)
def _elu(x: jax.Array, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> jax.Array:
    wider = wide(x)
    negative = wider <= 0
    exponent = jnp.where(negative, wider, 0) * input_scale
    return jnp.where(negative, jnp.expm1(exponent) * (alpha * scale), wider * scale)


@lowering(aten.celu.default, reason=_OVERFLOWS)
def _celu(x: jax.Array, alpha: Any = 1) -> jax.Array:
    return _elu(x, alpha, 1, 1 / alpha)


@lowering(aten.softplus.default, reason=_OVERFLOWS)
def _softplus(x: jax.Array, beta: Any = 1, threshold: Any = 20) -> jax.Array:
    wider = wide(x)
    is_linear = wider * beta > threshold
    exponent = jnp.where(is_linear, 0, wider * beta)
    return jnp.where(is_linear, wider, jnp.log1p(jnp.exp(exponent)) / beta)


@lowering(aten.mish.default, reason=_OVERFLOWS)
def _mish(x: jax.Array) -> jax.Array:
    wider = wide(x)
    return wider * jnp.tanh(jax.nn.softplus(wider))


@lowering(
    aten.hardtanh.default, reason="jnp.clip halves the gradient at a bound; torch's is zero there"
)
def _hardtanh(x: jax.Array, min_val: float = -1, max_val: float = 1) -> jax.Array:
    low, high = jnp.asarray(min_val, x.dtype), jnp.asarray(max_val, x.dtype)
    value = jnp.where(x <= low, low, jnp.where(x >= high, high, x))
    return value_and_gradient(value, jnp.where((x <= low) | (x >= high), 0, x))


@lowering(aten.hardsigmoid.default, reason=_AT_BOUNDS)
def _hardsigmoid(x: jax.Array) -> jax.Array:
    wider = wide(x)
    value = jnp.where(wider <= -3, 0, jnp.where(wider >= 3, 1, (wider + 3) / 6))
    return value_and_gradient(value, jnp.where((wider > -3) & (wider < 3), wider / 6, 0))


@lowering(aten.hardswish.default, reason=_AT_BOUNDS)
def _hardswish(x: jax.Array) -> jax.Array:
    wider = wide(x)
    inside = (wider > -3) & (wider < 3)
    curve = jnp.where(inside, wider, 0)
    value = jnp.where(wider <= -3, 0, jnp.where(inside, curve * (curve + 3) / 6, wider))
    # torch multiplies -inf by zero.
    return value_and_gradient(jnp.where(jnp.isneginf(wider), jnp.nan, value), value)


@lowering(aten.softshrink.default, reason="torch passes the gradient of nan on, torchax does not")
def _softshrink(x: jax.Array, lambd: Any = 0.5) -> jax.Array:
    wider = wide(x)
    is_small = (wider >= -lambd) & (wider <= lambd)
    value = jnp.where(is_small, 0, wider - jnp.sign(wider) * lambd)
    return value_and_gradient(value, jnp.where(is_small, 0, wider))


@lowering(aten.gelu.default, reason=_ROUNDS)
def _gelu(x: jax.Array, approximate: str = "none") -> jax.Array:
    return jax.nn.gelu(wide(x), approximate=approximate == "tanh")


@lowering(aten.silu.default, reason=_ROUNDS)
def _silu(x: jax.Array) -> jax.Array:
    return jax.nn.silu(wide(x))


@lowering(aten.glu.default, reason=_ROUNDS)
def _glu(x: jax.Array, dim: int = -1) -> jax.Array:
    return jax.nn.glu(wide(x), dim)
