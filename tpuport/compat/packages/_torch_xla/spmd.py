"""`torch_xla.distributed.spmd`: meshes, and shardings that become those of the programs."""

import ast
import enum
import functools
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import Mesh as JaxMesh
from jax.sharding import PartitionSpec as P

from tpuport.compat.emulated import spread
from tpuport.compat.packages._torch_xla.state import STATE, count
from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.device_mark import is_tagged
from tpuport.sharding.specs import axes_of, fitted
from tpuport.tracing.core.errors import port_error

PartitionSpec = tuple[Any, ...]

# From here on, each function and class is named and called as in torch_xla.


class Mesh:
    """A mesh of jax's devices.

    Args:
        device_ids: Numbers of devices in `jax.devices()`, in the order of the mesh.
        mesh_shape: The size of each axis.
        axis_names: The names of the axes, which specs may also call by number.

    Raises:
        UsageError: it does not fit the devices.
    """

    def __init__(
        self,
        device_ids: Any,
        mesh_shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
    ) -> None:
        self.device_ids = np.asarray(device_ids).reshape(-1)
        self.mesh_shape = tuple(int(size) for size in mesh_shape)
        self.axis_names = None if axis_names is None else tuple(axis_names)
        ids, there = self.device_ids.tolist(), jax.device_count()
        text = f"torch_xla Mesh of shape {self.mesh_shape} over the devices {ids}"
        if sorted(ids) != list(range(there)):
            raise UsageError(
                f"{text}: expected each of 0 to {there - 1} once, as jax has {there} devices. What"
                " to do: make the mesh from xr.global_runtime_device_count()"
            )
        if math.prod(self.mesh_shape) != there:
            raise UsageError(
                f"{text}: the sizes multiply to {math.prod(self.mesh_shape)}, and there are {there}"
                " devices. What to do: choose sizes whose product is"
                " xr.global_runtime_device_count()"
            )
        names = self.axis_names
        if names is not None and (len(names) != len(self.mesh_shape) or len({*names}) < len(names)):
            raise UsageError(f"{text}: expected a different name for each axis, got {names}")

    def size(self) -> int:
        """Return the number of devices."""
        return math.prod(self.mesh_shape)

    def shape(self) -> "OrderedDict[Any, int]":
        """Return the size of each axis, by its name or number."""
        keys = self.axis_names or range(len(self.mesh_shape))
        return OrderedDict(zip(keys, self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> np.ndarray:
        """Return the numbers of the devices in the mesh's shape."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """Return the number of an axis, None if there is none of that name."""
        names = self.axis_names or ()
        return names.index(name) if name in names else None

    def get_jax_mesh(self) -> JaxMesh:
        """Return jax's mesh of the same devices."""
        return self._jax

    @functools.cached_property
    def _jax(self) -> JaxMesh:
        found = jax.devices()
        devices = np.empty(len(found), dtype=object)
        devices[:] = [found[number] for number in self.device_ids]
        names = self.axis_names or tuple(map(str, range(len(self.mesh_shape))))
        kinds = (AxisType.Auto,) * len(names)
        return JaxMesh(devices.reshape(self.mesh_shape), names, axis_types=kinds)

    def named(self, axis: Any) -> str:
        """Return the name of an axis that a spec calls by name or number."""
        names = self._jax.axis_names
        if isinstance(axis, (int, np.integer)) and 0 <= axis < len(names):
            return str(names[int(axis)])
        if axis in names:
            return str(axis)
        raise UsageError(f"the spec names the axis {axis!r}; the mesh has {', '.join(names)}")

    def sharding(self, spec: PartitionSpec, shape: Sequence[int]) -> NamedSharding:
        """Return jax's sharding for a spec; an axis that does not divide its dim is left out."""
        parts = [tuple(map(self.named, axes_of(part))) or None for part in spec]
        used = [axis for part in parts for axis in part or ()]
        if len(set(used)) < len(used):
            raise UsageError(f"the spec {spec} uses an axis of the mesh twice")
        return NamedSharding(self._jax, fitted(P(*parts), shape, self._jax)[0])

    def get_op_sharding(self, partition_spec: PartitionSpec) -> Any:
        """Refuse: the sharding of an operation is one of torch_xla's compiler."""
        raise port_error(
            f"Mesh.get_op_sharding({partition_spec}) is not served by tpuport",
            remedy="call mark_sharding, or get_jax_mesh() for a sharding of jax",
        )

    def __str__(self) -> str:
        return str(
            {
                "device_ids": self.device_ids.tolist(),
                "mesh_shape": self.mesh_shape,
                "axis_names": self.axis_names,
            }
        )

    @classmethod
    def from_str(cls, mesh_str: str) -> "Mesh | None":
        """Return the mesh of a text that `str(mesh)` gave, None if it is no such text."""
        try:
            found = ast.literal_eval(mesh_str.replace("Mesh", ""))
            return cls(found["device_ids"], found["mesh_shape"], found["axis_names"])
        except (ValueError, SyntaxError, KeyError, TypeError):
            return None


class HybridMesh(Mesh):
    """A mesh of several slices: the axes of `dcn_mesh_shape` go across them."""

    def __init__(
        self,
        *,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> None:
        across = tuple(dcn_mesh_shape or (1,) * len(ici_mesh_shape))
        self.ici_mesh_shape, self.dcn_mesh_shape = tuple(ici_mesh_shape), across
        sizes = tuple(a * b for a, b in zip(ici_mesh_shape, across, strict=True))
        found = jax.devices()
        sliced = getattr(found[0], "slice_index", None) is not None
        if math.prod(across) > 1 and not sliced:
            raise UsageError(
                f"HybridMesh(dcn_mesh_shape={across}): the devices are of one slice. What to do:"
                " leave dcn_mesh_shape out"
            )
        ids = np.arange(len(found))
        if math.prod(across) > 1:
            arranged = mesh_utils.create_hybrid_device_mesh(ici_mesh_shape, across, found)
            ids = np.vectorize(found.index)(arranged)
        elif math.prod(sizes) == len(found):
            arranged = mesh_utils.create_device_mesh(sizes, found, allow_split_physical_axes=True)
            ids = np.vectorize(found.index)(arranged)
        super().__init__(ids.reshape(-1), sizes, axis_names)


class ShardingType(enum.IntEnum):
    """The kinds of shardings that torch_xla's compiler has."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


def set_global_mesh(mesh: Mesh) -> None:
    """Set the mesh that is used where none is given."""
    STATE.global_mesh = mesh


def get_global_mesh() -> Mesh | None:
    """Return the mesh that `set_global_mesh` was given."""
    return STATE.global_mesh


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """Return a mesh of all devices along one axis."""
    number = jax.device_count()
    return Mesh(range(number), (number,), None if axis_name is None else (axis_name,))


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """Spread a tensor over a mesh: where programs take it, or where it is in a program.

    Raises:
        PortError: `use_spmd()` was not called, the tensor is not on the device, or the spec does
            not fit it.
    """
    count("xs.mark_sharding")
    if not STATE.is_spmd:
        raise port_error(
            "mark_sharding was called outside of SPMD mode",
            remedy="call torch_xla.runtime.use_spmd() at the start of the program",
        )
    if not is_tagged(t):
        raise port_error(
            f"mark_sharding expects a tensor on the xla device, got one on {t.device}",
            remedy="move it first: tensor.to(torch_xla.device())",
        )
    if len(partition_spec) != t.dim():
        raise port_error(
            f"the spec {tuple(partition_spec)} has {len(partition_spec)} entries, and the tensor"
            f" has {t.dim()} dims",
            remedy="give each dim an axis of the mesh, or None",
        )
    spread.spread(t, mesh.sharding(partition_spec, t.shape))
    return t


def annotate_custom_sharding(
    t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec
) -> torch.Tensor:
    """Do as `mark_sharding` does."""
    return mark_sharding(t, mesh, partition_spec)


def mark_sharding_with_gradients(
    t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec
) -> torch.Tensor:
    """Return a tensor with the same values that is spread over a mesh, and so is its gradient."""
    return mark_sharding(t.clone(), mesh, partition_spec)


class MarkShardingFunction:
    """`mark_sharding_with_gradients`, called as a function of autograd is."""

    apply = staticmethod(mark_sharding_with_gradients)


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Take a tensor's sharding away, and return the tensor."""
    spread.forget(t)
    return t


def wrap_if_sharded(x: Any) -> Any:
    """Return it as it is: a sharding belongs to the tensor itself."""
    return x


def split_over_devices(tensor: torch.Tensor, dim: int) -> None:
    """Split a batch over all devices along a dim, if their number divides it."""
    devices = jax.local_device_count()
    if dim < tensor.dim() and tensor.shape[dim] % devices == 0:
        spec = tuple("data" if one == dim else None for one in range(tensor.dim()))
        spread.spread(tensor, get_1d_mesh("data").sharding(spec, tensor.shape))


@dataclass
class ShardingSpec:
    """The spec of tensors that a loader gives; those with another number of dims are not spread."""

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool | None = False

    def can_apply(self, t: torch.Tensor) -> bool:
        """Return whether a tensor has as many dims as the spec."""
        return t.dim() == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> None:
        """Spread a tensor.

        Raises:
            PortError: `minibatch` is set, and the devices do not divide the batch.
        """
        devices = jax.local_device_count()
        if self.minibatch and t.dim() and t.shape[0] % devices:
            raise port_error(
                f"with minibatch the {devices} devices have to divide the batch, which is"
                f" {t.shape[0]}",
                remedy="choose another batch size, or drop_last=True",
            )
        mark_sharding(t, self.mesh, self.partition_spec)

    def xla_spec(self, t: torch.Tensor) -> Any:
        """Return jax's sharding of a tensor, None if it has another number of dims."""
        if not self.can_apply(t):
            return None
        return self.mesh.sharding(self.partition_spec, t.shape)


def apply_backward_optimization_barrier(m: torch.nn.Module) -> None:
    """Do nothing: each program has one backward pass, which the compiler plans as a whole."""
    del m


def xla_patched_nn_linear_forward(m: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Compute a linear layer; products keep their dims in programs, so nothing needs a patch."""
    return torch.nn.functional.linear(input, m.weight, m.bias)


def apply_xla_patch_to_nn_linear(module: torch.nn.Module, patched: Any = None) -> torch.nn.Module:
    """Return the module as it is: see `xla_patched_nn_linear_forward`."""
    del patched
    return module


class XLAPatchedLinear:
    """A linear layer, called as a function of autograd is."""

    @staticmethod
    def apply(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the layer."""
        return torch.nn.functional.linear(input, weight, bias)


def sharding_text(tensor: torch.Tensor) -> str:
    """Return a tensor's sharding as text, empty without one (`_XLAC._get_xla_sharding_spec`)."""
    found = spread.sharding_of(tensor)
    return "" if found is None else str(found.spec)
