"""The programs of repeated blocks, each kept once."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from tpuport.tracing.scan_layers.jaxpr_equal import same_program

NAME = "tpuport_block"


def strong(value: Any) -> Any:
    """Return a value without jax's weak type: torch tracks dtypes itself, and loops need a fixed
    one.
    """
    if getattr(jax.typeof(value), "weak_type", False):
        return jax.lax.convert_element_type(value, jax.typeof(value).dtype)
    return value


class SharedPrograms:
    """The programs of the blocks of one trace.

    Calls of one program are calls of one jitted function: jax then differentiates and compiles it
    once, and `roll` makes a loop of calls that follow each other.
    """

    def __init__(self) -> None:
        self._known: dict[Any, list[tuple[Any, Callable[..., Any]]]] = {}

    def find(self, program: Any) -> tuple[Callable[..., Any], bool]:
        """Return the jitted function of a `ClosedJaxpr`, and whether an earlier block has it."""
        key = (len(program.eqns), tuple(map(str, program.in_avals)))
        alike = self._known.setdefault(key, [])
        for known, run in alike:
            if same_program(known, program):
                return run, True
        alike.append((program, made := jitted(program)))
        return made, False

    def clear(self) -> None:
        """Drop all programs."""
        self._known.clear()


def jitted(program: Any) -> Callable[..., Any]:
    """Return a program as a function that calls a jitted function named `NAME`.

    The first call is kept as an equation that the other calls copy: tracing `jit` again would
    take several times as long.
    """
    function = jaxpr_as_fun(program)

    def block(*values: Any) -> Any:
        return function(*values)

    block.__name__ = block.__qualname__ = NAME
    called = jax.jit(block)
    kinds: list[Any] = []
    again: Callable[..., Any] = called

    def run(*values: Any) -> Any:
        nonlocal again
        now = [jax.typeof(value) for value in values]
        if not kinds:
            kinds.extend(now)
            again = jaxpr_as_fun(jax.make_jaxpr(called)(*values))
        # On a mesh with explicit axes the sharding is part of the type, so one shape may have
        # several types.
        return (again if now == kinds else called)(*values)

    return run
