"""Memory statistics of `torch.cuda`, taken from jax's statistics of its device."""

from typing import Any

import torch

from tpuport.compat.emulated import accelerator
from tpuport.compat.emulated.accelerator import index_of
from tpuport.compat.shims._inside import functions
from tpuport.foundation.patching.shim import Replacement, Shim


class _Peak:
    """The largest amount of memory in use since the last reset.

    jax's own peak cannot be reset. If it has not risen since the reset it tells nothing, and the
    memory in use at each read is the best that is known (a lower bound).
    """

    def __init__(self) -> None:
        self.before = 0
        self.seen = 0

    def reset(self) -> None:
        """Start counting from now on."""
        found = accelerator.statistics()
        self.before = found.get("peak_bytes_in_use", 0)
        self.seen = found.get("bytes_in_use", 0)

    def read(self) -> int:
        """Return the peak in bytes."""
        found = accelerator.statistics()
        self.seen = max(self.seen, found.get("bytes_in_use", 0))
        peak = found.get("peak_bytes_in_use", 0)
        return peak if peak > self.before else self.seen


_PEAK = _Peak()


def _allocated(device: Any = None) -> int:
    index_of(device)
    return accelerator.statistics().get("bytes_in_use", 0)


def _reserved(device: Any = None) -> int:
    index_of(device)
    found = accelerator.statistics()
    return max(found.get("bytes_reserved", 0), found.get("bytes_in_use", 0))


def _peak(device: Any = None) -> int:
    index_of(device)
    return _PEAK.read()


def _reset_peak(device: Any = None) -> None:
    index_of(device)
    _PEAK.reset()


def _info(device: Any = None) -> tuple[int, int]:
    index_of(device)
    return accelerator.free_memory(), accelerator.total_memory()


def _stats(device: Any = None) -> dict[str, Any]:
    found = accelerator.statistics()
    return {
        "allocated_bytes.all.current": _allocated(device),
        "allocated_bytes.all.peak": _PEAK.read(),
        "reserved_bytes.all.current": _reserved(device),
        "reserved_bytes.all.peak": _PEAK.read(),
        "active_bytes.all.current": _allocated(device),
        "active_bytes.all.peak": _PEAK.read(),
        "num_alloc_retries": 0,
        "num_ooms": 0,
        **found,
    }


def _summary(device: Any = None, abbreviated: bool = False) -> str:
    del abbreviated
    rows = [f"{key}: {value}" for key, value in _stats(device).items()]
    return "\n".join([f"memory of {accelerator.name()}", *rows])


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: jax manages its memory itself."""
    del args, kwargs


MEMORY = {
    "memory_allocated": _allocated,
    "max_memory_allocated": _peak,
    "memory_reserved": _reserved,
    "max_memory_reserved": _peak,
    "memory_cached": _reserved,
    "max_memory_cached": _peak,
    "device_memory_used": _allocated,
    "mem_get_info": _info,
    "memory_stats": _stats,
    "memory_stats_as_nested_dict": lambda device=None: {},
    "memory_summary": _summary,
    "memory_usage": lambda device=None: 0,
    "reset_peak_memory_stats": _reset_peak,
    "reset_accumulated_memory_stats": _reset_peak,
    "reset_max_memory_allocated": _reset_peak,
    "reset_max_memory_cached": _reset_peak,
    "empty_cache": _nothing,
    "set_per_process_memory_fraction": _nothing,
    "get_per_process_memory_fraction": lambda device=None: 1.0,
    "list_gpu_processes": lambda device=None: "no processes are running",
}


class CudaMemory(Shim):
    """jax's numbers where it keeps any (on TPU), else 0 and the host's size; nothing is freed on
    demand.
    """

    TARGET = "torch.cuda.memory"
    REASON = "torch's allocator of CUDA memory does not exist here"
    REFERENCE = "jax.Device.memory_stats"

    def replacements(self) -> list[Replacement]:
        return [*functions(torch.cuda, MEMORY), *functions(torch.cuda.memory, MEMORY)]
