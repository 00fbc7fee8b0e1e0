"""Random ops, each drawing by a key of the program's stream.

torchax's own draw from a global key, which jit freezes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.interop import backend
from tpuport.tracing.core.context import current
from tpuport.tracing.core.keys import op_key
from tpuport.tracing.core.lowering_registry import lowering, special
from tpuport.tracing.core.storage import Flow
from tpuport.tracing.core.tensor import meta_of
from tpuport.tracing.core.values import flow_of, value_of, wrap_as, write

aten = torch.ops.aten
_FROZEN = "torchax draws from a global key, which jit freezes: the same numbers at every call"


def _dtype(dtype: torch.dtype | None) -> jnp.dtype:
    return backend.jax_dtype(dtype or torch.get_default_dtype())


def _compute(dtype: jnp.dtype) -> jnp.dtype:
    """Return the dtype to draw in: float32 for low precision, rounded afterwards as in torch."""
    return jnp.dtype(jnp.float32) if dtype.itemsize < 4 else dtype


@lowering(aten.rand, reason=_FROZEN)
def rand(size, names=None, *, dtype=None, key, **unused) -> jax.Array:
    return uniform_draw(key, tuple(size), _dtype(dtype))


def uniform_draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Draw numbers in [0, 1) of a floating dtype."""
    return jax.random.uniform(key, shape, _compute(dtype)).astype(dtype)


@lowering(aten.randn, reason=_FROZEN)
def randn(size, names=None, *, dtype=None, key, **unused) -> jax.Array:
    return normal_draw(key, tuple(size), _dtype(dtype))


def normal_draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Draw standard normal numbers, real or complex (variance 1 over both parts)."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.random.normal(key, shape, dtype)
    return jax.random.normal(key, shape, _compute(dtype)).astype(dtype)


@lowering(aten.rand_like, reason=_FROZEN)
def rand_like(x, *, dtype=None, key, **unused) -> jax.Array:
    return uniform_draw(key, x.shape, backend.jax_dtype(dtype) if dtype else x.dtype)


@lowering(aten.randn_like, reason=_FROZEN)
def randn_like(x, *, dtype=None, key, **unused) -> jax.Array:
    return normal_draw(key, x.shape, backend.jax_dtype(dtype) if dtype else x.dtype)


def _integers(
    key: jax.Array, shape: tuple[int, ...], low: Any, high: Any, dtype: jnp.dtype
) -> jax.Array:
    if isinstance(low, jax.Array) or isinstance(high, jax.Array):
        return jax.random.randint(key, shape, low, high).astype(dtype)
    wide = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]  (set by name)
    limit = jnp.iinfo(jnp.int64 if wide else jnp.int32)
    high = min(int(high), int(limit.max))
    return jax.random.randint(key, shape, int(low), high).astype(dtype)


@lowering(aten.randint.default, aten.randint.generator, reason=_FROZEN)
def randint(high, size, *, dtype=None, key, **unused) -> jax.Array:
    return _integers(key, tuple(size), 0, high, backend.jax_dtype(dtype or torch.int64))


@lowering(aten.randint.low, aten.randint.low_generator, reason=_FROZEN)
def randint_low(low, high, size, *, dtype=None, key, **unused) -> jax.Array:
    return _integers(key, tuple(size), low, high, backend.jax_dtype(dtype or torch.int64))


@lowering(aten.randint_like.default, aten.randint_like.generator, reason=_FROZEN)
def randint_like(x, high, *, dtype=None, key, **unused) -> jax.Array:
    return _integers(key, x.shape, 0, high, backend.jax_dtype(dtype) if dtype else x.dtype)


@lowering(aten.randint_like.low_dtype, reason=_FROZEN)
def randint_like_low(x, low, high, *, dtype=None, key, **unused) -> jax.Array:
    return _integers(key, x.shape, low, high, backend.jax_dtype(dtype) if dtype else x.dtype)


@lowering(aten.random.default, reason=_FROZEN)
def random_default(x, *, key) -> jax.Array:
    bits = {"b": 2, "f": 1 << 24, "i": 1 << 31, "u": 256, "V": 256}
    high = min(
        bits.get(x.dtype.kind, 256),
        128 if x.dtype == jnp.int8 else 1 << 31,
        256 if x.dtype.itemsize == 2 else 1 << 31,
    )
    return _integers(key, x.shape, 0, high, x.dtype)


@lowering(aten.random.to, reason=_FROZEN)
def random_to(x, to, *, key) -> jax.Array:
    return _integers(key, x.shape, 0, to, x.dtype)


@lowering(getattr(aten.random, "from"), reason=_FROZEN)
def random_from(x, low, to=None, *, key) -> jax.Array:
    return _integers(key, x.shape, low, (1 << 31) - 1 if to is None else to, x.dtype)


@lowering(aten.randperm, reason=_FROZEN)
def randperm(n, *, dtype=torch.int64, key, **unused) -> jax.Array:
    # The bits of each element are its own: the order of the first few is that of a shorter one,
    # which may have a size that depends on data in the program and not in eager PyTorch.
    bits = jax.random.bits(key, (n, 2), jnp.uint32)
    order = jax.lax.sort((*bits.T, jnp.arange(n, dtype=jnp.int32)), num_keys=2)[-1]
    return order.astype(backend.jax_dtype(dtype or torch.int64))


@lowering(aten.uniform, reason=_FROZEN)
def uniform(x, low=0.0, high=1.0, *, key) -> jax.Array:
    draw = jax.random.uniform(key, x.shape, _compute(x.dtype))
    return (low + (high - low) * draw).astype(x.dtype)


@lowering(aten.normal_functional.default, reason=_FROZEN)
def normal_functional(x, mean=0.0, std=1.0, *, key) -> jax.Array:
    return (mean + std * normal_draw(key, x.shape, x.dtype)).astype(x.dtype)


@lowering(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, reason=_FROZEN)
def normal(mean, std=1.0, *, key) -> jax.Array:
    shape: Any = jnp.broadcast_shapes(mean.shape, jnp.shape(std))
    return mean + std * normal_draw(key, shape, mean.dtype)


@lowering(aten.normal.float_Tensor, reason=_FROZEN)
def normal_float_tensor(mean, std, *, key) -> jax.Array:
    return mean + std * normal_draw(key, std.shape, std.dtype)


@lowering(aten.normal.float_float, reason=_FROZEN)
def normal_float_float(mean, std, size, *, dtype=None, key, **unused) -> jax.Array:
    return mean + std * normal_draw(key, tuple(size), _dtype(dtype))


@lowering(aten.bernoulli.default, reason=_FROZEN)
def bernoulli(p, *, key) -> jax.Array:
    return jax.random.bernoulli(key, p.astype(_compute(p.dtype))).astype(p.dtype)


@lowering(aten.bernoulli.p, reason=_FROZEN)
def bernoulli_p(x, p=0.5, *, key) -> jax.Array:
    return jax.random.bernoulli(key, p, x.shape).astype(x.dtype)


@lowering(aten.bernoulli.Tensor, reason=_FROZEN)
def bernoulli_tensor(x, p, *, key) -> jax.Array:
    return jax.random.bernoulli(key, jnp.broadcast_to(p, x.shape)).astype(x.dtype)


@lowering(aten.native_dropout.default, reason=_FROZEN)
def native_dropout(x, p, train, *, key) -> tuple[jax.Array, jax.Array]:
    if not train or p == 0.0:
        return x, jnp.ones(x.shape, bool)
    kept = jax.random.bernoulli(key, 1.0 - p, x.shape)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return jnp.where(kept, x * jnp.asarray(scale, x.dtype), jnp.zeros((), x.dtype)), kept


@lowering(aten.exponential.default, reason=_FROZEN)
def exponential(x, lambd=1.0, *, key) -> jax.Array:
    return (jax.random.exponential(key, x.shape, _compute(x.dtype)) / lambd).astype(x.dtype)


@lowering(aten.cauchy.default, reason=_FROZEN)
def cauchy(x, median=0.0, sigma=1.0, *, key) -> jax.Array:
    return (median + sigma * jax.random.cauchy(key, x.shape, _compute(x.dtype))).astype(x.dtype)


@lowering(aten.log_normal.default, reason=_FROZEN)
def log_normal(x, mean=1.0, std=2.0, *, key) -> jax.Array:
    return jnp.exp(mean + std * normal_draw(key, x.shape, _compute(x.dtype))).astype(x.dtype)


@lowering(aten.geometric.default, reason=_FROZEN)
def geometric(x, p, *, key) -> jax.Array:
    return jax.random.geometric(key, p, x.shape).astype(x.dtype)


@lowering(aten.poisson.default, reason=_FROZEN)
def poisson(rate, *, key) -> jax.Array:
    return jax.random.poisson(key, rate).astype(rate.dtype)


@lowering(aten.binomial.default, reason=_FROZEN)
def binomial(count, prob, *, key) -> jax.Array:
    return jax.random.binomial(key, count, prob).astype(count.dtype)


@lowering(aten._standard_gamma.default, reason=_FROZEN)
def standard_gamma(alpha, *, key) -> jax.Array:
    return jax.random.gamma(key, alpha)


@lowering(aten._sample_dirichlet.default, reason=_FROZEN)
def sample_dirichlet(alpha, *, key) -> jax.Array:
    return jax.random.dirichlet(key, alpha)


def _chosen(p: jax.Array, sums: jax.Array, reached: jax.Array) -> jax.Array:
    """Return the places [k] at which the running sums [n] of weights pass some numbers [k].

    Sums are rounded, and may rise or fall by that where a weight is zero: such a place is never
    chosen, but the next one that has a weight.
    """
    places, some = jnp.arange(p.shape[0]), p > 0
    following = jax.lax.cummin(jnp.where(some, places, p.shape[0]), reverse=True)
    found = jnp.searchsorted(sums, reached, side="right")
    last = jnp.max(jnp.where(some, places, 0))
    return jnp.minimum(following[jnp.minimum(found, last)], last)


@lowering(aten.multinomial.default, reason=_FROZEN)
def multinomial(p, num_samples, replacement=False, *, key) -> jax.Array:
    if replacement:
        # One number a sample, whatever the number of weights: padded rows draw what their real
        # elements would.
        sums = jnp.cumsum(p.astype(_compute(p.dtype)), axis=-1)
        drawn = jax.random.uniform(key, (num_samples, *p.shape[:-1]), sums.dtype)
        reached = jnp.moveaxis(drawn, 0, -1) * sums[..., -1:]
        return jnp.vectorize(_chosen, signature="(n),(n),(k)->(k)")(p, sums, reached)
    # Gumbel top-k draws without replacement.
    scores = jnp.log(p) + jax.random.gumbel(key, p.shape)
    return jax.lax.top_k(scores, num_samples)[1]


@special(aten.rrelu_with_noise.default)
def rrelu_with_noise(
    x: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Apply slopes below zero: drawn in training, their mean otherwise; `noise` receives them."""
    value = value_of(x)
    slope = jnp.asarray((lower + upper) / 2, value.dtype)
    if training:
        key = op_key(current(), {"generator": generator})
        slope = jax.random.uniform(key, value.shape, _compute(value.dtype), lower, upper)
        slope = jnp.where(value <= 0, slope.astype(value.dtype), jnp.ones((), value.dtype))
        write(noise, slope, flow=Flow.STOPPED)
    # A nan passes as it is in training, and has the gradient of the slope otherwise, as in torch.
    is_whole = ~(value <= 0) if training else value > 0
    out = jnp.where(is_whole, value, value * slope)
    return wrap_as(None, out, meta_of(x), current(), flow_of([x]))


@special(aten.rrelu_with_noise_.default)
def rrelu_with_noise_(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Apply `rrelu_with_noise` in place."""
    result = rrelu_with_noise(x, *args, **kwargs)
    return write(x, value_of(result), flow=flow_of([x]))
