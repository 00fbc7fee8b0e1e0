"""xformers: `memory_efficient_attention`, whose kernels exist for CUDA."""

from typing import Any

import torch

from tpuport.compat.packages import _xformers_masks as masks
from tpuport.compat.packages._attention import MaskRule, Packed, attend
from tpuport.compat.packages._package import Package, named
from tpuport.foundation.errors import UsageError


class Xformers(Package):
    """`xformers.ops`: memory-efficient attention over [B, M, H, K] with its kinds of mask."""

    NAME = "xformers"
    DISTRIBUTION = "xformers"
    VERSION = "0.0.33"
    TARGET = "xformers"
    REASON = "its kernels build for CUDA only; models call it by name"
    REFERENCE = "softmax(q @ k.T * scale + bias) @ v; xformers.ops.memory_efficient_attention, docs"

    def modules(self) -> dict[str, dict[str, Any]]:
        kinds = named(
            masks.AttentionBias,
            masks.LowerTriangularMask,
            masks.LowerTriangularFromBottomRightMask,
            masks.BlockDiagonalMask,
            masks.BlockDiagonalCausalMask,
            masks.BlockDiagonalCausalFromBottomRightMask,
        )
        attention = named(memory_efficient_attention)
        # Names of kernels, which code passes as `op=`: which one computes it makes no difference.
        kernels = dict.fromkeys(("MemoryEfficientAttentionFlashAttentionOp",), None)
        kernels |= dict.fromkeys(("MemoryEfficientAttentionCutlassOp",), None)
        return {
            "xformers": {"__version__": self.version()},
            "xformers.ops": {**attention, **kinds, **kernels},
            "xformers.ops.fmha": {**attention, **kinds},
            "xformers.ops.fmha.attn_bias": kinds,
        }


def memory_efficient_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute the attention of query [B, M, H, K] over key and value [B, N, H, K]: [B, M, H, K].

    Without a dim of heads ([B, M, K]) there is one head. With a dim of groups ([B, M, G, H, K])
    each group attends alone, and its heads may share keys by `expand`.

    Args:
        query: The queries.
        key: The keys.
        value: The values.
        attn_bias: None, a tensor added to the scores (broadcastable to [B, H, M, N]), or a mask of
            `xformers.ops`.
        p: Probability that a weight is dropped.
        scale: Factor of the scores; None for 1/sqrt(K).
        op: The kernel to use; ignored.
        output_dtype: Dtype of the result; None for the query's.
    """
    del op
    shape = query.shape
    query, key, value, attn_bias = _with_heads(query, key, value, attn_bias)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if attn_bias is None or isinstance(attn_bias, torch.Tensor):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=_cast(attn_bias, query), dropout_p=p, scale=scale
        )
    elif isinstance(attn_bias, masks.AttentionBias):
        out = _masked(q, k, v, attn_bias, MaskRule(scale, dropout=p))
    else:
        raise UsageError(
            f"memory_efficient_attention: attn_bias of type {type(attn_bias).__name__} is not"
            " provided by tpuport. What to do: pass a tensor that is added to the scores"
        )
    out = out.transpose(1, 2).reshape(*shape[:-1], value.shape[-1])
    return out if output_dtype is None else out.to(output_dtype)


def _with_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Return the operands as [B, M, H, K], whichever of the three forms they have."""
    if query.dim() == 3:
        query, key, value = (x.unsqueeze(2) for x in (query, key, value))
        if isinstance(attn_bias, torch.Tensor) and attn_bias.dim() == 3:
            attn_bias = attn_bias.unsqueeze(1)
    elif query.dim() == 5:
        query, key, value = (x.flatten(2, 3) for x in (query, key, value))
        if isinstance(attn_bias, torch.Tensor):
            attn_bias = attn_bias.flatten(1, 2) if attn_bias.dim() == 5 else attn_bias
    elif query.dim() != 4:
        raise UsageError(
            f"memory_efficient_attention: a query of {query.dim()} dims, expected [B, M, H, K] (or"
            " 3 dims without heads, or 5 with groups)"
        )
    return query, key, value, attn_bias


def _cast(bias: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    return bias if bias is None or bias.dtype == torch.bool else bias.to(query.dtype)


def _masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: "masks.AttentionBias",
    rule: MaskRule,
) -> torch.Tensor:
    rows = torch.arange(query.shape[2], device=query.device)
    columns = torch.arange(key.shape[2], device=query.device)
    seen = None
    shift: Any = key.shape[2] - query.shape[2]
    if isinstance(bias, masks.BlockDiagonalMask):
        q = Packed.of(bias.q_starts.to(query.device), query.shape[2])
        k = Packed.of(bias.k_starts.to(query.device), key.shape[2])
        rows, columns = q.position, k.position
        seen = q.sequence[:, None] == k.sequence
        shift = (k.lengths - q.lengths)[q.sequence][:, None]
    if bias.causal is not None:
        own = rows[:, None] + (shift if bias.causal == "bottom right" else 0)
        below = columns <= own
        seen = below if seen is None else seen & below
    return attend(query, key, value, rule, seen=seen)[0]
