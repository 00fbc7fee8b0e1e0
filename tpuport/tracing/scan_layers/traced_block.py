"""A block that was traced as a pure function: its arguments, its results and its assumptions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from tpuport.foundation import pytree
from tpuport.foundation.pytree.compare import same_value
from tpuport.tracing.attention.masks.rematerialize import Recipe
from tpuport.tracing.core.context import Counters
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.guards.watch import Record
from tpuport.tracing.scan_layers.call_order import LastCalls
from tpuport.tracing.scan_layers.jaxpr_equal import same_program

NAME = "tpuport_block"


def strong(value: Any) -> Any:
    """Return a value without jax's weak type: torch tracks dtypes itself, and loops need a fixed
    one.
    """
    if getattr(jax.typeof(value), "weak_type", False):
        return jax.lax.convert_element_type(value, jax.typeof(value).dtype)
    return value


class NotPure(Exception):
    """An error for a block that is no pure function of its inputs; the text gives the reason."""


@dataclass
class Arguments:
    """The flattened arguments of a call."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    # By index into `traced`: recipes of masks, which say what they are computed from.
    recipes: dict[int, Recipe] = field(default_factory=dict)

    @property
    def traced(self) -> list[TracedTensor]:
        """Return the leaves that are inputs of the function."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TracedTensor)]

    @property
    def has_views(self) -> bool:
        """Return whether one of them is a view."""
        return any(leaf._chain for leaf in self.traced)


@dataclass
class BlockEntry:
    """A block traced as a pure function, and what holds for every block that reuses it.

    Attributes:
        run: The function, of state, arguments, and the base key and first number of each stream.
        program: The function as a `ClosedJaxpr`.
        outputs: For each leaf of the result an input ("argument" or "state", which), a host tensor
            ("host", tensor), or ("value", its meta tensor, whether frozen, its bounds).
        spec: The result's structure.
        draws: How many random numbers it draws from each stream.
        read: The attributes that its code read and in which other blocks may differ.
        places: The activations that it gave a spec: module within the block, side,
            number of dims, spec.
        counts: What the report counts of it.
        outside: What its code may read from outside of the block, with the values at trace time.
        keep: The objects that the key of the arguments refers to by address.
        tells_views: Whether its code may tell a view from a tensor of its own.
        noted: All attributes that its code read, of those that were hidden from it.
        fqn: The block that was traced.
        lasts: The order of its calls for other blocks.
    """

    run: Callable[..., Any]
    program: Any
    outputs: list[tuple[Any, ...]]
    spec: pytree.TreeSpec
    draws: list[int]
    read: dict[tuple[str, str], Any]
    places: list[tuple[str, str, int, Any]]
    counts: Counters
    outside: list[Record]
    keep: Any
    tells_views: bool
    noted: set[tuple[str, str]]
    fqn: str
    lasts: LastCalls | None = None

    def is_like(self, other: "BlockEntry") -> bool:
        """Return whether another trace resulted in the same function."""
        ours, theirs = (
            (e.spec.key, e.draws, [place[:3] for place in e.places]) for e in (self, other)
        )
        return (
            ours == theirs
            and same_value(list(map(_plain, self.outputs)), list(map(_plain, other.outputs)))
            and same_program(self.program, other.program)
        )


def _plain(output: tuple[Any, ...]) -> list[Any]:
    """Return an output in comparable form, its meta tensor as shape, strides and dtype."""
    if output[0] != "value":
        return list(output)
    _, meta, frozen, bounds = output
    return [tuple(meta.shape), meta.stride(), meta.dtype, frozen, bounds]
