"""SageAttention: attention with quantized operands on CUDA, which here is attention itself."""

from typing import Any

import torch

from tpuport.compat.packages._attention import MaskRule, attend, attend_packed, heads_last
from tpuport.compat.packages._package import Package, named
from tpuport.foundation.errors import UsageError


class SageAttention(Package):
    """`sageattention.sageattn` and its forms; the 8-bit rounding of the kernels is left out."""

    NAME = "sageattention"
    DISTRIBUTION = "sageattention"
    VERSION = "2.2.0"
    TARGET = "sageattention"
    REASON = "its kernels build for CUDA only; models call it by name"
    REFERENCE = "softmax(q @ k.T * sm_scale) @ v, which the kernels approximate in 8 bits"

    def modules(self) -> dict[str, dict[str, Any]]:
        kernels = (
            "sageattn_qk_int8_pv_fp16_cuda",
            "sageattn_qk_int8_pv_fp16_triton",
            "sageattn_qk_int8_pv_fp8_cuda",
            "sageattn_qk_int8_pv_fp8_cuda_sm90",
        )
        functions = {**named(sageattn, sageattn_varlen), **dict.fromkeys(kernels, sageattn)}
        return {
            "sageattention": {**functions, "__version__": self.version()},
            "sageattention.core": functions,
        }


def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    **kwargs: Any,
) -> Any:
    """Compute attention of [B, H, L, D] ("HND") or [B, L, H, D] ("NHD") tensors, in that layout.

    `attn_mask` (a tensor as `scaled_dot_product_attention` takes) and `dropout_p` count, as some
    callers pass them; other keywords choose between kernels.
    """
    if tensor_layout not in ("HND", "NHD"):
        raise UsageError(f'sageattn: tensor_layout {tensor_layout!r}, expected "HND" or "NHD"')
    if tensor_layout == "NHD":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = kwargs.get("attn_mask")
    if mask is not None and mask.dtype is not torch.bool:
        raise UsageError("sageattn: an attn_mask of numbers is not provided; pass a boolean one")
    _check_causal(is_causal, q.shape[2], k.shape[2])
    rule = MaskRule(sm_scale, is_causal, dropout=float(kwargs.get("dropout_p") or 0.0))
    out, lse = attend(q, k, v, rule, seen=mask, with_lse=return_lse)
    if tensor_layout == "NHD":
        out = heads_last(out)
    return (out, lse) if return_lse else out


def sageattn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    """Compute attention within sequences laid end to end: q [T, H, D], k and v [U, G, D]."""
    del max_seqlen_q, max_seqlen_k, smooth_k, kwargs
    if is_causal and cu_seqlens_q is not cu_seqlens_k:
        _check_causal(is_causal, q.shape[0], k.shape[0])
    rule = MaskRule(sm_scale, is_causal)
    return attend_packed(q, k, v, (cu_seqlens_q, cu_seqlens_k), rule)[0]


def _check_causal(is_causal: bool, queries: Any, keys: Any) -> None:
    if is_causal and queries != keys:
        raise UsageError(
            f"sageattn: is_causal with {queries} queries and {keys} keys; the kernels define it for"
            " equal lengths only. What to do: pass an attn_mask"
        )
