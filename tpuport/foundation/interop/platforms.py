"""Which platforms jax can have on this machine."""

import glob
import importlib.metadata
import importlib.util
import os
from pathlib import Path

import jax

_GOOGLE = "0x1ae0"
_NAMED = ("TPU_WORKER_HOSTNAMES", "JAX_FORCE_TPU_INIT")


def has_tpu_device() -> bool:
    """Return whether the system lists a device that TPU chips are reached by."""
    return bool(glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*"))


def leave_out_libtpu() -> None:
    """Tell jax that there is only the CPU, where libtpu is installed and nothing else can be there.

    jax would choose the CPU anyway, but only after it has loaded libtpu and asked it for chips,
    which takes a second and prints lines about hostnames that read like errors. What the user has
    chosen, by `JAX_PLATFORMS` or in jax's configuration, stays.
    """
    chosen = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if chosen or importlib.util.find_spec("libtpu") is None or _may_be_there():
        return
    jax.config.update("jax_platforms", "cpu")


def _may_be_there() -> bool:
    """Return whether there may be a TPU, or a plugin of jax for other hardware."""
    if has_tpu_device() or any(name in os.environ for name in _NAMED):
        return True
    vendors = (Path(file) for file in glob.glob("/sys/bus/pci/devices/*/vendor"))
    if any(file.read_text(encoding="ascii").strip() == _GOOGLE for file in vendors):
        return True
    if importlib.util.find_spec("jax_plugins") is not None:
        return True
    return bool(importlib.metadata.entry_points(group="jax_plugins"))
