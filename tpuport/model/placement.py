"""Where a program's values are put on a mesh: what `tpuport.sharding` gives a ported model.

Spreading never changes a value, so nothing here is part of what a program means.
"""

from typing import Any, Protocol

import jax


class Placement(Protocol):
    """Where the state, arguments and activations of a ported model go."""

    @property
    def constrains(self) -> bool:
        """Whether any activation has a place."""
        ...

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The devices, by axis."""
        ...

    @property
    def platform(self) -> str:
        """What the devices are: "cpu", "tpu"."""
        ...

    def arguments(self, values: list[Any], paths: list[str]) -> list[Any]:
        """The arguments of a call, put on the mesh."""
        ...

    def constants(self, values: list[jax.Array]) -> list[jax.Array]:
        """Large constants of a program, put on the mesh."""
        ...

    def state(self, values: dict[str, Any]) -> dict[str, Any]:
        """The state that a program leaves, kept where the state before it was."""
        ...

    def activation(self, module: str, side: str, value: jax.Array) -> jax.Array:
        """One input or output of a module (`side`), with its place as a constraint."""
        ...

    def spec(self, module: str, side: str, ndim: int) -> Any:
        """Which place `activation` gives a value with so many dims."""
        ...

    def place(self, name: str, struct: jax.ShapeDtypeStruct) -> Any:
        """The sharding of one parameter or buffer."""
        ...


class Nowhere:
    """No mesh: jax puts everything on its default device."""

    constrains = False
    mesh = None

    @property
    def platform(self) -> str:
        """What jax uses by default."""
        return jax.default_backend()

    def arguments(self, values: list[Any], paths: list[str]) -> list[Any]:
        """As they are."""
        del paths
        return values

    def constants(self, values: list[jax.Array]) -> list[jax.Array]:
        """As they are."""
        return values

    def state(self, values: dict[str, Any]) -> dict[str, Any]:
        """As it is."""
        return values

    def activation(self, module: str, side: str, value: jax.Array) -> jax.Array:
        """As it is."""
        del module, side
        return value

    def spec(self, module: str, side: str, ndim: int) -> None:
        """None: it gives none."""
        del module, side, ndim

    def place(self, name: str, struct: jax.ShapeDtypeStruct) -> None:
        """Where jax puts it."""
        del name, struct


NOWHERE = Nowhere()
