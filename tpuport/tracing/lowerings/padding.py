"""Padding by values of the image itself: its edges, or its mirror image."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.lowering_registry import lowering

aten = torch.ops.aten
# Gathering all of an activation, once for each dim, is slow on TPU.
_REASON = "torch's decomposition indexes with numbers, a gather for each dim"


@lowering(
    *(aten.replication_pad1d.default, aten.replication_pad2d.default),
    *(aten.replication_pad3d.default,),
    reason=_REASON,
)
def replication_pad(x: jax.Array, padding: Sequence[int]) -> jax.Array:
    """Repeat the first and last elements of x; `padding` is of the last dims, last first."""
    return _padded(x, padding, "edge")


@lowering(
    *(aten.reflection_pad1d.default, aten.reflection_pad2d.default),
    *(aten.reflection_pad3d.default,),
    reason=_REASON,
)
def reflection_pad(x: jax.Array, padding: Sequence[int]) -> jax.Array:
    """Mirror x at its first and last elements; `padding` is of the last dims, last first."""
    return _padded(x, padding, "reflect")


def _padded(x: jax.Array, padding: Sequence[int], mode: str) -> jax.Array:
    pairs = list(zip(padding[::2], padding[1::2], strict=True))[::-1]
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    whole = jnp.pad(x, [(max(low, 0), max(high, 0)) for low, high in pairs], mode=mode)
    # A negative number crops, after the other side was mirrored from the uncropped image.
    return whole[tuple(slice(max(-low, 0), min(high, 0) or None) for low, high in pairs)]
