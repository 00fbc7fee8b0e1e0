"""Convolution and its transpose in 1 to 3 dims."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax

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
    if bias is not None:
        out = out + broadcast_wide(bias.reshape((1, -1) + (1,) * rank), out.shape)
    return out if x.ndim == rank + 2 else out[0]


def _transposed_weight(weight: jax.Array, groups: int) -> jax.Array:
    """Turn [Cin, Cout / groups, ...] into a flipped [Cout, Cin / groups, ...] of a convolution."""
    inputs, outputs, *kernel = weight.shape
    split = weight.reshape(groups, inputs // groups, outputs, *kernel)
    swapped = jnp.swapaxes(split, 1, 2).reshape(groups * outputs, inputs // groups, *kernel)
    return jnp.flip(swapped, range(2, weight.ndim))
