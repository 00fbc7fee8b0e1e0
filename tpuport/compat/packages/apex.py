"""apex: its fused norms, which are the plain ones in one kernel."""

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from tpuport.compat.packages._package import Package, named
from tpuport.foundation.errors import UsageError

Sizes = int | Sequence[int]


class Apex(Package):
    """`apex.normalization`: LayerNorm and RMSNorm, computed in float32."""

    NAME = "apex"
    DISTRIBUTION = "apex"
    VERSION = "0.1"
    TARGET = "apex"
    REASON = "it builds for CUDA only; models import its norms by name"
    REFERENCE = "LayerNorm and RMSNorm in float32; NVIDIA/apex, apex/normalization"

    def modules(self) -> dict[str, dict[str, Any]]:
        norms = named(FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm)
        functions = named(
            fused_layer_norm,
            fused_layer_norm_affine,
            fused_rms_norm,
            fused_rms_norm_affine,
            mixed_dtype_fused_layer_norm_affine,
            mixed_dtype_fused_rms_norm_affine,
        )
        refused = {name: _refusing(f"apex.amp.{name}") for name in ("initialize", "scale_loss")}
        return {
            "apex": {"__version__": self.version()},
            "apex.normalization": norms,
            "apex.normalization.fused_layer_norm": {**norms, **functions},
            "apex.amp": refused,
        }


def _refusing(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise UsageError(
            f"{name} changes the dtype of operations on CUDA and is not provided by tpuport. What"
            " to do: turn apex.amp off in the program's options, and use torch.autocast or bfloat16"
            " weights"
        )

    refuse.__name__ = name.rpartition(".")[2]
    return refuse


def _dims(sizes: Sizes) -> tuple[int, ...]:
    return (sizes,) if isinstance(sizes, int) else tuple(sizes)


def _wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()


def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    normalized_shape: Sizes,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Apply LayerNorm over the last dims, computed in float32, in the input's dtype."""
    del memory_efficient
    shape = _dims(normalized_shape)
    out = nn.functional.layer_norm(input.float(), shape, _wide(weight), _wide(bias), eps)
    return out.to(input.dtype)


def fused_layer_norm(
    input: torch.Tensor, normalized_shape: Sizes, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Apply LayerNorm without weight and bias."""
    return fused_layer_norm_affine(input, None, None, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: Sizes,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Apply LayerNorm over the last dims, computed in float32, in the weight's dtype."""
    del memory_efficient
    shape = _dims(normalized_shape)
    out = nn.functional.layer_norm(input.float(), shape, weight.float(), bias.float(), eps)
    return out.to(weight.dtype)


def _rms_norm(
    input: torch.Tensor, weight: torch.Tensor | None, normalized_shape: Sizes, eps: float
) -> torch.Tensor:
    wide = input.float()
    dims = tuple(range(-len(_dims(normalized_shape)), 0))
    out = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    return out if weight is None else out * weight.float()


def fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    normalized_shape: Sizes,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Apply RMSNorm over the last dims, computed in float32, in the input's dtype."""
    del memory_efficient
    return _rms_norm(input, weight, normalized_shape, eps).to(input.dtype)


def fused_rms_norm(
    input: torch.Tensor, normalized_shape: Sizes, eps: float = 1e-6, memory_efficient: bool = False
) -> torch.Tensor:
    """Apply RMSNorm without a weight."""
    return fused_rms_norm_affine(input, None, normalized_shape, eps, memory_efficient)


def mixed_dtype_fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: Sizes,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    """Apply RMSNorm over the last dims, computed in float32, in the weight's dtype."""
    del memory_efficient
    return _rms_norm(input, weight, normalized_shape, eps).to(weight.dtype)


class FusedLayerNorm(nn.LayerNorm):
    """LayerNorm, computed in float32."""

    def __init__(
        self,
        normalized_shape: Sizes,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(list(_dims(normalized_shape)), eps, elementwise_affine)
        self.memory_efficient = memory_efficient

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps
        )


class FusedRMSNorm(nn.Module):
    """RMSNorm, computed in float32."""

    def __init__(
        self,
        normalized_shape: Sizes,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = torch.Size(_dims(normalized_shape))
        self.eps, self.elementwise_affine = eps, elementwise_affine
        self.memory_efficient = memory_efficient
        if elementwise_affine:
            self.weight = nn.Parameter(torch.ones(*self.normalized_shape))
        else:
            self.register_parameter("weight", None)

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            nn.init.ones_(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.normalized_shape)}, eps={self.eps}"


class MixedFusedLayerNorm(FusedLayerNorm):
    """LayerNorm whose result has the weight's dtype, always with weight and bias."""

    def __init__(self, normalized_shape: Sizes, eps: float = 1e-5, **kwargs: Any) -> None:
        _check_affine(kwargs)
        super().__init__(normalized_shape, eps, **kwargs)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMSNorm whose result has the weight's dtype, always with a weight."""

    def __init__(self, normalized_shape: Sizes, eps: float = 1e-5, **kwargs: Any) -> None:
        _check_affine(kwargs)
        super().__init__(normalized_shape, eps, **kwargs)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return mixed_dtype_fused_rms_norm_affine(
            input, self.weight, self.normalized_shape, self.eps
        )


def _check_affine(kwargs: dict[str, Any]) -> None:
    if not kwargs.pop("elementwise_affine", True):
        raise UsageError(
            "apex: a mixed-dtype norm takes its dtype from the weight, so it needs one"
        )
