"""flex-block-attn: block-sparse attention for Hopper GPUs, which HunyuanVideo-1.5 calls."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from tpuport.compat.packages._package import Package, named
from tpuport.foundation.errors import UsageError
from tpuport.tracing.attention.block_sparse import attend_matrix, has_kernel


class FlexBlockAttention(Package):
    """`flex_block_attn.flex_block_attn_func`, by the block-sparse kernel in programs for a TPU."""

    NAME = "flex_block_attn"
    DISTRIBUTION = "flex_block_attn"
    VERSION = "0.1"
    TARGET = "flex_block_attn"
    REASON = "its kernels build for Hopper GPUs only; HunyuanVideo-1.5 calls it by name"
    REFERENCE = "scaled_dot_product_attention with the blocks written out as a mask of pairs"

    def modules(self) -> dict[str, dict[str, Any]]:
        functions = named(flex_block_attn_func)
        return {
            "flex_block_attn": {**functions, "__version__": self.version()},
            "flex_block_attn.flex_block_attn_interface": functions,
        }


def flex_block_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_block_size: Any,
    kv_block_size: Any,
    block_mask: torch.Tensor,
) -> torch.Tensor:
    """Compute attention of [B, H, L, D] queries to those blocks of [B, H, S, D] keys that are seen.

    Args:
        q: The queries.
        k: The keys.
        v: The values.
        q_block_size: Queries of a block; divides L.
        kv_block_size: Keys of a block; divides S.
        block_mask: [L / q_block_size, S / kv_block_size], or with batch and heads before, each of
            which may be 1; nonzero where a block of queries sees a block of keys.
    """
    blocks = int(q_block_size), int(kv_block_size)
    seen = _checked(q, k, block_mask, blocks)
    if has_kernel(q, k, v, blocks):
        return attend_matrix((q, k, v), seen, blocks=blocks)
    pairs = seen.repeat_interleave(blocks[0], 2).repeat_interleave(blocks[1], 3)
    return scaled_dot_product_attention(q, k, v, attn_mask=pairs)


def _checked(
    q: torch.Tensor, k: torch.Tensor, block_mask: torch.Tensor, blocks: tuple[int, int]
) -> torch.Tensor:
    """Return the mask of blocks as booleans of four dims."""
    for name, length, size in (("q", q.shape[2], blocks[0]), ("k", k.shape[2], blocks[1])):
        if size <= 0 or length % size:
            raise UsageError(
                f"flex_block_attn_func: {name} has {length} rows, which blocks of {size} do not"
                " divide. What to do: pad the sequence to whole blocks"
            )
    if block_mask.dim() not in (2, 4):
        raise UsageError(
            f"flex_block_attn_func: block_mask has {block_mask.dim()} dims; expected 2 (blocks of"
            " queries, blocks of keys) or 4 (batch and heads before)"
        )
    seen = block_mask.bool()
    seen = seen if seen.dim() == 4 else seen[None, None]
    wanted = (q.shape[2] // blocks[0], k.shape[2] // blocks[1])
    fits = seen.shape[0] in (1, q.shape[0]) and seen.shape[1] in (1, q.shape[1])
    if not fits or tuple(seen.shape[2:]) != wanted:
        raise UsageError(
            f"flex_block_attn_func: block_mask has the shape {tuple(block_mask.shape)}; expected"
            f" {wanted}, with a batch of 1 or {q.shape[0]} and heads of 1 or {q.shape[1]} before if"
            " it has 4 dims"
        )
    return seen
