"""Distances between rows."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.tracing.core.lowering_registry import SAME, lowering
from tpuport.tracing.lowerings.reductions import vector_norm

aten = torch.ops.aten


def _between(a: jax.Array, b: jax.Array, p: float) -> jax.Array:
    """Return p-norms of a - b over the last dim; the gradient between equal rows is zero."""
    return vector_norm(a - b, p, (-1,))


@lowering(aten.dist.default, reason="torchax's gradient between equal tensors is nan")
def _dist(a: jax.Array, b: jax.Array, p: float = 2) -> jax.Array:
    return vector_norm(a - b, p)


@lowering(
    aten._cdist_forward.default,
    reason="torchax's gradient between equal rows is nan; torch's is zero",
)
def _cdist(
    a: jax.Array, b: jax.Array, p: float = 2.0, compute_mode: int | None = None
) -> jax.Array:
    """Return distances [..., P, R] of rows of `a` [..., P, M] to rows of `b` [..., R, M]."""
    if a.shape[-1] == 0:
        lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return jnp.zeros((*lead, a.shape[-2], b.shape[-2]), a.dtype)
    if p == 2 and compute_mode != 2 and (compute_mode == 1 or max(a.shape[-2], b.shape[-2]) > 25):
        return _euclidean(a, b)
    return _between(a[..., :, None, :], b[..., None, :, :], p)


@lowering(aten._euclidean_dist.default, reason=SAME)
def _euclidean(a: jax.Array, b: jax.Array) -> jax.Array:
    """Compute distances by a matrix product, as torch does for many rows.

    The distance between equal rows is zero only up to rounding.
    """
    squares = jnp.sum(a * a, -1)[..., :, None] + jnp.sum(b * b, -1)[..., None, :]
    square = squares - 2 * jnp.matmul(a, jnp.swapaxes(b, -1, -2))
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1)), 0)


@lowering(aten._pdist_forward.default, reason="as cdist")
def _pdist(x: jax.Array, p: float = 2.0) -> jax.Array:
    """Return distances of all pairs of rows of `x` [n, m] in order."""
    first, second = np.triu_indices(x.shape[0], 1)
    if not len(first) or x.shape[1] == 0:
        return jnp.zeros(math.comb(x.shape[0], 2), x.dtype)
    return _between(x[first], x[second], p)
