"""FlexAttention: its kernels exist for CUDA.

Here its score and mask functions run on broadcast indices.
"""

import functools
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex

from tpuport.foundation.patching.shim import Replacement, Shim, everywhere, original_of
from tpuport.tracing.attention.block_masks import (
    attend_block_mask,
    note_made_from,
    says_more,
    whole_mask_mod,
    with_lists_in_mask,
)
from tpuport.tracing.attention.torch_entry import flex_attention as by_kernel
from tpuport.tracing.core.context import current
from tpuport.tracing.patches._count import count


class FlexAttention(Shim):
    """`flex_attention` becomes a softmax over scores that the user's `score_mod` and `mask_mod`
    were applied to.
    """

    TARGET = "torch.nn.attention.flex_attention.flex_attention"
    REASON = "a higher-order operator without a lowering; plain torchax cannot trace it"
    MODULE = "torch.nn.attention.flex_attention"

    def copied(self) -> list[Any]:
        return [original_of(flex, name) for name in ("flex_attention", "create_block_mask")]

    def replacements(self) -> list[Replacement]:
        # In a block of `porting()` its own, whose copies in other modules know that a trace runs.
        eager = flex.flex_attention

        def flex_attention(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            score_mod: Any = None,
            block_mask: Any = None,
            scale: float | None = None,
            enable_gqa: bool = False,
            return_lse: bool = False,
            kernel_options: Any = None,
            **rest: Any,
        ) -> Any:
            if current() is None:
                return eager(
                    query,
                    key,
                    value,
                    score_mod,
                    with_lists_in_mask(block_mask),
                    scale,
                    enable_gqa,
                    return_lse,
                    kernel_options,
                    **rest,
                )
            count(self.TARGET)
            return attend_flex(
                query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse
            )

        create = flex.create_block_mask

        @functools.wraps(create)
        def create_block_mask(mask_mod: Any, *args: Any, **kwargs: Any) -> Any:
            made = create(mask_mod, *args, **kwargs)
            note_made_from(made, mask_mod)
            return made

        made = (("flex_attention", flex_attention), ("create_block_mask", create_block_mask))
        return everywhere((flex, name, lambda _, ours=ours: ours) for name, ours in made)


def attend_flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
) -> Any:
    """Attention of [B, H, L, E] queries over [B, Hkv, S, E] keys.

    Rows that attend to nothing give zeros, as the kernel does. Lists of blocks that say more than
    their `mask_mod` count, as they do where PyTorch compiles `flex_attention`.
    """
    mask_mod = None if block_mask is None else block_mask.mask_mod
    heads_fit = enable_gqa or query.shape[1] == key.shape[1]
    if heads_fit and block_mask is not None and score_mod is None:
        found = attend_block_mask(query, key, value, block_mask, scale)
        if found is not None:
            return found if return_lse else found[0]
    if says_more(block_mask):
        mask_mod = whole_mask_mod(block_mask)
    if not return_lse and heads_fit:
        served = by_kernel(query, key, value, score_mod, mask_mod, scale)
        if served is not None:
            return served
    if enable_gqa and query.shape[1] != key.shape[1]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query.float() @ key.float().transpose(-1, -2)) * factor
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    indices = [
        torch.arange(n).view([-1 if d == at else 1 for d in range(4)]) for at, n in enumerate(sizes)
    ]
    if score_mod is not None:
        scores = score_mod(scores, *indices)
    if mask_mod is not None:
        allowed = mask_mod(*indices)
        scores = torch.where(allowed, scores, torch.full((), float("-inf")))
    peak = scores.amax(-1, keepdim=True).detach()
    peak = torch.where(peak == float("-inf"), torch.zeros(()), peak)
    weights = (scores - peak).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights / torch.where(total == 0, torch.ones(()), total)).to(query.dtype) @ value
    if return_lse:
        return out, (total.log() + peak).squeeze(-1)
    return out
