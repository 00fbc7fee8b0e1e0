"""flash-attn 3: its kernels exist for Hopper, and its numbers are those of plain attention."""

import dis
import itertools
import sys
from types import FrameType
from typing import Any

import torch

from tpuport.compat.packages._attention import MaskRule, attend, attend_packed, heads_last
from tpuport.compat.packages._package import Package
from tpuport.foundation.errors import UsageError


class FlashAttnInterface(Package):
    """`flash_attn_interface`, the module of flash-attn 3: no dropout, and the values may have other
    channels than the keys.

    Its functions returned `(out, softmax_lse)` at first (hopper/ of flash-attn 2.7.4) and `out`
    since (2.8), under the same version. So it is the call that decides: one whose result is
    unpacked or taken `[0]` of on the spot was written for the pair.
    `porting(flash_attn_interface={"returns_lse": True})` says it for all calls.
    """

    NAME = "flash_attn_interface"
    DISTRIBUTION = "flash_attn_3"
    VERSION = "3.0.0"
    TARGET = "flash_attn_interface"
    REASON = "it builds for Hopper only; models call it by name"
    REFERENCE = "softmax(scale * q @ k.T) @ v; Dao-AILab/flash-attention, hopper/"

    def modules(self) -> dict[str, dict[str, Any]]:
        return {
            "flash_attn_interface": {
                "flash_attn_func": flash_attn_3_func,
                "flash_attn_varlen_func": flash_attn_3_varlen_func,
            }
        }


def flash_attn_3_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_attn_probs: bool = False,
    **rest: Any,
) -> Any:
    """Compute the attention of q [B, L, H, D] over k [B, S, G, D] and v [B, S, G, Dv].

    The result is [B, L, H, Dv], with the logarithm of the softmax denominators if asked for.
    """
    _refuse_rest(rest)
    rule = MaskRule(softmax_scale, causal, window_size, softcap)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out = heads_last(attend(q, k, v, rule)[0])
    if return_attn_probs or _wants_pair(sys._getframe(1)):
        return out, attend(q, k, v, rule, with_lse=True)[1]
    return out


def flash_attn_3_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_attn_probs: bool = False,
    **rest: Any,
) -> Any:
    """Compute attention in sequences laid end to end: q [T, H, D], k [U, G, D], v [U, G, Dv]."""
    del max_seqlen_q, max_seqlen_k
    _refuse_rest({"seqused_q": seqused_q, **rest})
    rule = MaskRule(softmax_scale, causal, window_size, softcap)
    starts = (cu_seqlens_q, cu_seqlens_k)
    out = attend_packed(q, k, v, starts, rule, used=seqused_k)[0]
    if return_attn_probs or _wants_pair(sys._getframe(1)):
        # On its own, so that a program which drops it keeps the fast path of `out`.
        return out, attend_packed(q, k, v, starts, rule, with_lse=True, used=seqused_k)[1]
    return out


def _wants_pair(caller: FrameType) -> bool:
    """Return whether the running call of a frame was written for `(out, softmax_lse)`."""
    said = FlashAttnInterface.options().get("returns_lse")
    if said is not None:
        return bool(said)
    following = (i for i in dis.get_instructions(caller.f_code) if i.offset > caller.f_lasti)
    first, second = itertools.islice(following, 2)
    if first.opname in ("UNPACK_SEQUENCE", "UNPACK_EX"):
        return True
    subscript = second.opname == "BINARY_SUBSCR" or second.argrepr == "[]"
    return subscript and first.opname.startswith("LOAD") and first.argval == 0


# Arguments of flash-attn 3 that choose a way to compute, or whose usual value changes nothing.
_CHANGES_NOTHING = {"deterministic", "num_splits", "pack_gqa", "sm_margin"}
_USUAL = {"attention_chunk": 0}


def _refuse_rest(rest: dict[str, Any]) -> None:
    for name, value in rest.items():
        if name in _CHANGES_NOTHING or value is None or _USUAL.get(name) == value:
            continue
        raise UsageError(
            f"flash_attn_interface: {name} is not provided by tpuport. What to do: leave it out, or"
            " compute attention without flash-attn"
        )
