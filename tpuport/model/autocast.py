"""What autocast is in force: torch's for the CPU, and CUDA's where `porting()` emulates it."""

import torch

CUDA_KEY = torch._C.DispatchKey.AutocastCUDA


def cuda_is_on() -> bool:
    """Whether CUDA's autocast casts in this thread (`tpuport.running.cuda_autocast`)."""
    return torch.is_autocast_enabled("cuda") and (
        torch._C._dispatch_tls_is_dispatch_key_included(CUDA_KEY)
    )


def autocast_dtype() -> torch.dtype | None:
    """The dtype that products are cast to now, or None where nothing is cast."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return torch.get_autocast_dtype("cuda") if cuda_is_on() else None


def to_autocast(value: object, dtype: torch.dtype) -> object:
    """An operand as autocast casts it: tensors of every floating dtype but float64."""
    if not isinstance(value, torch.Tensor) or value.dtype == torch.float64:
        return value
    return value.to(dtype) if value.dtype.is_floating_point else value
