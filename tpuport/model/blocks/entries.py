"""A block that was traced as a pure function: what it is called with, and what it gives."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from tpuport.model import structure
from tpuport.model.blocks.lasts import LastCalls
from tpuport.model.blocks.same_program import same_program
from tpuport.model.blocks.same_values import same_value
from tpuport.model.blocks.watched import Record
from tpuport.model.masks.recipes import Recipe
from tpuport.model.tensor import TracedTensor
from tpuport.model.trace import Counters

NAME = "tpuport_block"


def strong(value: Any) -> Any:
    """A value without jax's weak type: torch's dtypes are kept beside it, and loops keep theirs."""
    if getattr(jax.typeof(value), "weak_type", False):
        return jax.lax.convert_element_type(value, jax.typeof(value).dtype)
    return value


class NotPure(Exception):
    """A block does something that a pure function of its inputs cannot; the text says what."""


@dataclass
class Arguments:
    """A call's arguments, taken apart."""

    leaves: list[Any]
    spec: structure.Spec
    # By number of those that are traced: masks, and what they are computed from.
    recipes: dict[int, Recipe] = field(default_factory=dict)

    @property
    def traced(self) -> list[TracedTensor]:
        """Those that are inputs of the function."""
        return [leaf for leaf in self.leaves if isinstance(leaf, TracedTensor)]

    @property
    def has_views(self) -> bool:
        """Whether one of them is a view."""
        return any(leaf._chain for leaf in self.traced)


@dataclass
class Entry:
    """A block that was traced as a pure function, and what holds for every block it stands for.

    Attributes:
        run: the function, of state, arguments, and the base key and first number of each stream.
        program: it as a `ClosedJaxpr`.
        outputs: for each leaf of the result an input ("argument" or "state", which), a host tensor
            ("host", it), or ("value", its meta tensor, whether frozen, its bounds).
        spec: the result's structure.
        draws: how many random numbers it draws from each stream.
        read: the attributes that its code read and that other blocks may have otherwise.
        places: the activations that it gave a place on the mesh: module within the block, side,
            number of dims, spec.
        counts: what the report counts of it.
        outside: what its code may read from outside of the block, as it was.
        keep: what the key of the arguments refers to by address.
        tells_views: whether its code may tell a view from a tensor of its own.
        noted: all attributes that its code read, of those that were hidden from it.
        fqn: the block that was traced.
        lasts: its calls for other blocks.
    """

    run: Callable[..., Any]
    program: Any
    outputs: list[tuple[Any, ...]]
    spec: structure.Spec
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

    def is_like(self, other: "Entry") -> bool:
        """Whether another trace gave the same function."""
        ours, theirs = (
            (e.spec.key, e.draws, [place[:3] for place in e.places]) for e in (self, other)
        )
        return (
            ours == theirs
            and same_value(list(map(_plain, self.outputs)), list(map(_plain, other.outputs)))
            and same_program(self.program, other.program)
        )


def _plain(output: tuple[Any, ...]) -> list[Any]:
    """What an output is, its meta tensor in numbers."""
    if output[0] != "value":
        return list(output)
    _, meta, frozen, bounds = output
    return [tuple(meta.shape), meta.stride(), meta.dtype, frozen, bounds]
