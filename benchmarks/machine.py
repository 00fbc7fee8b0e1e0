"""The software and hardware of the measurements. Nothing here identifies the machine."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import tpuport

_PACKAGES = ("torch", "torchax", "jax", "jaxlib", "transformers", "diffusers", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter here."""
    found = {"python": platform.python_version(), "tpuport": tpuport.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def describe() -> dict[str, Any]:
    """Return operating system, processor, number of usable cores, and memory."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }


def use_cores(count: int) -> None:
    """Restrict this process to its first `count` cores, where the system can do that.

    With one core no thread waits for another. On a machine with other load, a pool of threads is as
    slow as its slowest.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def num_cores() -> int:
    """Return the number of cores that this process may use, which both XLA and PyTorch get."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
