"""The operators below flash-attn's functions: the forward with its denominators, the backward.

Code that computes attention part by part, such as ring attention, calls them with the denominators
of all parts.
"""

from typing import Any

import torch

from tpuport.compat.packages._attention import MaskRule, attend, heads_last, weights_of
from tpuport.foundation.errors import UsageError


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the attention of q [B, L, H, D] over k and v [B, S, G, D].

    Returns:
        [B, L, H, D], the logarithms of the softmax denominators [B, H, L] in float32, and two
        tensors that matter for dropout only.
    """
    del return_softmax
    rule = MaskRule(
        softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes
    )
    _refuse_dropout(dropout_p)
    query, key, value = _heads_first(q, k, v)
    out, lse = attend(query, key, value, rule, with_lse=True)
    assert lse is not None
    return heads_last(out), lse, q.new_empty(0), torch.zeros(2, dtype=torch.int64, device=q.device)


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the gradients of q, k and v into `dq`, `dk` and `dv`.

    Returns:
        The sum of each query's output times its gradient, [B, H, L] in float32.
    """
    del deterministic, rng_state
    rule = MaskRule(
        softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes
    )
    _refuse_dropout(dropout_p)
    query, key, value = (x.float() for x in _heads_first(q, k, v))
    given, result = (x.float().transpose(1, 2) for x in (dout, out))
    count = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(count, 1) for x in (key, value))
    weights, slope = weights_of(query, key, rule, softmax_lse)
    total = (given * result).sum(-1)
    change = weights * (given @ value.transpose(-1, -2) - total[..., None]) * slope
    by_head = change @ key, change.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ given
    for place, gradient in zip((dq, dk, dv), by_head, strict=True):
        if place is not None:
            groups = gradient.unflatten(1, (place.shape[2], -1)).sum(2)
            place.copy_(groups.transpose(1, 2))
    return total


def _refuse_dropout(dropout: float) -> None:
    if dropout > 0:
        raise UsageError(
            "flash_attn: an operator with dropout_p > 0 returns the state of the kernel's own"
            " random numbers, which exists on CUDA only. What to do: call flash_attn_func, or set"
            " dropout_p to 0"
        )


def _heads_first(*tensors: torch.Tensor) -> tuple[Any, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)
