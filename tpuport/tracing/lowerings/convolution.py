"""Convolution and its transpose in 1 to 3 dims."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpuport.tracing.core.context import current
from tpuport.tracing.core.lowering_registry import lowering
from tpuport.tracing.lowerings._numeric import broadcast_wide

aten = torch.ops.aten


@lowering(
    aten.convolution.default, reason="torchax mixes up the groups of a transposed convolution"
)
def _convolution(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    """Cross-correlate `x` [N, Cin, ...] with `weight` [Cout, Cin / groups, ...].

    With `transposed` the weight is [Cin, Cout / groups, ...], and this is the gradient of a
    convolution with respect to its input: the input is dilated by the stride and correlated with
    the flipped kernel.
    """
    rank = weight.ndim - 2
    stride, padding, dilation, output_padding = (
        tuple(v) * rank if len(v) == 1 else tuple(v)
        for v in (stride, padding, dilation, output_padding)
    )
    batched = x if x.ndim == rank + 2 else x[None]
    kernel = weight.shape[2:]
    if transposed:
        edges = [
            (d * (k - 1) - p, d * (k - 1) - p + o)
            for d, k, p, o in zip(dilation, kernel, padding, output_padding, strict=True)
        ]
        window, spread = (1,) * rank, stride
        weight = _transposed_weight(weight, groups)
    else:
        edges, window, spread = [(p, p) for p in padding], stride, (1,) * rank
    spatial = "DHW"[3 - rank :]
    layout = ("NC" + spatial, "OI" + spatial, "NC" + spatial)
    size = None
    if stride == spread == dilation == (1,) * rank and groups == 1:
        batched, size = _enlarged(batched, kernel, edges)
    if size is not None:
        edges = [(0, 0)] * rank
    out = lax.conv_general_dilated(
        batched,
        weight,
        window,
        edges,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=layout,
        feature_group_count=groups,
    )
    if size is not None:
        out = lax.slice(out, (0,) * out.ndim, (*out.shape[:2], *size))
    if bias is not None:
        out = out + broadcast_wide(bias.reshape((1, -1) + (1,) * rank), out.shape)
    return out if x.ndim == rank + 2 else out[0]


def _enlarged(
    x: jax.Array, kernel: Sequence[int], edges: Sequence[tuple[int, int]]
) -> tuple[jax.Array, list[int] | None]:
    """Pad an image smaller than the kernel, until a result of the kernel's size comes of it.

    XLA exchanges image and kernel where the kernel is larger, in the gradients, too. Its CPU
    backend computes what that gives by plain loops, up to twenty times as slowly
    (see test_xla_exchanges_image_and_kernel).

    Returns:
        The padded image and the size of the wanted part of the result; None for that, and the
        image as it is, if padding saves nothing.
    """
    trace, image = current(), x.shape[2:]
    if trace is None or trace.options.target != "cpu":
        return x, None
    if not 1 < math.prod(image) < math.prod(kernel):
        return x, None
    size = [n + sum(e) - k + 1 for n, e, k in zip(image, edges, kernel, strict=True)]
    if min(size) < 1:
        return x, None
    more = [
        (low, high + max(k - n, 0), 0)
        for (low, high), n, k in zip(edges, size, kernel, strict=True)
    ]
    # Of a transposed convolution edges can be negative.
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *more]), size


def _transposed_weight(weight: jax.Array, groups: int) -> jax.Array:
    """Turn [Cin, Cout / groups, ...] into a flipped [Cout, Cin / groups, ...] of a convolution."""
    inputs, outputs, *kernel = weight.shape
    split = weight.reshape(groups, inputs // groups, outputs, *kernel)
    swapped = jnp.swapaxes(split, 1, 2).reshape(groups * outputs, inputs // groups, *kernel)
    return jnp.flip(swapped, range(2, weight.ndim))
