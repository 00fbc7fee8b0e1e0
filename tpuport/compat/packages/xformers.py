"""xformers: attention and the small operations of `xformers.ops`, whose kernels exist for CUDA."""

from collections.abc import Sequence
from typing import Any

import torch

from tpuport.compat.packages import _xformers_masks as masks
from tpuport.compat.packages._attention import MaskRule, attend, heads_last
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
        kinds = named(*masks.KINDS)
        attention = named(memory_efficient_attention)
        attention["memory_efficient_attention_forward"] = memory_efficient_attention
        # Names of kernels, which code passes as `op=`: which one computes it makes no difference.
        names = ("FlashAttention", "Cutlass", "CutlassFwdFlashBw", "Ck")
        kernels = dict.fromkeys((f"MemoryEfficientAttention{name}Op" for name in names), None)
        rest = named(index_select_cat, scaled_index_add, swiglu, SwiGLU)
        rest |= {"unbind": torch.unbind, "AttentionMask": masks.AttentionBias}
        return {
            "xformers": {"__version__": self.version()},
            "xformers.ops": {**attention, **kinds, **kernels, **rest},
            "xformers.ops.fmha": {**attention, **kinds, **kernels},
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
    out = heads_last(out).view(*shape[:-1], value.shape[-1])
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
    if isinstance(bias, masks.LowerTriangularMaskWithTensorBias):
        shape = (*query.shape[:3], key.shape[2])
        added = bias.materialize(shape, query.dtype, query.device)
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=added, dropout_p=rule.dropout, scale=rule.scale
        )
    seen = bias.visible(query.shape[2], key.shape[2], query.device)
    return attend(query, key, value, rule, seen=seen)[0]


def index_select_cat(
    sources: Sequence[torch.Tensor], indices: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the rows of each source [S, D] at its indices, all values laid end to end."""
    rows = [source[index.long()].flatten() for source, index in zip(sources, indices, strict=True)]
    return torch.cat(rows)


def scaled_index_add(
    input: torch.Tensor,
    index: torch.Tensor,
    source: torch.Tensor,
    scaling: torch.Tensor | None = None,
    alpha: float = 1.0,
) -> torch.Tensor:
    """Add alpha * scaling * source [I, M, D] to the rows `index` of input [B, M, D], in place."""
    scaled = source if scaling is None else source * scaling
    return input.index_add_(0, index, scaled.to(input.dtype), alpha=alpha)


def swiglu(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    w3: torch.Tensor,
    b3: torch.Tensor | None,
    *,
    op: Any = None,
) -> torch.Tensor:
    """Apply a gated linear unit: w3 @ (silu(w1 @ x + b1) * (w2 @ x + b2)) + b3."""
    del op
    linear = torch.nn.functional.linear
    return linear(torch.nn.functional.silu(linear(x, w1, b1)) * linear(x, w2, b2), w3, b3)


class SwiGLU(torch.nn.Module):
    """`swiglu` with its weights: `w12` holds the first two, unless they are not packed."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        *,
        _pack_weights: bool = True,
    ) -> None:
        super().__init__()
        out_features = out_features or in_features
        hidden_features = hidden_features or in_features
        linear = torch.nn.Linear
        self.w12 = linear(in_features, 2 * hidden_features, bias=bias) if _pack_weights else None
        if not _pack_weights:
            self.w1 = linear(in_features, hidden_features, bias=bias)
            self.w2 = linear(in_features, hidden_features, bias=bias)
        self.w3 = linear(hidden_features, out_features, bias=bias)
        self.hidden_features = hidden_features
        self.out_features = out_features
        self.in_features = in_features
        self.op = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.w12 is None:
            halves = ((self.w1.weight, self.w1.bias), (self.w2.weight, self.w2.bias))
        else:
            biases = (None, None) if self.w12.bias is None else self.w12.bias.chunk(2)
            halves = tuple(zip(self.w12.weight.chunk(2), biases, strict=True))
        return swiglu(x, *halves[0], *halves[1], self.w3.weight, self.w3.bias)
