"""Normalisation: batch norm with its running statistics, layer and group norm in float32."""

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpuport.tracing.core.context import current
from tpuport.tracing.core.lowering_registry import lowering, special
from tpuport.tracing.core.storage import Flow
from tpuport.tracing.core.values import flow_of, value_of, wrap_as, write
from tpuport.tracing.lowerings._numeric import value_and_gradient, wide

aten = torch.ops.aten


@special(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise [B, C, ...] over all dims but 1.

    In training also update the running statistics (with the unbiased variance).
    """
    value = value_of(x)
    axes = tuple(d for d in range(value.ndim) if d != 1)
    wide = value.astype(jnp.float32) if value.dtype.itemsize < 4 else value
    if training:
        mean = jnp.mean(wide, axes)
        centred = wide - _column(mean, value.ndim)
        # Eager sums in float64. The rounding of the mean is what is left after it is taken off; it
        # depends on no input, and its sum is taken in the same pass as that of the squares.
        left = lax.stop_gradient(jnp.mean(centred, axes))
        variance = jnp.mean(jnp.square(centred), axes) - jnp.square(left)
        centred, mean = centred - _column(left, value.ndim), mean + left
        if running_mean is not None and running_var is not None:
            count = value.size // max(value.shape[1], 1)
            _move(running_mean, mean, momentum)
            unbiased = jnp.maximum(variance, 0) * (count / max(count - 1, 1))
            _move(running_var, unbiased, momentum)
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, variance = (
            value_of(running_mean).astype(wide.dtype),
            value_of(running_var).astype(wide.dtype),
        )
        centred = wide - _column(mean, value.ndim)
    inverse = jax.lax.rsqrt(variance + eps)
    scale = inverse if weight is None else inverse * value_of(weight).astype(wide.dtype)
    out = centred * _column(scale, value.ndim)
    if bias is not None:
        out = out + _column(value_of(bias).astype(wide.dtype), value.ndim)
    meta = torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")
    flow = flow_of([t for t in (x, weight, bias) if t is not None])
    result = wrap_as(None, out, meta, current(), flow)
    kind = weight.dtype if weight is not None else x.dtype
    # Eager gives these no gradient, whatever is computed from them.
    mean, inverse = lax.stop_gradient((mean, inverse))
    saved = [mean, inverse] if training else [jnp.zeros((0,)), jnp.zeros((0,))]
    extra = [
        wrap_as(None, s, torch.empty(s.shape, dtype=kind, device="meta"), current()) for s in saved
    ]
    return result, extra[0], extra[1]


def _column(channels: jax.Array, ndim: int) -> jax.Array:
    return channels.reshape((1, -1) + (1,) * (ndim - 2))


def _move(running: torch.Tensor, new: jax.Array, momentum: float) -> None:
    new = jax.lax.stop_gradient(new)
    old = value_of(running)
    write(running, ((1 - momentum) * old + momentum * new).astype(old.dtype), flow=Flow.STOPPED)


@special(aten._batch_norm_with_update.default)
def batch_norm_with_update(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Normalise by the batch's own statistics; the last result is memory of other backends."""
    found = native_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    meta = torch.empty(0, dtype=torch.uint8, device="meta")
    return *found, wrap_as(None, jnp.zeros(0, jnp.uint8), meta, current())


@special(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalise by the batch's own statistics (instance norm)."""
    return native_batch_norm(x, weight, bias, None, None, True, momentum, eps)


@lowering(
    aten.native_layer_norm.default,
    reason="torchax takes means of bfloat16 in bfloat16 and ignores the order of dims",
)
def _native_layer_norm(
    x: jax.Array, shape: list[int], weight: jax.Array | None, bias: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise over the last `len(shape)` dims in float32.

    Returns:
        The output, and the mean and reciprocal standard deviation [..., 1, ..., 1] in float32 for
        bfloat16 input.
    """
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    wider = wide(x)
    mean = jnp.mean(wider, axes, keepdims=True)
    centred = wider - mean
    inverse = lax.rsqrt(jnp.mean(jnp.square(centred), axes, keepdims=True) + eps)
    out = centred * inverse
    if weight is not None:
        out = out * wide(weight)
    if bias is not None:
        out = out + wide(bias)
    # Eager gives the statistics no gradient.
    return out, lax.stop_gradient(mean), lax.stop_gradient(inverse)


@lowering(
    aten.native_layer_norm_backward.default,
    reason="torchax's takes the arguments of an older torch",
)
def _native_layer_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    shape: list[int],
    mean: jax.Array,
    inverse: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    wanted: list[bool],
) -> tuple[jax.Array | None, ...]:
    """Return the wanted gradients of the input, the weight and the bias, summed in float32."""
    del bias
    outer, axes = tuple(range(x.ndim - len(shape))), tuple(range(x.ndim - len(shape), x.ndim))
    # The statistics are values to the caller, and functions of `x` to a derivative of this.
    wider, held = wide(x), lax.stop_gradient(inverse)
    mean = value_and_gradient(lax.stop_gradient(mean), jnp.mean(wider, axes, keepdims=True))
    variance = jnp.mean(jnp.square(wider - mean), axes, keepdims=True)
    inverse = value_and_gradient(held, variance * (-0.5 * held**3))
    normal, given = (wider - mean) * inverse, wide(grad)
    scaled = given if weight is None else given * wide(weight)
    along = normal * jnp.mean(scaled * normal, axes, keepdims=True)
    found = (
        inverse * (scaled - jnp.mean(scaled, axes, keepdims=True) - along),
        jnp.sum(given * normal, outer),
        jnp.sum(given, outer),
    )
    return tuple(g if flag else None for g, flag in zip(found, wanted, strict=True))


@lowering(
    aten.native_group_norm.default,
    reason="torchax takes means of bfloat16 in bfloat16, in a loop of one step",
)
def _native_group_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    batch: int,
    channels: int,
    spatial: int,
    groups: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise [N, C, ...] over each of `groups` groups of channels, in float32."""
    wider = wide(x).reshape(batch, groups, channels // groups * spatial)
    mean = jnp.mean(wider, 2, keepdims=True)
    centred = wider - mean
    inverse = lax.rsqrt(jnp.mean(jnp.square(centred), 2, keepdims=True) + eps)
    out = (centred * inverse).reshape(x.shape)
    if weight is not None:
        out = out * _column(wide(weight), x.ndim)
    if bias is not None:
        out = out + _column(wide(bias), x.ndim)
    return out, mean[..., 0], inverse[..., 0]
