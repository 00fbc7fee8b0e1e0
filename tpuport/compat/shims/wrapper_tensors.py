"""`torch.Tensor._make_wrapper_subclass`, by which packages make tensors that hold others."""

from typing import Any

import torch

from tpuport.compat.emulated.device import CPU, is_accelerator
from tpuport.foundation.interop.device_mark import tag
from tpuport.foundation.patching.shim import Replacement, Shim

_EAGER: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]


# Where the device stands if it has no name: after the class, sizes, strides, offset, memory format,
# dtype and layout.
_PLACE = 7


def _make(*args: Any, **kwargs: Any) -> torch.Tensor:
    device = args[_PLACE] if len(args) > _PLACE else kwargs.get("device")
    if device is None or not is_accelerator(device):
        return _EAGER(*args, **kwargs)
    if len(args) > _PLACE:
        return tag(_EAGER(*args[:_PLACE], CPU, *args[_PLACE + 1 :], **kwargs))
    return tag(_EAGER(*args, **{**kwargs, "device": CPU}))


class WrapperTensors(Shim):
    """A tensor made for the emulated device is one of the CPU with its mark."""

    TARGET = "torch.Tensor._make_wrapper_subclass"
    REASON = "no function mode sees it, and autograd without CUDA ends the process at such a tensor"
    REFERENCE = "the device of the tensors that it holds"

    def replacements(self) -> list[Replacement]:
        return [Replacement(torch.Tensor, "_make_wrapper_subclass", staticmethod(_make))]
