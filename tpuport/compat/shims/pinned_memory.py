"""Pinned memory: a mark on host tensors, whose memory is the ordinary one."""

from typing import Any

import torch
from torch.utils.data import dataloader

from tpuport.compat.emulated.device import is_tagged
from tpuport.compat.emulated.settings import active
from tpuport.compat.shims._inside import inside
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.tensor import TracedTensor

_PINNED = "_tpuport_pinned"


def _is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    del device
    return not isinstance(self, TracedTensor) and hasattr(self.untyped_storage(), _PINNED)


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    del device
    if isinstance(self, TracedTensor) or _is_pinned(self):
        return self
    if is_tagged(self):
        # The message is torch's own.
        msg = f"cannot pin '{self.type()}' only dense CPU tensors can be pinned"
        raise RuntimeError(msg)
    pinned = self.clone()
    setattr(pinned.untyped_storage(), _PINNED, True)
    return pinned


class PinnedMemory(Shim):
    """`pin_memory` returns a copy that reports being pinned, as on CUDA. A `DataLoader` with
    `pin_memory=True` returns its batches unpinned, without a thread that copies them.
    """

    TARGET = "torch.Tensor.pin_memory"
    REASON = "there is no CUDA allocator of pinned memory"
    REFERENCE = "torch.Tensor.clone"

    def replacements(self) -> list[Replacement]:
        tensor, iterator = torch.Tensor, dataloader._BaseDataLoaderIter
        return [
            Replacement(tensor, "pin_memory", inside(tensor.pin_memory, _pin_memory)),
            Replacement(tensor, "is_pinned", inside(tensor.is_pinned, _is_pinned)),
            Replacement(iterator, "__init__", _unpinned(iterator.__init__)),
        ]


def _unpinned(eager: Any) -> Any:
    def __init__(self: Any, loader: Any) -> None:
        eager(self, loader)
        if active() is not None:
            self._pin_memory = False

    return __init__
