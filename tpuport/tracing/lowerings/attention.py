"""Scaled-dot-product attention as eager PyTorch computes it, fully masked rows included."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    *,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
    dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Compute softmax(q k^T * scale + mask) v over the last two dims.

    Args:
        query: [..., heads, L, E].
        key: [..., kv_heads, S, E].
        value: [..., kv_heads, S, Ev].
        mask: broadcastable to [..., heads, L, S]; bool (True attends) or added to the scores.
        is_causal: whether row i attends to columns 0..i only.
        scale: factor of the scores; None for 1/sqrt(E).
        enable_gqa: repeat key and value heads to match the query's.
        dropout: probability of dropping an attention weight.
        dropout_key: needed if `dropout` > 0.
        softcap: scores s become softcap * tanh(s / softcap), before the mask; None for s itself.

    Returns:
        [..., heads, L, Ev] in the query's dtype. A row that attends to nothing gives zeros, as in
        torch (its `_safe_softmax`). torchax computes the plain softmax of such a row, which is NaN.
    """
    dtype = query.dtype
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key = jnp.repeat(key, query.shape[-3] // key.shape[-3], axis=-3)
        value = jnp.repeat(value, query.shape[-3] // value.shape[-3], axis=-3)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(query, jnp.swapaxes(key, -1, -2), preferred_element_type=jnp.float32)
    scores = scores * factor
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    allowed = None
    if is_causal:
        length, source = query.shape[-2], key.shape[-2]
        allowed = jnp.arange(length)[:, None] >= jnp.arange(source)[None, :]
    if mask is not None and mask.dtype == jnp.bool_:
        allowed = mask if allowed is None else allowed & mask
    elif mask is not None:
        scores = scores + mask.astype(scores.dtype)
    if allowed is not None:
        scores = jnp.where(allowed, scores, -jnp.inf)
    masked = allowed is not None or mask is not None
    weights = masked_softmax(scores) if masked else jax.nn.softmax(scores, axis=-1)
    if dropout > 0.0:
        weights = _dropped(weights, dropout, dropout_key)
    return jnp.matmul(weights.astype(dtype), value).astype(dtype)


def _dropped(weights: jax.Array, dropout: float, key: jax.Array | None) -> jax.Array:
    assert key is not None
    if dropout >= 1.0:
        return jnp.zeros_like(weights)
    kept = jax.random.bernoulli(key, 1.0 - dropout, weights.shape)
    return jnp.where(kept, weights / (1.0 - dropout), 0.0)


def masked_softmax(scores: jax.Array) -> jax.Array:
    """Compute a softmax in which rows of -inf become zeros.

    NaN scores stay NaN, gradients of masked rows are zero.
    """
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    empty = peak == -jnp.inf
    shifted = jnp.exp(scores - jnp.where(empty, 0.0, peak))
    total = jnp.sum(shifted, axis=-1, keepdims=True)
    return shifted / jnp.where(empty, 1.0, total)
