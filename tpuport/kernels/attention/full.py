"""Attention by the matrix of scores: short, exact, and too large for long sequences."""

from typing import Any

import jax
import jax.numpy as jnp

from tpuport.kernels.attention.mask import Mask

# Replaces a score that must not count. Finite, because -inf - -inf is NaN.
LOWEST = -1e30


def cap(scores: jax.Array, softcap: float | None) -> jax.Array:
    """Limit scores to +-softcap, smoothly. Source: Gemma 2, arxiv.org/abs/2408.00118."""
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def grouped(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """Reshape (B, Hq, ...) to (B, Hkv, Hq // Hkv, ...); one head shared by all stays one."""
    heads = (num_kv_heads, x.shape[1] // num_kv_heads) if x.shape[1] > 1 else (1, 1)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def scores_of(
    q: jax.Array,
    k: jax.Array,
    *,
    scale: float,
    softcap: float | None,
    seen: jax.Array | None,
    further: jax.Array | None,
    fill: float | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Return scores (B, Hkv, G, q, k) of grouped queries (B, Hkv, G, q, D), and which count.

    Args:
        q: grouped queries.
        k: (B, Hkv, k, D).
        scale: factor of the products.
        softcap: see `cap`.
        seen: booleans that broadcast to (B, Hq, q, k), or None.
        further: a tile of `Mask.blocks`, or None.
        fill: see `Mask.fill`.
    """
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("bhgqd,bhkd->bhgqk", q, k, preferred_element_type=accumulate)
    scores = cap(scores * scale, softcap)
    num_kv_heads = k.shape[1]
    if seen is not None:
        seen = grouped(seen, num_kv_heads)
    if further is not None:
        further = jnp.reshape(further, (1,) * (4 - further.ndim) + further.shape)
        further = grouped(further, num_kv_heads)
        if further.dtype == jnp.bool_ and fill is not None:
            scores = jnp.where(further, scores, fill)
        elif further.dtype == jnp.bool_:
            seen = further if seen is None else seen & further
        else:
            hidden = jnp.isneginf(further)
            # A bias of -inf hides a score. It is kept out of the sum, whose gradient would be NaN.
            added = jnp.where(jnp.isinf(further) if fill is not None else hidden, 0, further)
            scores = scores + added.astype(scores.dtype)
            if fill is not None:
                scores = jnp.where(jnp.isposinf(further), fill, scores)
            seen = ~hidden if seen is None else seen & ~hidden
    if seen is not None:
        scores = jnp.where(seen, scores, LOWEST)
    return scores, seen


def attend_full(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    *,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
    key: Any = None,
) -> jax.Array:
    """Compute attention as `attend` does, with the scores as one array (B, Hq, Sq, Sk)."""
    num_q, num_k = q.shape[2], k.shape[2]
    scores, seen = scores_of(
        grouped(q, k.shape[1]),
        k,
        scale=scale,
        softcap=softcap,
        seen=mask.tile(0, num_q, 0, num_k),
        further=None if mask.blocks is None else mask.blocks(0, num_q, 0, num_k),
        fill=mask.fill,
    )
    weights = jax.nn.softmax(scores, axis=-1)
    if seen is not None:
        weights = jnp.where(seen, weights, 0)
    if dropout:
        kept = jax.random.bernoulli(key, 1 - dropout, weights.shape)
        weights = jnp.where(kept, weights / (1 - dropout), 0)
    out = jnp.einsum("bhgqk,bhkd->bhgqd", weights.astype(v.dtype), v)
    return out.reshape(*q.shape[:3], v.shape[-1]).astype(q.dtype)
