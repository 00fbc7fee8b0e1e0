"""`attend`: checks its arguments and hands them to the kernel that serves."""

import math
from typing import Any

import jax

from tpuport.attention.full import attend_full
from tpuport.attention.mask import Mask
from tpuport.attention.options import AttentionOptions, Shards
from tpuport.errors import UsageError


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask = Mask(),  # noqa: B008 - frozen
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    key: Any = None,
    options: AttentionOptions = AttentionOptions(),  # noqa: B008 - frozen
    shards: Shards | None = None,
) -> jax.Array:
    """softmax(scale q k^T, where the mask allows) v, by the kernel that the options name.

    Args:
        q: queries (B, Hq, Sq, D).
        k: keys (B, Hkv, Sk, D); Hkv divides Hq, and query head h uses key head h // (Hq // Hkv).
        v: values (B, Hkv, Sk, Dv).
        mask: who attends to whom. A query that may attend to nothing gives 0.
        scale: factor of the scores; 1 / sqrt(D) if None.
        softcap: scores s become softcap * tanh(s / softcap), before mask and bias.
        dropout: share of the weights that is dropped, the others scaled up.
        key: a `jax.random` key; needed for dropout.
        options: kernel, block sizes, and how a sharded sequence meets.
        shards: the mesh axes that the arrays lie over; None where nothing is sharded.

    Returns:
        (B, Hq, Sq, Dv), of q's dtype.

    Raises:
        UsageError: shapes or options that do not go together.
    """
    check_arguments(q, k, v, mask, dropout=dropout, key=key)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return attend_full(q, k, v, mask, scale=scale, softcap=softcap, dropout=dropout, key=key)


def check_arguments(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask, *, dropout: float, key: Any
) -> None:
    """Raise `UsageError` for shapes that do not go together."""
    if not q.ndim == k.ndim == v.ndim == 4:
        raise UsageError(
            "attend needs queries, keys and values of 4 dimensions (batch, heads, sequence, size),"
            f" not {q.shape}, {k.shape} and {v.shape}"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise UsageError(
            "attend needs queries (B, Hq, Sq, D), keys (B, Hkv, Sk, D) and values (B, Hkv, Sk, Dv),"
            f" not {q.shape}, {k.shape} and {v.shape}"
        )
    if q.shape[1] % k.shape[1]:
        raise UsageError(
            f"{q.shape[1]} query heads cannot share {k.shape[1]} key heads. What to do: give a"
            " number of key heads that divides that of the query heads"
        )
    if (mask.q_segments is None) != (mask.kv_segments is None):
        raise UsageError("A Mask needs q_segments and kv_segments, or neither")
    if dropout and key is None:
        raise UsageError("Dropout needs a key. What to do: pass key=jax.random.key(seed)")
