"""The active autocast: torch's for the CPU, and CUDA's where `porting()` emulates it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")
CUDA_KEY = torch._C.DispatchKey.AutocastCUDA
# Losses that CUDA's autocast computes in float32 (torch 2.13).
LOSSES = (
    *("poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss"),
    *("margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss"),
    *("triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits"),
)


def cuda_is_on() -> bool:
    """Return whether CUDA's autocast casts in this thread (`tpuport.compat.emulated.autocast`)."""
    return torch.is_autocast_enabled("cuda") and (
        torch._C._dispatch_tls_is_dispatch_key_included(CUDA_KEY)
    )


def autocast_dtype() -> torch.dtype | None:
    """Return the dtype that products are cast to now, or None if autocast is off."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return torch.get_autocast_dtype("cuda") if cuda_is_on() else None


def to_autocast(value: Any, dtype: torch.dtype) -> Any:
    """Cast an operand as autocast does: tensors of every floating dtype but float64."""
    if not isinstance(value, torch.Tensor) or value.dtype == torch.float64:
        return value
    return value.to(dtype) if value.dtype.is_floating_point else value


def autocast_state() -> tuple[tuple[bool, torch.dtype], ...]:
    """Return the autocast settings of this thread, for `autocast_as` to set again."""
    return tuple((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES)


OFF = (None, None)


@contextlib.contextmanager
def autocast_as(state: tuple[tuple[bool, torch.dtype] | None, ...]) -> Iterator[None]:
    """Set inside the block what `autocast_state()` returned; `OFF` turns autocast off."""
    before = autocast_state()
    _set(state)
    try:
        yield
    finally:
        _set(before)


def _set(state: tuple[tuple[bool, torch.dtype] | None, ...]) -> None:
    for device, one in zip(_DEVICES, state, strict=True):
        torch.set_autocast_enabled(device, one is not None and one[0])
        if one is not None:
            torch.set_autocast_dtype(device, one[1])
