"""Marks on storages: a tensor whose storage carries one counts as being on the accelerator."""

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.backend import is_traced

CUDA = torch.device("cuda", 0)
MARK = "_tpuport_accelerator"
_SERIALS = itertools.count()


@dataclass
class Mark:
    """The serial number of a storage on the accelerator, and how often it was written."""

    serial: int
    writes: int = 0


def storage_of(tensor: torch.Tensor) -> Any:
    """Return the storage of a tensor, or None for a kind of tensor that has none."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


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
        if not device.startswith("cuda"):
            return False
        index = torch.device(device).index
    elif isinstance(device, torch.device) and device.type in ("cuda", "jax"):
        # `torch.device(0)` is of the type that torchax has registered as the accelerator's.
        index = device.index
    else:
        return False
    if index:
        msg = (
            f"device cuda:{index} was asked for, but a process has one accelerator, cuda:0."
            " Spread the program over chips with a mesh (tpuport.sharding), not by device index"
        )
        raise UsageError(msg)
    return True
