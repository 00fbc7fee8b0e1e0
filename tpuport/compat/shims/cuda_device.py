"""`torch.cuda`: there is one device, and it is the accelerator of this process."""

from typing import Any

import torch

from tpuport.compat.emulated import accelerator
from tpuport.compat.emulated.accelerator import index_of
from tpuport.compat.emulated.settings import active
from tpuport.compat.shims._inside import functions
from tpuport.foundation.errors import UsageError
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.foundation.user_frames import user_line


class _Device:
    """`torch.cuda.device`: the block runs on the only device."""

    def __init__(self, device: Any) -> None:
        self.idx = index_of(device)
        self.prev_idx = 0

    def __enter__(self) -> None:
        """Do nothing: there is no other device to switch to."""

    def __exit__(self, *_: object) -> None:
        """Do nothing: there is no other device to switch back to."""


class _DeviceOf(_Device):
    """`torch.cuda.device_of`: likewise, for the device of a tensor."""

    def __init__(self, obj: Any) -> None:
        del obj
        super().__init__(None)


def _set_device(device: Any) -> None:
    index_of(device)


def _about(answer: Any) -> Any:
    """Return a function that checks its device argument and returns `answer()`."""

    def ask(device: Any = None) -> Any:
        index_of(device)
        return answer()

    return ask


def _can_access_peer(device: Any, peer_device: Any) -> bool:
    index_of(device)
    index_of(peer_device)
    return False


class CudaDeviceCalls(Shim):
    """One device a process, however many chips there are: the SPMD partitioner spreads programs
    over a mesh of them, not device indices.

    `torch.version.cuda` stays None, as with ROCm, where `torch.cuda` is a device too: a
    version would lead code to compiled CUDA extensions. `porting(cuda_version="12.4")` sets one.
    """

    TARGET = "torch.cuda"
    REASON = "torch without CUDA says that there is no device, or raises"
    REFERENCE = "torch.cuda with one GPU of compute capability 8.0; sizes and name are jax's"
    OPTIONS = ("cuda_version",)

    def replacements(self) -> list[Replacement]:
        cuda = torch.cuda
        table = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "_lazy_init": _not_emulated,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": _set_device,
            "get_device_name": _about(accelerator.name),
            "get_device_capability": _about(lambda: accelerator.CAPABILITY),
            "get_device_properties": _about(accelerator.properties),
            "can_device_access_peer": _can_access_peer,
            "is_bf16_supported": lambda including_emulation=True: True,
            # float32 products are float32 here.
            "is_tf32_supported": lambda: False,
            "synchronize": _about(accelerator.wait),
            "ipc_collect": lambda: None,
            "is_current_stream_capturing": lambda: False,
            "get_arch_list": list,
            "utilization": _about(lambda: 0),
            "_get_device_index": lambda device, optional=False, allow_cpu=False: index_of(device),
        }
        settings = active()
        version = None if settings is None else settings.options.get("cuda_version")
        named = [Replacement(torch.version, "cuda", version)] if version is not None else []
        return [
            *functions(cuda, table),
            Replacement(cuda, "device", _Device),
            Replacement(cuda, "device_of", _DeviceOf),
            *named,
        ]


def _not_emulated() -> None:
    """Refuse the real functions of torch.cuda and C++ code for GPUs, which call this first."""
    msg = (
        f"{user_line()}: this needs a GPU: it is a part of torch.cuda that tpuport does not emulate"
        " on TPU. What to do: guard the call, or remove it; torch.cuda's devices, memory, streams,"
        " events, random numbers and autocast are emulated"
    )
    raise UsageError(msg)
