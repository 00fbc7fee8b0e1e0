"""Marks on storages: a tensor whose storage carries one counts as being on the accelerator."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.backend import is_traced

CUDA = torch.device("cuda", 0)
XLA = torch.device("xla", 0)
MARK = "_tpuport_accelerator"
_SERIALS = itertools.count()
# The device that tensors on the accelerator report: "xla:0" once code has imported torch_xla.
_SHOWN = {"device": CUDA}


def shown_device() -> torch.device:
    """Return the device that user code sees on tensors that are on the accelerator."""
    return _SHOWN["device"]


def show_device(device: torch.device) -> None:
    """Set the device that user code sees on tensors that are on the accelerator."""
    _SHOWN["device"] = device


@dataclass
class Mark:
    """What is known of a storage on the accelerator.

    Attributes:
        serial: Its number.
        writes: How often it was written.
        sharding: How the script spreads a tensor of the storage over devices, or None.
        unshared: What shares this memory in eager PyTorch and not here, in words, or None.
    """

    serial: int
    writes: int = 0
    sharding: Any = None
    unshared: str | None = None


def storage_of(tensor: torch.Tensor) -> Any:
    """Return the storage of a tensor, or None for a kind of tensor that has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    except (TypeError, AttributeError):  # a class that lets no function of torch at its tensor
        with torch._C.DisableTorchFunctionSubclass():
            return torch.Tensor.untyped_storage(tensor)


def is_tagged(tensor: Any) -> bool:
    """Return whether a tensor counts as being on the accelerator."""
    if is_traced(tensor):
        return True
    return isinstance(tensor, torch.Tensor) and hasattr(storage_of(tensor), MARK)


def tag(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor, and everything that shares its storage, as being on the accelerator."""
    if not is_traced(tensor):
        storage = storage_of(tensor)
        if storage is not None and not hasattr(storage, MARK):
            setattr(storage, MARK, Mark(next(_SERIALS)))
    return tensor


def mark_of(tensor: torch.Tensor) -> Mark | None:
    """Return the mark of a tensor's storage, or None if it has none."""
    return getattr(storage_of(tensor), MARK, None)


def is_accelerator(device: Any) -> bool:
    """Return whether a device argument means the accelerator.

    Raises:
        UsageError: it names a second one.
    """
    if isinstance(device, bool) or device is None:
        return False
    if isinstance(device, int):
        index: int | None = device
    elif isinstance(device, str):
        if not device.startswith(("cuda", "xla")):
            return False
        index = torch.device(device).index
    elif isinstance(device, torch.device) and device.type in ("cuda", "jax", "xla"):
        # `torch.device(0)` is of the type that torchax has registered as the accelerator's.
        index = device.index
    else:
        return False
    if index:
        msg = (
            f"device {_name(device)}:{index} was asked for, but a process has one accelerator,"
            f" {_name(device)}:0."
            " Spread the program over chips with a mesh (tpuport.sharding), not by device index"
        )
        raise UsageError(msg)
    return True


def _name(device: Any) -> str:
    named = not isinstance(device, int) and str(device).startswith("xla")
    return "xla" if named else "cuda"
