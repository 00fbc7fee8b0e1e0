"""`torch.cuda.FloatTensor` and the like: the old names of a dtype on a device."""

from typing import Any

import numpy as np
import torch

from tpuport.compat.emulated.device import is_tagged
from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim

DTYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class CudaTensorType(type):
    """The type of `torch.cuda.FloatTensor`: a class whose instances are a dtype on the device."""

    dtype: torch.dtype
    eager: Any
    is_cuda = True

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.dtype == cls.dtype
            and is_tagged(instance)
        )

    def __call__(cls, *args: Any, device: Any = None) -> Any:
        if active() is None:
            return cls.eager(*args)
        del device
        # As in torch: ints are sizes of an uninitialized tensor, anything else is its data.
        if all(isinstance(arg, (int, np.integer, torch.SymInt)) for arg in args):
            return torch.empty(args or (0,), dtype=cls.dtype, device="cuda")
        if len(args) == 1 and isinstance(args[0], torch.Size):
            return torch.empty(args[0], dtype=cls.dtype, device="cuda")
        return torch.tensor(*args, dtype=cls.dtype, device="cuda")


def tensor_type(name: str) -> CudaTensorType:
    """Return the class for one of `DTYPES`."""
    eager = getattr(torch.cuda, name)
    members = {"dtype": DTYPES[name], "eager": eager, "__module__": "torch.cuda"}
    return CudaTensorType(name, (), members)


class CudaTensorTypes(Shim):
    """Calling one makes a tensor of its dtype on the emulated device, and `isinstance` checks
    both.
    """

    TARGET = "torch.cuda.FloatTensor"
    REASON = "torch without CUDA has the names only"
    REFERENCE = "torch.tensor(..., dtype=..., device='cuda')"

    def replacements(self) -> list[Replacement]:
        return [Replacement(torch.cuda, name, tensor_type(name)) for name in DTYPES]
