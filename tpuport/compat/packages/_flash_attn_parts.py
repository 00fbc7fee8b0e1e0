"""The parts of flash-attn besides attention: padding, rotary embeddings and norms."""

from typing import Any

import torch
from torch import nn

from tpuport.foundation.errors import UsageError


def unpad(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any, torch.Tensor]:
    """Return rows, indices, cu_seqlens, the longest length and the lengths without unused rows."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    used = attention_mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    starts = nn.functional.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))
    rows = hidden_states.flatten(0, 1)[indices]
    return rows, indices, starts, lengths.max().item(), used


def index_first_axis(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows of x [T, ...] at `indices`."""
    return x[indices]


def index_put_first_axis(
    values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int
) -> torch.Tensor:
    """Return zeros [first_axis_dim, ...] with `values` at `indices`."""
    out = values.new_zeros(first_axis_dim, *values.shape[1:])
    out[indices] = values
    return out


def pad_input(
    hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int
) -> torch.Tensor:
    """Put the rows back at their places in [batch, seqlen, ...], zeros elsewhere."""
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])


def write_rows(cache: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor) -> None:
    """Write rows [B, M, ...] into a cache [B, S, ...], in place, from `starts` [B] on."""
    at = starts[:, None] + torch.arange(rows.shape[1], device=cache.device)
    batch = torch.arange(cache.shape[0], device=cache.device)[:, None]
    cache[batch, at] = rows.to(cache.dtype)


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Any = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: Any = None,
) -> torch.Tensor:
    """Rotate the first 2 * R channels of x [B, L, H, D] (or [T, H, D] with `cu_seqlens`).

    Args:
        x: The tensor to rotate.
        cos: The cosines by position, [L or more, R].
        sin: The sines, shaped as `cos`.
        interleaved: Pairs are neighbours (GPT-J) rather than halves (GPT-NeoX).
        inplace: Write the result into `x` too.
        seqlen_offsets: Position of the first row: a number, or [B].
        cu_seqlens: [N + 1], for sequences laid end to end.
        max_seqlen: Ignored.
    """
    del max_seqlen
    if cu_seqlens is not None:
        from tpuport.compat.packages._attention import Packed

        packed = Packed.of(cu_seqlens, x.shape[0])
        offsets = torch.as_tensor(seqlen_offsets, device=x.device).expand(cu_seqlens.shape[0] - 1)
        offsets = torch.cat([offsets, offsets[-1:]])[packed.sequence]
        at = (packed.position + offsets).clamp(0, cos.shape[0] - 1)
    else:
        at = torch.arange(x.shape[1], device=x.device)
        if isinstance(seqlen_offsets, torch.Tensor):
            at = at + seqlen_offsets[:, None]
        else:
            at = at + seqlen_offsets
    cos, sin = (table[at].unsqueeze(-2) for table in (cos, sin))
    out = _rotate(x, cos, sin, interleaved)
    return x.copy_(out) if inplace else out


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: Any = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """Rotate queries and keys in place, and return `qkv`.

    Args:
        qkv: [B, L, 3, H, D], or [B, L, H + 2 * G, D] with `num_heads_q`.
        cos: The cosines by position, [L or more, R].
        sin: The sines, shaped as `cos`.
        cos_k: The cosines for the keys; None for `cos`.
        sin_k: The sines for the keys; None for `sin`.
        interleaved: Pairs are neighbours (GPT-J) rather than halves (GPT-NeoX).
        seqlen_offsets: Position of the first row: a number, or [B].
        num_heads_q: H, where keys and values have other heads.
    """
    if qkv.dim() == 5:
        queries, keys = qkv[:, :, 0], qkv[:, :, 1]
    elif num_heads_q is not None:
        heads = (qkv.shape[2] - num_heads_q) // 2
        queries, keys = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads]
    else:
        raise UsageError("apply_rotary_emb_qkv_: qkv has 4 dims, so num_heads_q is expected")
    of_keys = (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    for rows, tables in ((queries, (cos, sin)), (keys, of_keys)):
        apply_rotary_emb(rows, *tables, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: Any = 0,
) -> torch.Tensor:
    """Rotate the keys of kv [B, L, 2, G, D] in place, and return `kv`."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    width = 2 * cos.shape[-1]
    if width > x.shape[-1]:
        raise UsageError(
            f"apply_rotary_emb: cos has {cos.shape[-1]} channels, at most half of x's"
            f" {x.shape[-1]} are expected"
        )
    moved, kept = x[..., :width].float(), x[..., width:]
    cos, sin = cos.float(), sin.float()
    if interleaved:
        first, second = moved[..., 0::2], moved[..., 1::2]
    else:
        first, second = moved.chunk(2, -1)
    pair = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), kept], -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Apply RMSNorm over the last dim, computed in float32, in x's dtype."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon)
    return (y * weight.float()).to(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm with a weight, like flash-attn's module (no dropout)."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dropout_p > 0:
            raise UsageError("flash_attn.ops.rms_norm.RMSNorm: dropout_p > 0 is not provided")
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """Apply LayerNorm over the last dim, computed in float32, in x's dtype."""
    bias = None if bias is None else bias.float()
    y = nn.functional.layer_norm(x.float(), weight.shape, weight.float(), bias, epsilon)
    return y.to(x.dtype)
