"""Special functions where torchax overflows, or XLA's series fails for negative arguments."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.scipy import special as jss

from tpuport.tracing.core.lowering_registry import lowering
from tpuport.tracing.lowerings._numeric import is_complex, wide

aten = torch.ops.aten
# Most terms that are summed one by one before XLA's Hurwitz zeta, which is wrong below zero.
_TERMS = 1000


@lowering(aten.lgamma.default, reason="torchax's gradient at zero is nan")
def _lgamma(x: jax.Array) -> jax.Array:
    return _lgamma_of(wide(x))


@jax.custom_jvp
def _lgamma_of(x: jax.Array) -> jax.Array:
    return lax.lgamma(x)


@_lgamma_of.defjvp
def _lgamma_jvp(primals: Any, tangents: Any) -> Any:
    return _lgamma_of(primals[0]), tangents[0] * _digamma_of(primals[0])


@lowering(
    aten.cosh.default,
    reason="XLA's is not 1 near zero, and hyperbolic geometry takes the root of its square less 1",
)
def _cosh(x: jax.Array) -> jax.Array:
    x = wide(x)
    if is_complex(x):
        return jnp.cosh(x)
    is_small = jnp.abs(x) < 0.25
    half = jnp.where(is_small, x, 0.0) / 2
    return jnp.where(is_small, 1 + 2 * jnp.sinh(half) ** 2, jnp.cosh(x))


@lowering(aten.hypot.default, reason="torchax's gradient at the origin is 0.5, torch's nan")
def _hypot(x: jax.Array, y: jax.Array) -> jax.Array:
    return _hypot_of(wide(x), wide(y))


@jax.custom_jvp
def _hypot_of(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.hypot(x, y)


@_hypot_of.defjvp
def _hypot_jvp(primals: Any, tangents: Any) -> Any:
    value = _hypot_of(*primals)
    return value, sum(d * (x / value) for x, d in zip(primals, tangents, strict=True))


@jax.custom_jvp
def _entr_of(x: jax.Array) -> jax.Array:
    positive = x > 0
    known = jnp.where(positive, x, 1)
    value = jnp.where(positive, -known * jnp.log(known), jnp.where(x == 0, 0, -jnp.inf))
    return jnp.where(jnp.isnan(x), x, value)


@_entr_of.defjvp
def _entr_jvp(primals: Any, tangents: Any) -> Any:
    return _entr_of(primals[0]), tangents[0] * (-jnp.log(primals[0]) - 1)


@lowering(aten.special_entr.default, reason="the decomposition's gradient at zero is nan")
def _entr(x: jax.Array) -> jax.Array:
    """Return -x log x; its slope is infinite at zero."""
    return _entr_of(wide(x))


@jax.custom_jvp
def _i0_of(x: jax.Array) -> jax.Array:
    return jss.i0(x)


@_i0_of.defjvp
def _i0_jvp(primals: Any, tangents: Any) -> Any:
    return _i0_of(primals[0]), tangents[0] * jss.i1(primals[0])


@lowering(aten.i0.default, reason="torchax's gradient at zero is 1")
def _i0(x: jax.Array) -> jax.Array:
    return _i0_of(wide(x))


@lowering(aten.angle.default)
def _angle(x: jax.Array) -> jax.Array:
    """Return the argument of complex numbers; of real ones 0, pi or nan, without a gradient."""
    if jnp.iscomplexobj(x):
        return _atan2(x.imag, x.real)
    x = lax.stop_gradient(wide(x))
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, math.pi, 0).astype(x.dtype))


@lowering(aten.sinc.default, reason="torchax's gradient at zero is nan")
def _sinc(x: jax.Array) -> jax.Array:
    x = wide(x)
    zero = x == 0
    angle = math.pi * jnp.where(zero, 1, x)
    return jnp.where(zero, 1, jnp.sin(angle) / angle)


@lowering(aten.atan2.default, reason="torchax's gradient at the origin is nan")
def _atan2(y: jax.Array, x: jax.Array) -> jax.Array:
    y, x = wide(y), wide(x)
    zero = (y == 0) & (x == 0)
    value = lax.stop_gradient(jnp.arctan2(y, x))
    return jnp.where(zero, value, jnp.arctan2(jnp.where(zero, 1, y), jnp.where(zero, 1, x)))


@lowering(
    aten.polygamma.default,
    reason="torchax refuses bool and bfloat16, and loses all digits below -8",
)
def _polygamma(n: int, x: jax.Array) -> jax.Array:
    """Return the n-th derivative of digamma."""
    if n == 0:
        return _digamma_of(wide(x))
    return _polygamma_of(n, wide(x))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _polygamma_of(n: int, x: jax.Array) -> jax.Array:
    if n == 1:
        return _trigamma(x)

    def below(state: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        count, shifted, _ = state
        return (count < _TERMS) & jnp.any(shifted < 1)

    def term(state: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        count, shifted, total = state
        is_below = shifted < 1
        total = total + jnp.where(is_below, jnp.power(shifted, -(n + 1)), 0)
        return count + 1, jnp.where(is_below, shifted + 1, shifted), total

    _, shifted, total = lax.while_loop(below, term, (jnp.int32(0), x, jnp.zeros_like(x)))
    total = total + jss.zeta(jnp.asarray(n + 1, x.dtype), shifted)
    return (-1) ** (n + 1) * math.gamma(n + 1) * total


@_polygamma_of.defjvp
def _polygamma_jvp(n: int, primals: Any, tangents: Any) -> Any:
    return _polygamma_of(n, primals[0]), tangents[0] * _polygamma_of(n + 1, primals[0])


def _trigamma(x: jax.Array) -> jax.Array:
    """Compute trigamma by reflection below one half, then the asymptotic series, as torch does."""
    reflected = x < 0.5
    y = jnp.where(reflected, 1 - x, x)
    total = jnp.zeros_like(x)
    for _ in range(6):
        total = total + 1 / (y * y)
        y = y + 1
    inverse = 1 / (y * y)
    tail = 1 + 1 / (2 * y) + inverse * (1 / 6 - inverse * (1 / 30 - inverse / 42))
    total = total + tail / y
    sine = jnp.sin(math.pi * x)
    return jnp.where(reflected, (math.pi / sine) ** 2 - total, total)


@jax.custom_jvp
def _digamma_of(x: jax.Array) -> jax.Array:
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), jss.digamma(x))


@_digamma_of.defjvp
def _digamma_jvp(primals: Any, tangents: Any) -> Any:
    return _digamma_of(primals[0]), tangents[0] * _trigamma(primals[0])


@lowering(aten.digamma.default, reason="torchax's gradient loses all digits below -8")
def _digamma(x: jax.Array) -> jax.Array:
    return _digamma_of(wide(x))


@lowering(
    aten.special_erfcx.default, reason="torchax multiplies infinity by zero for large arguments"
)
def _erfcx(x: jax.Array) -> jax.Array:
    return jss.erfcx(wide(x))


@lowering(aten.special_log_ndtr.default, reason="the decomposition's gradient is nan")
def _log_ndtr(x: jax.Array) -> jax.Array:
    return jss.log_ndtr(wide(x))


@jax.custom_jvp
def _ndtri(x: jax.Array) -> jax.Array:
    return jss.ndtri(x)


@_ndtri.defjvp
def _ndtri_jvp(primals: Any, tangents: Any) -> Any:
    """Differentiate `ndtri`; infinite at 0 and 1 as in torch, where jax has zero."""
    value = _ndtri(primals[0])
    return value, tangents[0] * math.sqrt(2 * math.pi) * jnp.exp(0.5 * value * value)


def _floating(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    def run(x: jax.Array) -> jax.Array:
        return function(wide(x))

    return run


for _op, _function in (
    (aten.erf.default, lax.erf),
    (aten.erfc.default, lax.erfc),
    (aten.special_ndtri.default, _ndtri),
):
    lowering(_op, reason="torchax refuses bool")(_floating(_function))
