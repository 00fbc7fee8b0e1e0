"""`torch_xla.runtime`: the replicas, of which a process is one, and its jax devices."""

import os
import warnings
from typing import Any, TypeVar

import jax

from tpuport.compat.emulated import accelerator, replicas
from tpuport.compat.emulated.programs import PortWarning
from tpuport.compat.packages._torch_xla.state import STATE, count, set_variable
from tpuport.foundation.errors import UsageError

R = TypeVar("R")
FN = TypeVar("FN")

# From here on, each function is named and called as in torch_xla.


def device_type() -> str:
    """Return PJRT_DEVICE, or jax's platform: "TPU", "CPU"."""
    return (os.environ.get("PJRT_DEVICE") or jax.default_backend().upper()).split("_")[0]


def set_device_type(pjrt_device: str) -> None:
    """Set PJRT_DEVICE, which says what `device_type()` returns; jax chose the platform before."""
    set_variable("PJRT_DEVICE", pjrt_device)
    if device_type() != jax.default_backend().upper():
        found = jax.default_backend()
        warnings.warn(
            f"torch_xla: set_device_type({pjrt_device!r}), but jax has a {found}: programs run"
            f" there",
            PortWarning,
            stacklevel=2,
        )


def is_bf16_supported() -> bool:
    """Return True."""
    return True


def local_process_count() -> int:
    """Return the number of processes, one for each replica."""
    return replicas.size()


def process_count() -> int:
    """Return the number of processes, one for each replica."""
    return replicas.size()


def process_index() -> int:
    """Return the number of this process."""
    return replicas.rank()


def host_index() -> int:
    """Return 0."""
    return 0


def world_size() -> int:
    """Return the number of replicas: 1, or that of `tpuport run --replicas`."""
    return replicas.size()


def global_device_count() -> int:
    """Return the number of replicas, each of which has one device."""
    return replicas.size()


def local_device_count() -> int:
    """Return the number of replicas on this host: all are."""
    return replicas.size()


def addressable_device_count() -> int:
    """Return the number of devices that tensors can be on, 1."""
    return 1


def global_ordinal() -> int:
    """Return the number of this replica."""
    return replicas.rank()


def local_ordinal() -> int:
    """Return the number of this replica on its host."""
    return replicas.rank()


def global_runtime_device_count() -> int:
    """Return the number of jax's devices, for a mesh, or of replicas if several."""
    return jax.device_count() if replicas.size() == 1 else replicas.size()


def addressable_runtime_device_count() -> int:
    """Return the number of jax's devices of this process."""
    return jax.local_device_count()


def runtime_device_attributes(device: str) -> dict[str, object]:
    """Return the attributes of one of jax's devices, by its name such as "TPU:0"."""
    index = int(device.rpartition(":")[2])
    if index >= jax.device_count():
        raise UsageError(f"there is no device {device}: jax has {jax.device_count()} devices")
    return _attributes(index)


def global_runtime_device_attributes() -> list[dict[str, object]]:
    """Return the attributes of jax's devices."""
    return [_attributes(index) for index in range(jax.device_count())]


def _attributes(index: int) -> dict[str, object]:
    found = jax.devices()[index]
    names = ("coords", "core_on_chip", "num_cores", "slice_index")
    known: dict[str, Any] = {n: getattr(found, n) for n in names if hasattr(found, n)}
    return {"name": f"{found.platform.upper()}:{index}", **known}


def use_spmd(auto: bool = False) -> None:
    """Allow `mark_sharding`; `auto` leaves what is unmarked to the partitioner, as always here."""
    del auto
    if replicas.size() > 1:
        raise UsageError(
            f"use_spmd() was called in one of {replicas.size()} replicas: with it, one process has"
            " all devices. What to do: run without --replicas"
        )
    set_variable("XLA_USE_SPMD", "1")
    STATE.is_spmd = True


def is_spmd() -> bool:
    """Return whether `use_spmd()` was called."""
    return STATE.is_spmd


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keep compiled programs in a folder, by `tpuport.compile_cache`."""
    from tpuport.aot.cache.compile_cache import compile_cache

    if readonly:
        raise UsageError(
            "initialize_cache(readonly=True): tpuport's cache writes what it compiles. What to do:"
            " leave readonly out, or copy the folder first"
        )
    compile_cache(path)
    count("cache")


def get_num_cached_compilation_graph() -> int:
    """Return the number of programs that were traced in this block."""
    from tpuport.compat.packages._torch_xla.metrics import counter_value

    return counter_value("UncachedCompile") or 0


def wait_device_ops() -> None:
    """Wait until everything that was given to the device is computed."""
    accelerator.wait()


_PRECISIONS = ("default", "high", "highest")
_PRECISION = {"asked": "default"}


def set_mat_mul_precision(precision: str) -> None:
    """Remember a precision; programs multiply float32 at tpuport's own, which is at least it."""
    if precision not in _PRECISIONS:
        raise UsageError(
            f"set_mat_mul_precision: expected one of {', '.join(_PRECISIONS)}, got {precision!r}"
        )
    _PRECISION["asked"] = precision


def get_mat_mul_precision() -> str:
    """Return what `set_mat_mul_precision` was last told."""
    return _PRECISION["asked"]
