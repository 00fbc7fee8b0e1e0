"""FlexAttention in eager PyTorch on a CPU, which has no backward of it."""

import functools
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim, everywhere, original_of
from tpuport.tracing.attention.block_masks import says_more, with_lists_in_mask
from tpuport.tracing.core.context import current
from tpuport.tracing.patches._count import count
from tpuport.tracing.patches.flex_attention import FlexAttention, attend_flex


class EagerFlexAttention(Shim):
    """`flex_attention` in eager PyTorch where its CPU version raises: with gradients, and under
    the modes that a port is verified with.
    """

    TARGET = "torch.nn.attention.flex_attention.flex_attention (eager)"
    REASON = "PyTorch has no backward of it for the CPU, and its operator refuses dispatch modes"
    REFERENCE = "the forward pass of PyTorch's own flex_attention, and its derivative"
    MODULE = "torch.nn.attention.flex_attention"

    def copied(self) -> list[Any]:
        return [original_of(flex, "flex_attention")]

    def replacements(self) -> list[Replacement]:
        eager = flex.flex_attention

        @functools.wraps(eager)
        def flex_attention(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(_NAMES, args, strict=False)) | kwargs
            trained = torch.is_grad_enabled() and any(
                given[name].requires_grad for name in _NAMES[:3]
            )
            watched = trained or _get_current_dispatch_mode() is not None
            # A trace gets here by copies of the function in other modules.
            is_traced = current() is not None
            if not is_traced and not (watched and active() is not None):
                given_mask = given.get("block_mask")
                if not says_more(given_mask):
                    return eager(*args, **kwargs)
                return eager(**given | {"block_mask": with_lists_in_mask(given_mask)})
            count(FlexAttention.TARGET if is_traced else self.TARGET)
            optional = {"score_mod": None, "block_mask": None, "scale": None}
            optional |= {"enable_gqa": False, "return_lse": False}
            return attend_flex(**{name: given.get(name, optional.get(name)) for name in _NAMES})

        return everywhere([(flex, "flex_attention", lambda _: flex_attention)])


_NAMES = ("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse")
