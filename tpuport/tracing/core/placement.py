"""Where a program's values are put on a mesh: what `tpuport.sharding` gives a ported model.

Spreading never changes a value, so nothing here is part of what a program means.
"""

from typing import Any, Protocol

import jax


class Placement(Protocol):
    """The placement of a ported model's state, arguments and activations."""

    @property
    def constrains(self) -> bool:
        """Return whether any activation has a sharding constraint."""
        ...

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """Return the mesh, or None if there is none."""
        ...

    @property
    def mixes_axes(self) -> bool:
        """Return whether XLA's partitioner may mix up axes of the mesh in a product."""
        ...

    @property
    def platform(self) -> str:
        """Return the platform of the devices: "cpu", "tpu"."""
        ...

    def arguments(self, values: list[Any], paths: list[str]) -> list[Any]:
        """Return the arguments of a call, placed on the mesh."""
        ...

    def constants(self, values: list[jax.Array]) -> list[jax.Array]:
        """Return a program's large constants, placed on the mesh."""
        ...

    def state(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the state after a program, sharded as the state before it was."""
        ...

    def activation(self, module: str, side: str, value: jax.Array) -> jax.Array:
        """Return one input or output (`side`) of a module with its sharding constraint."""
        ...

    def spec(self, module: str, side: str, ndim: int) -> Any:
        """Return the spec that `activation` gives a value with `ndim` dims."""
        ...

    def place(self, name: str, struct: jax.ShapeDtypeStruct) -> Any:
        """Return the sharding of one parameter or buffer."""
        ...


class Nowhere:
    """The placement without a mesh: jax puts everything on its default device."""

    constrains = mixes_axes = False
    mesh: jax.sharding.Mesh | None = None

    @property
    def platform(self) -> str:
        """Return jax's default backend."""
        return jax.default_backend()

    def arguments(self, values: list[Any], paths: list[str]) -> list[Any]:
        """Return the arguments unchanged."""
        del paths
        return values

    def constants(self, values: list[jax.Array]) -> list[jax.Array]:
        """Return the constants unchanged."""
        return values

    def state(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the state unchanged."""
        return values

    def activation(self, module: str, side: str, value: jax.Array) -> jax.Array:
        """Return the value unchanged."""
        del module, side
        return value

    def spec(self, module: str, side: str, ndim: int) -> None:
        """Return None: there are no specs."""
        del module, side, ndim

    def place(self, name: str, struct: jax.ShapeDtypeStruct) -> Any:
        """Return None: jax decides where the value is put."""
        del name, struct


NOWHERE = Nowhere()
