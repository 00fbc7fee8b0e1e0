"""What the numbers were taken with: versions and the sort of machine, nothing that names it."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import tpuport

_PACKAGES = ("torch", "torchax", "jax", "jaxlib", "transformers", "diffusers", "numpy")


def versions() -> dict[str, str]:
    """Python and the packages that matter here."""
    found = {"python": platform.python_version(), "tpuport": tpuport.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def describe() -> dict[str, Any]:
    """Operating system, processor, cores that this process may use, and memory."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }


def use_cores(count: int) -> None:
    """Keep this process to its first `count` cores, where the system can do that.

    With one core nobody waits for another thread: on a machine that is also used for other things,
    a pool of threads is as slow as the one that comes last.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def num_cores() -> int:
    """How many cores this process may use: what both XLA and PyTorch get here."""
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
