"""`torch.accelerator`: torch's device-neutral names for the same device as `torch.cuda`."""

from typing import Any

import torch
import torch.utils.checkpoint

from tpuport.compat.emulated import accelerator
from tpuport.compat.emulated.accelerator import index_of
from tpuport.compat.shims._inside import functions
from tpuport.compat.shims.cuda_memory import MEMORY
from tpuport.foundation.patching.shim import Replacement, Shim


def _capability(device: Any = None, /) -> dict[str, Any]:
    index_of(device)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.bool)
    return {"supported_dtypes": set(dtypes)}


def _synchronize(device: Any = None, /) -> None:
    index_of(device)
    accelerator.wait()


_EAGER_MODULE = torch.get_device_module
_EAGER_OF_CHECKPOINTS = torch.utils.checkpoint._get_device_module


def _device_module(device: torch.device | str | None = None) -> Any:
    # torch has no `torch.xla`. The device is the same, and so are its random numbers.
    if device is None or torch.device(device).type == "xla":
        return torch.cuda
    return _EAGER_MODULE(device)


def _module_of_checkpoints(device: str = "cuda") -> Any:
    return torch.cuda if device == "xla" else _EAGER_OF_CHECKPOINTS(device)


class Accelerator(Shim):
    """The accelerator is `cuda`, of which there is one."""

    TARGET = "torch.accelerator"
    REASON = "torch without CUDA knows no accelerator"
    REFERENCE = "torch.accelerator with one GPU"

    def replacements(self) -> list[Replacement]:
        table = {
            "is_available": lambda: True,
            "current_accelerator": lambda check_available=False: torch.device("cuda"),
            "device_count": lambda: 1,
            "current_device_index": lambda: 0,
            "current_device_idx": lambda: 0,
            "set_device_index": lambda device, /: index_of(device) and None,
            "set_device_idx": lambda device, /: index_of(device) and None,
            "get_device_capability": _capability,
            "synchronize": _synchronize,
            "current_stream": lambda device=None, /: torch.cuda.current_stream(device),
            "set_stream": lambda stream: None,
            "get_memory_info": MEMORY["mem_get_info"],
            "empty_host_cache": lambda: None,
        }
        table |= {name: MEMORY[name] for name in _STATISTICS}
        # torch keeps the first answer, which may be that of a call before the block.
        asked = torch.utils.checkpoint.DefaultDeviceType
        return [
            *functions(torch.accelerator, table),
            Replacement(asked, "_default_device_type", None),
            *functions(torch.utils.checkpoint, {"_get_device_module": _module_of_checkpoints}),
            *functions(torch, {"get_device_module": _device_module}),
        ]


_STATISTICS = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_stats", "reset_peak_memory_stats", "reset_accumulated_memory_stats", "empty_cache"),
)
