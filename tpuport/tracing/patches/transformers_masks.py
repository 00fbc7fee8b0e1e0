"""transformers' masks of attention, which eager PyTorch leaves out where they hide no key."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.context import current
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.patches._count import count

# Masks that eager may leave out: whether it is a causal one, and a function that tells if it does.
_MAY_BE_LEFT_OUT: Any = WeakIdKeyDictionary()


class TransformersMasks(Shim):
    """Attention sees what it sees in eager PyTorch, where transformers may leave the mask out.

    transformers looks at the values of a padding mask. If they are all ones, it makes no mask for
    causal or bidirectional attention, and the module's `is_causal` decides. It does not look in a
    trace, and makes the mask. Where the module decides otherwise (PaliGemma asks for causal masks,
    and is not causal), the values of the padding mask decide in the program, too.
    """

    TARGET = "transformers.integrations.sdpa_attention.sdpa_attention_forward"
    REASON = "transformers makes a mask in a trace that it leaves out in eager PyTorch"
    MODULE = "transformers.masking_utils"

    def replacements(self) -> list[Replacement]:
        masks: Any = sys.modules[self.MODULE]
        models: Any = sys.modules.get("transformers.modeling_utils")
        attention: Any = sys.modules.get("transformers.integrations.sdpa_attention")
        # Not imported here: user code has no model of transformers then, and an import that fails,
        # as with a torchvision for a different torch, would fail each trace.
        if not hasattr(models, "AttentionInterface") or attention is None:
            return []
        return [
            _looked_up(masks.AttentionMaskInterface, masks.sdpa_mask, _noting),
            _looked_up(models.AttentionInterface, attention.sdpa_attention_forward, _deciding),
        ]


def _looked_up(table: Any, function: Any, made: Callable[[Any], Any]) -> Replacement:
    """Replace a function where one of transformers' tables is asked for it in a trace."""
    ours, original = made(function), table.__getitem__

    @functools.wraps(original)
    def getitem(self: Any, key: Any) -> Any:
        found = original(self, key)
        return ours if found is function and current() is not None else found

    return Replacement(table, "__getitem__", getitem)


def _noting(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def sdpa_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Any = 0,
        kv_offset: int = 0,
        *args: Any,
        attention_mask: Any = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        **kwargs: Any,
    ) -> Any:
        sizes = (q_length, kv_length, q_offset, kv_offset)
        mask = make(
            batch_size,
            *sizes,
            *args,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            **kwargs,
        )
        is_local = local_size is not None and kv_length >= local_size
        may = (allow_is_causal_skip or allow_is_bidirectional_skip) and not is_local
        if may and isinstance(mask, TracedTensor) and isinstance(attention_mask, torch.Tensor):
            tells = _causal_is_left_out if allow_is_causal_skip else _bidirectional_is_left_out
            left_out = functools.partial(tells, attention_mask, *sizes)
            _MAY_BE_LEFT_OUT[mask] = allow_is_causal_skip, left_out
        return mask

    return sdpa_mask


def _causal_is_left_out(
    padding: torch.Tensor, q_length: int, kv_length: int, q_offset: Any, kv_offset: int
) -> Any:
    """Return whether eager leaves out a causal mask: no key is hidden up to the last query."""
    keys = padding[:, kv_offset : kv_offset + kv_length]
    left_out: Any = False
    if keys.shape[1] == kv_length and q_length in (1, kv_length):
        left_out = keys.all()
    if isinstance(q_offset, torch.Tensor) or q_offset == 0:
        is_first = keys[:, :q_length].all() & ~keys[:, q_length:].any() & (q_offset == 0)
        left_out = is_first | left_out
    return left_out


def _bidirectional_is_left_out(
    padding: torch.Tensor, q_length: int, kv_length: int, q_offset: Any, kv_offset: int
) -> Any:
    """Return whether eager leaves out a bidirectional mask: no key is hidden."""
    return padding.all() if padding.shape[1] >= kv_length + kv_offset else False


def _deciding(attend: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attend)
    def sdpa_attention_forward(
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if attention_mask is not None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            attention_mask = _decided(attention_mask, causal)
        given = (attention_mask, dropout, scaling, is_causal)
        return attend(module, query, key, value, *given, *args, **kwargs)

    return sdpa_attention_forward


def _decided(mask: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return the mask that has the effect of eager's, for a module that is causal by itself."""
    noted = _MAY_BE_LEFT_OUT.get(mask)
    if noted is None or noted[0] == causal or mask.shape[-2] == 1:
        return mask
    count(TransformersMasks.TARGET)
    left_out = noted[1]()
    if not causal:
        return mask | left_out
    earlier = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return torch.where(left_out, earlier, mask) if left_out is not False else mask
