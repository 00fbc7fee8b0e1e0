"""Meshes by axis name, over available devices, virtual CPU devices or a TPU described by name."""

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from tpuport.foundation.errors import UsageError
from tpuport.sharding import topology


class MeshAxis(enum.StrEnum):
    """The axes of a mesh, named by what is sharded along them."""

    DATA = "data"
    FSDP = "fsdp"
    EXPERT = "expert"
    SEQUENCE = "sequence"
    TENSOR = "tensor"


# Names of these axes in other libraries.
_OTHER_NAMES = {
    "dp": MeshAxis.DATA, "batch": MeshAxis.DATA, "replica": MeshAxis.DATA,
    "dp_shard": MeshAxis.FSDP, "zero": MeshAxis.FSDP,
    "tp": MeshAxis.TENSOR, "model": MeshAxis.TENSOR, "mp": MeshAxis.TENSOR,
    "sp": MeshAxis.SEQUENCE, "cp": MeshAxis.SEQUENCE, "context": MeshAxis.SEQUENCE,
    "ep": MeshAxis.EXPERT,
}  # fmt: skip


def make_mesh(
    axes: Mapping[str, int],
    devices: str | Sequence[Any] | None = None,
    *,
    dcn: Mapping[str, int] | None = None,
) -> Mesh:
    """Return a mesh with axes of these sizes.

    Args:
        axes: Size of each axis within a slice, outermost first; one may be -1, for all remaining
            devices. Axes of `MeshAxis` that are left out have size 1, so that any table fits.
        devices: None for `jax.devices()`; "cpu" for the CPU's (as many as
            `--xla_force_host_platform_device_count` in XLA_FLAGS makes); the name of a TPU such as
            "v6e-8", which libtpu describes without having one; or devices.
        dcn: Size of each axis across slices, which the data centre's network joins: an axis has
            `axes[name] * dcn[name]` devices in all. Devices that are not TPUs are split into equal
            slices in their order.

    Raises:
        UsageError: an axis is unknown, or the sizes are not those of the devices.
        MissingExtraError: a TPU is to be described and libtpu is not installed.
    """
    across = _sizes(dcn or {}, "dcn")
    if any(size < 1 for size in across.values()):
        raise UsageError(f"Expected sizes of dcn from 1 up, got {dict(across)}")
    within = _sizes(axes, "axes")
    num_slices = math.prod(across.values())
    found = _devices(devices, num_slices)
    if len(found) % num_slices:
        raise UsageError(
            f"dcn={dict(across)} asks for {num_slices} slices of equal size, and there are"
            f" {len(found)} devices"
        )
    within = _resolved(within, len(found) // num_slices, num_slices)
    names = list(dict.fromkeys([*within, *across, *MeshAxis]))
    inner = [within.get(name, 1) for name in names]
    outer = [across.get(name, 1) for name in names]
    arranged = _arranged(inner, outer, found, num_slices)
    return Mesh(arranged, tuple(map(str, names)), axis_types=(AxisType.Auto,) * len(names))


def sizes_of(mesh: Mesh | Mapping[str, int]) -> dict[str, int]:
    """Return the size of each axis of a mesh, by name."""
    shape = mesh.shape if isinstance(mesh, Mesh) else mesh
    return {str(name): int(size) for name, size in shape.items()}


def _sizes(given: Mapping[str, int], argument: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, size in given.items():
        if str(name) not in set(MeshAxis):
            hint = _OTHER_NAMES.get(str(name).lower())
            known = ", ".join(MeshAxis)
            advice = f"say {str(hint)!r} for it" if hint else f"the axes are {known}"
            raise UsageError(f"{argument} names an unknown mesh axis {str(name)!r}: {advice}")
        if isinstance(size, bool) or not isinstance(size, int) or (size < 1 and size != -1):
            raise UsageError(
                f"{argument}[{str(name)!r}] is {size!r}: expected a size from 1 up, or -1 for what"
                " is left"
            )
        sizes[str(name)] = size
    return sizes


def _resolved(sizes: dict[str, int], num_devices: int, num_slices: int) -> dict[str, int]:
    """Return the sizes with -1 replaced."""
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise UsageError(f"only one axis can be -1 (what is left), got {' and '.join(free)}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    where = f"{num_devices} devices" + (" a slice" if num_slices > 1 else "")
    asked = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if free and num_devices % fixed == 0:
        return {**sizes, free[0]: num_devices // fixed}
    if free:
        raise UsageError(
            f"{asked}: the sizes without {free[0]} multiply to {fixed}, which does not divide"
            f" {where}"
        )
    if fixed != num_devices:
        raise UsageError(
            f"{asked or 'no axes'}: the sizes multiply to {fixed}, and there are {where}. What to"
            " do: make one of them -1, or pass the devices to use as devices="
        )
    return sizes


def _devices(devices: str | Sequence[Any] | None, num_slices: int) -> list[Any]:
    if devices is None:
        return list(jax.devices())
    if not isinstance(devices, str):
        return list(devices)
    if devices.lower() == "cpu":
        return list(jax.devices("cpu"))
    return topology.describe(devices, num_slices)


def _arranged(inner: list[int], outer: list[int], devices: list[Any], num_slices: int) -> Any:
    """Arrange the devices in the mesh's shape, so that neighbours in it are close in the slice."""
    if num_slices == 1:
        return mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=True)
    if getattr(devices[0], "slice_index", None) is not None and devices[0].platform == "tpu":
        return mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, allow_split_physical_axes=True
        )
    grouped = np.empty(len(devices), dtype=object)
    grouped[:] = devices
    rank = len(inner)
    pairs = [axis for i in range(rank) for axis in (i, rank + i)]
    shape = [a * b for a, b in zip(outer, inner, strict=True)]
    return grouped.reshape(*outer, *inner).transpose(pairs).reshape(shape)
