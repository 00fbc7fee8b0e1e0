"""Tensors that a script spreads over devices by hand: their shardings reach the programs."""

import threading
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import backend
from tpuport.foundation.interop.device_mark import mark_of
from tpuport.tracing.core import arguments, sharding_constraints
from tpuport.tracing.core.context import current
from tpuport.tracing.core.placement import Nowhere
from tpuport.tracing.core.tensor import TracedTensor

_LOCK = threading.Lock()
# The mesh of the first sharding; programs run on its devices, in its order.
_MESH: dict[str, Mesh] = {}


def mesh() -> Mesh | None:
    """Return the mesh whose devices programs run on, None if no tensor has a sharding."""
    return _MESH.get("mesh")


def clear() -> None:
    """Forget the mesh."""
    _MESH.clear()


def spread(tensor: torch.Tensor, sharding: NamedSharding) -> None:
    """Give a tensor on the accelerator a sharding; in a program, constrain its value.

    Raises:
        UsageError: the devices of its mesh, or their order, differ from those of an earlier one.
    """
    over = sharding.mesh
    assert isinstance(over, Mesh)
    with _LOCK:
        first = _MESH.setdefault("mesh", over)
    if list(first.devices.flat) != list(over.devices.flat):
        raise UsageError(
            f"a tensor is sharded over the devices {_numbers(over)}, and an earlier one"
            f" over {_numbers(first)}: a program runs on one list of devices. What to do: make all"
            " meshes of the same devices, in the same order"
        )
    if isinstance(tensor, TracedTensor):
        trace = current()
        assert trace is not None, "a traced tensor outside of a trace"
        held = jax.lax.with_sharding_constraint(tensor._held, sharding)
        sharding_constraints.hold(trace, tensor, held)
        return
    mark = mark_of(tensor)
    assert mark is not None, "the caller has asked for a tensor on the accelerator"
    mark.sharding = (tuple(tensor.shape), sharding)


def forget(tensor: torch.Tensor) -> None:
    """Take a tensor's sharding away."""
    mark = mark_of(tensor)
    if mark is not None:
        mark.sharding = None


def sharding_of(tensor: Any) -> NamedSharding | None:
    """Return the sharding that the script gave a tensor; None if it gave it none.

    Of several views of one storage, only the one that was marked has the sharding.
    """
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, TracedTensor):
        return None
    found = getattr(mark_of(tensor), "sharding", None)
    return found[1] if found is not None and found[0] == tuple(tensor.shape) else None


def placed(tensor: torch.Tensor) -> jax.Array:
    """Return a tensor as an array, on the devices that it is spread over."""
    sharding = sharding_of(tensor)
    value = backend.to_jax(tensor)
    if sharding is None and mesh() is None:
        return value
    return jax.device_put(value, sharding or NamedSharding(_MESH["mesh"], P()))


def _numbers(of: Mesh) -> list[int]:
    return [device.id for device in of.devices.flat]


class OnDevices(Nowhere):
    """The placement of a program whose arguments and state the script has spread.

    The script marks its activations itself, so no module has a spec.
    """

    def __init__(self, over: Mesh) -> None:
        self.mesh, self._platform = over, over.devices.flat[0].platform
        self._whole = NamedSharding(over, P())
        self._given: dict[str, NamedSharding] = {}

    @property
    def platform(self) -> str:
        """Return the platform of the devices."""
        return self._platform

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the shardings of the next call's arguments."""
        leaves, _, paths = arguments.flatten_call((args, kwargs))
        found = zip(paths, map(sharding_of, leaves), strict=True)
        self._given = {path: sharding for path, sharding in found if sharding is not None}

    def arguments(self, values: list[Any], paths: list[str]) -> list[Any]:
        """Return arguments where the script has put them; jax places the others."""
        return [
            jax.device_put(value, self._given[path]) if path in self._given else value
            for value, path in zip(values, paths, strict=True)
        ]

    def constants(self, values: list[jax.Array]) -> list[jax.Array]:
        """Return large constants, replicated."""
        return [jax.device_put(value, self._whole) for value in values]

    def place(self, name: str, struct: jax.ShapeDtypeStruct) -> NamedSharding:
        """Return a replicated sharding."""
        del name, struct
        return self._whole
