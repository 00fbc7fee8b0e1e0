"""`torch.set_default_device("cuda")` and the older `set_default_tensor_type`."""

from typing import Any

import torch

from tpuport.compat.emulated import device as emulation
from tpuport.compat.shims._inside import functions
from tpuport.compat.shims.cuda_tensor_types import DTYPES
from tpuport.foundation.interop.device_mark import tag
from tpuport.foundation.patching.shim import REPLACED, Replacement, Shim

_EAGER_GET = torch.get_default_device
_EAGER_TYPE = torch.set_default_tensor_type


def _set_device(device: Any) -> None:
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"
    emulation.is_accelerator(device)
    emulation.set_default(device)


def _get_device() -> torch.device:
    device = emulation.default_device()
    if device is None:
        return _EAGER_GET()
    # torch returns the device with an index.
    return emulation.shown_device() if device.type in ("cuda", "xla") else device


def _set_type(t: Any) -> None:
    name = t if isinstance(t, str) else f"{t.__module__}.{t.__name__}"
    REPLACED.remove(emulation.BY_TYPE)
    if not name.startswith("torch.cuda."):
        _EAGER_TYPE(t)
        emulation.set_default(None)
        return
    torch.set_default_dtype(DTYPES[name.rpartition(".")[2]])
    emulation.set_default("cuda", by_type=True)
    # No function mode sees the call of a class.
    REPLACED.add(emulation.BY_TYPE, [Replacement(torch.Tensor, "__new__", staticmethod(_new))])


class DefaultDevice(Shim):
    """The default device is kept by the emulation, for this thread and this context."""

    TARGET = "torch.set_default_device"
    REASON = "torch without CUDA makes no tensor there"
    REFERENCE = "device= given to each constructor"

    def replacements(self) -> list[Replacement]:
        table = {
            "set_default_device": _set_device,
            "get_default_device": _get_device,
            "set_default_tensor_type": _set_type,
        }
        return functions(torch, table)


def _new(*args: Any, **kwargs: Any) -> Any:
    """Make what `torch.Tensor(...)` makes, which follows the default type and its device.

    Dynamo compares the signature with its own, unless it is this one.
    """
    cls, *given = args
    made = torch._C.TensorBase.__new__(cls, *given, **kwargs)
    if cls is not torch.Tensor or "device" in kwargs or not emulation.default_type_is_there():
        return made
    return tag(made)
