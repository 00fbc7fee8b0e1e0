"""The machine and the Python environment as the checks see them."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tpuport.aot.cache.cache_folder import default_directory
from tpuport.doctor.versions import LOOKED_FOR

# Device files below /dev: libtpu opens one of these.
_TPU_FILES = ("accel*", "vfio/[0-9]*")
# Those of NVIDIA's driver, and of Windows' Linux, which passes its GPU on.
_GPU_FILES = ("nvidia[0-9]*", "dxg")


@dataclass(frozen=True)
class Answer:
    """The result of Python code in a separate process.

    Attributes:
        output: The last line on standard output.
        error: The last line of the error, empty if it succeeded.
        timed_out: Whether it was killed because it took too long.
    """

    output: str = ""
    error: str = ""
    timed_out: bool = False


Ask = Callable[[str], Answer]


@dataclass(frozen=True)
class Machine:
    """The facts about a machine that the checks use.

    Attributes:
        python: Python's version.
        versions: Installed version by package, None for packages that are not installed.
        environment: The environment variables.
        has_tpu: Whether there is the device file of a TPU.
        has_gpu: Whether there is the device file of an NVIDIA GPU.
        ask: Runs Python code in a separate process.
        timeout: The limit for `ask` in seconds.
        cache: The folder of the compile cache.
        disk: Free bytes on the disk of the cache folder.
        memory: Bytes of available memory; None where the system does not report it.
    """

    python: tuple[int, ...]
    versions: Mapping[str, str | None]
    environment: Mapping[str, str]
    has_tpu: bool
    has_gpu: bool
    ask: Ask
    timeout: float
    cache: Path
    disk: int
    memory: int | None


def this_machine(timeout: float = 60.0) -> Machine:
    """Collect the facts about the machine that this runs on."""
    cache = default_directory().expanduser().absolute()
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    return Machine(
        python=sys.version_info[:3],
        versions={name: _version(name) for name in LOOKED_FOR},
        environment=os.environ,
        has_tpu=_has_any(_TPU_FILES),
        has_gpu=_has_any(_GPU_FILES),
        ask=lambda code: ask(code, timeout),
        timeout=timeout,
        cache=cache,
        disk=shutil.disk_usage(there).free,
        memory=_free_memory(),
    )


def _has_any(patterns: tuple[str, ...], folder: Path = Path("/dev")) -> bool:
    return any(any(folder.glob(pattern)) for pattern in patterns)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def ask(code: str, timeout: float) -> Answer:
    """Run Python code in a separate process, which may fail or hang without harm."""
    command = [sys.executable, "-c", code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Answer(timed_out=True)
    lines = done.stdout.strip().splitlines()
    error = ""
    if done.returncode:
        errors = done.stderr.strip().splitlines()
        error = errors[-1] if errors else f"it ended with status {done.returncode}"
    return Answer(lines[-1] if lines else "", error)


def _free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(facts["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in facts else None
