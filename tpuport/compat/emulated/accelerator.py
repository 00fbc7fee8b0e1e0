"""Facts about the accelerator of this process, in the form that code for CUDA asks for them."""

import os
from dataclasses import dataclass
from typing import Any

import jax
import torch

from tpuport.compat.emulated.device import is_accelerator
from tpuport.foundation.errors import UsageError

# Compute capability of an A100, the first GPU with bfloat16, which code asks it for. Not a later
# one: code would choose kernels of Hopper's (FP8, FlashAttention 3), which only a GPU runs.
CAPABILITY = (8, 0)


def jax_device() -> Any:
    """Return the device that runs the programs of this process, its first addressable one."""
    return jax.local_devices()[0]


def name() -> str:
    """Return jax's name for the kind of device, such as "TPU v6 lite" or "cpu"."""
    return jax_device().device_kind


def index_of(device: Any = None) -> int:
    """Return the index of a device argument, which is 0: a process has one accelerator.

    Raises:
        UsageError: it names another one, or no accelerator.
    """
    if device is None or (isinstance(device, int) and device == -1):
        return 0
    if isinstance(device, str):
        device = torch.device(device)
    if not isinstance(device, int) and not is_accelerator(device):
        msg = f"expected a cuda device, got {device}"
        raise UsageError(msg)
    is_accelerator(device)
    return 0


def statistics() -> dict[str, int]:
    """Return jax's memory statistics of the device in bytes, empty where it keeps none (a CPU)."""
    return dict(jax_device().memory_stats() or {})


def total_memory() -> int:
    """Return the bytes of memory of the device, or of the host if the device is a CPU."""
    limit = statistics().get("bytes_limit")
    if limit is not None:
        return limit
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_memory() -> int:
    """Return the bytes of free memory on the device, or on the host if the device is a CPU."""
    found = statistics()
    if "bytes_limit" in found:
        return found["bytes_limit"] - found.get("bytes_in_use", 0)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def wait() -> None:
    """Wait until everything that was given to the device is computed."""
    jax.effects_barrier()
    arrays = [array for array in jax.live_arrays() if not array.is_deleted()]
    jax.block_until_ready(arrays)


@dataclass(frozen=True)
class Properties:
    """The result of `torch.cuda.get_device_properties`; sizes are in bytes.

    `name`, `total_memory` and the number of processors are the device's. The rest is an A100's, as
    its capability is.
    """

    name: str
    total_memory: int
    multi_processor_count: int
    major: int = CAPABILITY[0]
    minor: int = CAPABILITY[1]
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    warp_size: int = 32
    max_threads_per_multi_processor: int = 2048
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_multiprocessor: int = 167936
    L2_cache_size: int = 41943040


def properties() -> Properties:
    """Return the properties of the device."""
    cores = getattr(jax_device(), "num_cores", None) or 1
    return Properties(name(), total_memory(), cores)
