"""flash-attn: its kernels exist for CUDA, and its numbers are those of plain attention."""

from typing import Any

import torch

from tpuport.compat.packages import _flash_attn_operators as _operators
from tpuport.compat.packages import _flash_attn_parts as parts
from tpuport.compat.packages._attention import MaskRule, attend, attend_packed, heads_last
from tpuport.compat.packages._package import Package, named
from tpuport.foundation.errors import UsageError


class FlashAttn(Package):
    """`flash_attn` 2: attention over [B, L, H, D], dense and with `cu_seqlens`, and the parts of it
    that models import besides.
    """

    NAME = "flash_attn"
    DISTRIBUTION = "flash_attn"
    VERSION = "2.8.3"
    TARGET = "flash_attn"
    REASON = "it builds for CUDA only; models call it by name"
    REFERENCE = "softmax(scale * q @ k.T + bias) @ v; Dao-AILab/flash-attention, README, v2.8.3"

    def modules(self) -> dict[str, dict[str, Any]]:
        functions = named(
            flash_attn_func,
            flash_attn_kvpacked_func,
            flash_attn_qkvpacked_func,
            flash_attn_varlen_func,
            flash_attn_varlen_kvpacked_func,
            flash_attn_varlen_qkvpacked_func,
            flash_attn_with_kvcache,
        )
        return {
            "flash_attn": {**functions, "__version__": self.version()},
            "flash_attn.flash_attn_interface": {**functions, **operators()},
            "flash_attn.bert_padding": named(
                parts.index_first_axis, parts.index_put_first_axis, parts.pad_input, unpad_input
            ),
            "flash_attn.layers": {},
            "flash_attn.layers.rotary": {
                "apply_rotary_emb": parts.apply_rotary_emb,
                "apply_rotary_emb_func": parts.apply_rotary_emb,
                **named(parts.apply_rotary_emb_qkv_, parts.apply_rotary_emb_kv_),
            },
            "flash_attn.ops": {},
            "flash_attn.ops.rms_norm": named(parts.rms_norm, parts.RMSNorm),
            "flash_attn.ops.layer_norm": named(parts.layer_norm),
        }


def operators() -> dict[str, Any]:
    """Return the operators below the functions, by both of their names."""
    below = {"flash_attn_forward": _operators.forward, "flash_attn_backward": _operators.backward}
    return {start + name: one for name, one in below.items() for start in ("_", "_wrapped_")}


def unpad_input(
    hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    unused_mask: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """Return the rows of [B, L, ...] that `attention_mask` [B, L] keeps, and where they were.

    Returns:
        Rows, their indices, cu_seqlens, the longest length, and since 2.7 the used lengths
        (`porting(flash_attn={"version": "2.6.3"})` leaves the used lengths out).
    """
    found = parts.unpad(hidden_states, attention_mask, unused_mask)
    version = tuple(int(part) for part in FlashAttn.version().split(".")[:2])
    return found if version >= (2, 7) else found[:4]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Compute the attention of q [B, L, H, D] over k and v [B, S, G, D]: [B, L, H, D].

    With `return_attn_probs` also return the logarithm of the softmax denominators, [B, H, L] in
    float32, and an empty tensor in place of the weights, which exist for dropout only.
    """
    del deterministic
    rule = MaskRule(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
    _check_weights(return_attn_probs, dropout_p)
    out, lse = attend(*_heads_first(q, k, v), rule, with_lse=return_attn_probs)
    return _answer(heads_last(out), lse)


def flash_attn_qkvpacked_func(qkv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call `flash_attn_func` on qkv [B, L, 3, H, D]."""
    return flash_attn_func(*_parts(qkv, 2), *args, **kwargs)


def flash_attn_kvpacked_func(q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call `flash_attn_func` on q [B, L, H, D] and kv [B, S, 2, G, D]."""
    return flash_attn_func(q, *_parts(kv, 2), *args, **kwargs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Compute attention within sequences laid end to end.

    The shapes are q [T, H, D], k and v [U, G, D] and cu_seqlens [N + 1]. With `return_attn_probs`
    also return the logarithm of the softmax denominators, [H, T] in float32.
    """
    del max_seqlen_q, max_seqlen_k, deterministic
    _refuse_pages(block_table)
    rule = MaskRule(softmax_scale, causal, window_size, softcap, alibi_slopes, dropout_p)
    _check_weights(return_attn_probs, dropout_p)
    starts = (cu_seqlens_q, cu_seqlens_k)
    return _answer(*attend_packed(q, k, v, starts, rule, with_lse=return_attn_probs))


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call `flash_attn_varlen_func` on qkv [T, 3, H, D]."""
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    q, k, v = _parts(qkv, 1)
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Call `flash_attn_varlen_func` on q [T, H, D] and kv [U, 2, G, D]."""
    return flash_attn_varlen_func(q, *_parts(kv, 1), *args, **kwargs)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Compute the attention of q [B, L, H, D] over a cache [B, S, G, D].

    The first `cache_seqlens` rows count. New rows `k` and `v` [B, M, G, D] are written into the
    cache before that, in place, after those rows, and count too.
    """
    del num_splits, rotary_interleaved
    _refuse_pages(block_table)
    for name, given in {
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
    }.items():
        if given is not None:
            raise UsageError(
                f"flash_attn_with_kvcache: {name} is not provided by tpuport. What to do: apply it"
                " before the call"
            )
    rows = k_cache.shape[1]
    lengths = torch.as_tensor(rows if cache_seqlens is None else cache_seqlens)
    lengths = lengths.to(q.device, torch.int64).expand(q.shape[0])
    if k is not None and v is not None:
        if cache_seqlens is None:
            raise UsageError("flash_attn_with_kvcache: new keys need cache_seqlens, where they go")
        parts.write_rows(k_cache, k, lengths)
        parts.write_rows(v_cache, v, lengths)
        lengths = lengths + k.shape[1]
    at = torch.arange(rows, device=q.device)
    own = torch.arange(q.shape[1], device=q.device) + (lengths[:, None] - q.shape[1])
    rule = MaskRule(softmax_scale, causal, window_size, softcap, alibi_slopes)
    out, lse = attend(
        *_heads_first(q, k_cache, v_cache),
        rule,
        distance=(at - own[..., None])[:, None],
        seen=(at < lengths[:, None])[:, None, None],
        with_lse=return_softmax_lse,
    )
    out = heads_last(out)
    return (out, lse) if return_softmax_lse else out


def _refuse_pages(block_table: torch.Tensor | None) -> None:
    if block_table is not None:
        raise UsageError(
            "flash_attn: block_table (a paged cache) is not provided by tpuport. What to do: lay"
            " the keys and values out without pages"
        )


def _check_weights(wanted: bool, dropout: float) -> None:
    if wanted and dropout > 0:
        raise UsageError(
            "flash_attn: return_attn_probs with dropout_p > 0 asks for the kernel's own pattern of"
            " dropped weights, which exists on CUDA only. What to do: set one of the two to 0"
        )


def _heads_first(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _parts(packed: torch.Tensor, dim: int) -> Any:
    return packed.unbind(dim)


def _answer(out: torch.Tensor, lse: torch.Tensor | None) -> Any:
    return out if lse is None else (out, lse, out.new_empty(0))
