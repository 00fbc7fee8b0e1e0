"""Transformations of torch inside a trace: torch.func, and forward mode."""

import torch
from torch._C._functorch import (
    is_functorch_wrapped_tensor,
    is_legacy_batchedtensor,
    peek_interpreter_stack,
)
from torch.autograd import forward_ad

from tpuport.tracing.core.errors import port_error


def transforming() -> bool:
    """Return whether code runs whose tensors may have tangents, or stand for others."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a tangent, which our own operations would drop, or is a stand-in
    of torch.func or of a batch.
    """
    if is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor):
        return True
    if forward_ad._current_level < 0:
        return False
    with torch._C.DisableTorchFunction():
        return forward_ad.unpack_dual(tensor).tangent is not None


def refuse_loop() -> None:
    """Refuse a loop on traced values that torch transforms.

    Raises:
        PortError: torch.func or forward mode is at work.
    """
    if transforming():
        raise port_error(
            "a loop that depends on traced values runs inside torch.func or forward mode, which do"
            " not see its operations",
            code="TPU101",
            remedy="give the loop a fixed number of rounds, or take the derivative by"
            " torch.autograd.grad",
        )
