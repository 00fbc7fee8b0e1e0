"""`torch.autocast("cuda")` casts on the emulated device as it does on CUDA."""

import functools
from typing import Any

import torch
from torch.amp.autocast_mode import autocast

from tpuport.compat.emulated.autocast import KERNELS, OPTION, low_dtype, switch
from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim


class _Registered:
    """A holder whose attribute `kernels` unregisters them when the last context deletes it."""

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self, name)
        KERNELS.release()


_REGISTERED = _Registered()
_ARGUMENTS = ("device_type", "dtype", "enabled", "cache_enabled")


class Autocast(Shim):
    """Turning CUDA's autocast on activates our casting kernels; its regions, decorators, queries
    and `custom_fwd` stay torch's own.

    float16 becomes bfloat16 (`low_dtype`), and the results of casts are then bfloat16; the option
    `autocast_float16="float16"` of `porting()` keeps float16.
    """

    TARGET = "torch.autocast"
    REASON = "torch casts only tensors that are on a GPU"
    OPTIONS = (OPTION,)
    REFERENCE = "CUDA Op-Specific Behavior in torch's documentation of torch.amp"

    def replacements(self) -> list[Replacement]:
        return [
            Replacement(torch, "set_autocast_enabled", _enabled(torch.set_autocast_enabled)),
            Replacement(autocast, "__init__", _made(autocast.__init__)),
            Replacement(_REGISTERED, "kernels", KERNELS),
        ]


def _enabled(eager: Any) -> Any:
    @functools.wraps(eager)
    def set_autocast_enabled(*args: Any, **kwargs: Any) -> None:
        eager(*args, **kwargs)
        # The old signature with one argument is about CUDA's autocast.
        device = kwargs.get("device_type", args[0] if len(args) + len(kwargs) == 2 else "cuda")
        if device == "cuda" and active() is not None:
            switch(on=torch.is_autocast_enabled("cuda"))

    return set_autocast_enabled


def _made(eager: Any) -> Any:
    @functools.wraps(eager)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if active() is None:
            return eager(self, *args, **kwargs)
        bound = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        if bound.get("device_type") in ("jax", "xla"):  # "jax" is the type of `torch.device(0)`
            bound["device_type"] = "cuda"
        eager(self, **bound)
        if self.device == "cuda":
            self.fast_dtype = low_dtype(self.fast_dtype)

    return __init__
