"""FlexAttention: its kernels exist for CUDA.

Here its score and mask functions run on broadcast indices.
"""

import functools
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tpuport.model.attention_tensors import flex_attention as by_kernel
from tpuport.model.trace import current
from tpuport.running.settings import active
from tpuport.shims._shim import Replacement, Scope, Shim, copies


class FlexAttention(Shim):
    """`flex_attention` becomes a softmax over scores that the user's `score_mod` and `mask_mod`
    were applied to.
    """

    TARGET = "torch.nn.attention.flex_attention.flex_attention"
    REASON = "a higher-order operator without a lowering; plain torchax cannot trace it"
    MODULE = "torch.nn.attention.flex_attention"

    def replacements(self) -> list[Replacement]:
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
                    block_mask,
                    scale,
                    enable_gqa,
                    return_lse,
                    kernel_options,
                    **rest,
                )
            self.count(self.TARGET)
            return _attend(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse)

        return [
            Replacement(flex, "flex_attention", flex_attention),
            *copies(eager, flex_attention, flex),
        ]


class EagerFlexAttention(Shim):
    """`flex_attention` in eager PyTorch where its CPU version raises: with gradients, and under
    the modes that a port is verified with.
    """

    TARGET = "torch.nn.attention.flex_attention.flex_attention (eager)"
    REASON = "PyTorch has no backward of it for the CPU, and its operator refuses dispatch modes"
    REFERENCE = "the forward pass of PyTorch's own flex_attention, and its derivative"
    MODULE = "torch.nn.attention.flex_attention"
    SCOPE = Scope.PORTING

    def replacements(self) -> list[Replacement]:
        eager = flex.flex_attention

        @functools.wraps(eager)
        def flex_attention(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(_NAMES, args, strict=False)) | kwargs
            trained = torch.is_grad_enabled() and any(
                given[name].requires_grad for name in _NAMES[:3]
            )
            watched = trained or _get_current_dispatch_mode() is not None
            # A trace gets here if user code kept this function where the other shim cannot look.
            if current() is None and not (watched and active() is not None):
                return eager(*args, **kwargs)
            self.count(self.TARGET)
            optional = {"score_mod": None, "block_mask": None, "scale": None}
            optional |= {"enable_gqa": False, "return_lse": False}
            return _attend(**{name: given.get(name, optional.get(name)) for name in _NAMES})

        return [
            Replacement(flex, "flex_attention", flex_attention),
            *copies(eager, flex_attention, flex),
        ]


_NAMES = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
) -> Any:
    """Compute the attention of [B, H, L, E] queries over [B, Hkv, S, E] keys.

    Rows that attend to nothing are zeros, as in the kernel.
    """
    mask_mod = None if block_mask is None else block_mask.mask_mod
    if not return_lse and (enable_gqa or query.shape[1] == key.shape[1]):
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
