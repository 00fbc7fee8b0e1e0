"""The table of op lowerings, filled by the files of `tracing/lowerings` when they are imported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from tpuport.foundation.interop import backend

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Lowering:
    """A registered lowering.

    `reason` describes torchax's own result, for the report and for upstream.
    """

    function: Callable[..., Any]
    reason: str


# The reason of a lowering with the same result as torchax's, or as torch's decomposition.
SAME = "as torchax, or torch's decomposition, computes it; one op stays one op"

LOWERINGS: dict[Any, Lowering] = {}
SPECIALS: dict[Any, Callable[..., Any]] = {}


def lowering(*ops: Any, reason: str = "torchax has no lowering") -> Callable[[_F], _F]:
    """Register a function on jax arrays as the lowering of ATen overloads, or of whole packets.

    An op of a library that may not be there is given by the name of its packet.
    """

    def register(function: _F) -> _F:
        for op in ops:
            LOWERINGS[op] = Lowering(function, reason)
        return function

    return register


def special(*ops: Any) -> Callable[[_F], _F]:
    """Register a function on tensors that replaces the complete dispatch of these overloads."""

    def register(function: _F) -> _F:
        for op in ops:
            SPECIALS[op] = function
        return function

    return register


def find(func: Any) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    """Return the special and the lowering of an overload: ours, else torchax's, else None."""
    packet = func.overloadpacket
    ours = LOWERINGS.get(func) or LOWERINGS.get(packet) or LOWERINGS.get(str(packet))
    if ours is not None:
        return SPECIALS.get(func), ours.function
    theirs = backend.TORCHAX_OPS.get(func) or backend.TORCHAX_OPS.get(packet)
    if theirs is None or not theirs.is_jax_function or theirs.needs_env:
        return SPECIALS.get(func), None
    return SPECIALS.get(func), theirs.func
