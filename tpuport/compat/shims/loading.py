"""`torch.load` and `torch.save`: storages saved on CUDA are loaded to the accelerator."""

from typing import Any

import torch

from tpuport.compat.emulated.device import is_accelerator, is_tagged, tag
from tpuport.compat.shims._inside import functions, inside
from tpuport.foundation.patching.shim import Replacement, Shim

_EAGER_LOCATION = torch.serialization.location_tag
_EAGER_RESTORE = torch.serialization.default_restore_location


def _over(storage: Any) -> torch.Tensor:
    """Return a tensor over the bytes of a storage."""
    untyped = getattr(storage, "_untyped_storage", storage)
    empty: Any = torch.empty(0, dtype=torch.uint8)
    return empty.set_(untyped)


def _location(storage: Any) -> str:
    device = getattr(storage, "device", None)
    real = device is not None and device.type == "cpu"
    return "cuda:0" if real and is_tagged(_over(storage)) else _EAGER_LOCATION(storage)


def _restore(storage: Any, location: str) -> Any:
    if not is_accelerator(location):
        return _EAGER_RESTORE(storage, location)
    tag(_over(storage))
    return storage


def _to_cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
    """Run `storage.cuda()`, as in `map_location=lambda storage, place: storage.cuda()`."""
    del non_blocking
    is_accelerator(device)
    if is_tagged(_over(self)):
        return self
    copied = self.clone()
    tag(_over(copied))
    return copied


class Loading(Shim):
    """A location `cuda` (saved so, or by `map_location`) marks the storage as on the accelerator;
    `weights_only` and everything else of `torch.load` is torch's. A storage saved from the
    accelerator says `cuda:0`, as a GPU's would.
    """

    TARGET = "torch.load"
    REASON = "torch without CUDA refuses storages that were saved on it"
    REFERENCE = "torch.load(..., map_location='cpu')"

    def replacements(self) -> list[Replacement]:
        table = {"location_tag": _location, "default_restore_location": _restore}
        untyped, typed = torch.UntypedStorage, torch.storage.TypedStorage
        return [
            *functions(torch.serialization, table),
            Replacement(untyped, "cuda", inside(untyped.cuda, _to_cuda)),
            Replacement(typed, "cuda", inside(typed.cuda, _to_cuda)),
        ]
