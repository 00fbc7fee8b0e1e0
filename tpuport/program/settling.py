"""Models that set something up in Python at their first call: a step of training begins after it.

A step is one program, so Python state that a call leaves has no place in it. What is set up once,
such as Hugging Face's hooks for hidden states, leaves the program as it is: then the model is taken
as its first call leaves it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from tpuport.model.blocks.same_program import same_program
from tpuport.model.cloning import clone_module
from tpuport.model.ported import PortedModel
from tpuport.model.pure import traced
from tpuport.model.request import Outcome, Request

Result = TypeVar("Result")


class Settled(Exception):
    """The model has Python state now that its first call sets up; trace again."""


def settled(trace: Callable[[], Result]) -> Result:
    """What a trace gives that may find out that the model is to be settled before it."""
    try:
        return trace()
    except Settled:
        return trace()


def settle(
    ported: PortedModel,
    outcome: Outcome,
    request: Callable[[Any, list[Any]], Request],
    given: dict[str, Any],
    key: Any,
    values: list[Any],
) -> None:
    """Take a model as its first call leaves it, if calls after that do the same and change nothing.

    Args:
        ported: a copy of its module gets the state; the module that it has had stays as it is.
        outcome: of a first call, which changed Python state.
        request: the call, of a key and arguments.
        given: the state by name, or its shapes.
        key: of random numbers, or its shape.
        values: the arguments, or their shapes.

    Raises:
        Settled: it is so; trace again.
    """
    changes, program = outcome.python_changes, ported._program
    if changes is None or program.master is None:
        return
    if changes.gone or changes.host_state or changes.replacement is not None:
        return
    inputs = jax.tree.map(
        lambda value: jax.ShapeDtypeStruct(value.shape, value.dtype), (given, key, values)
    )
    held: list[Outcome] = []

    def once_more() -> Any:
        # Of a function that it knows jax gives the program that it knows.
        def pure(given: dict[str, Any], key: Any, values: list[Any]) -> Any:
            held.append(traced(program, request(key, values), given))
            return held[-1].out_leaves, held[-1].state

        return jax.make_jaxpr(pure)(*inputs)

    first = once_more()
    old, program.master = program.master, clone_module(program.master, lambda tensor: tensor)[0]
    changes.apply(program.master)
    settles = False
    try:
        second = once_more()
        settles = held[-1].python_changes is None and same_program(first, second)
    finally:
        if not settles:
            program.master = old
    if settles:
        ported._new_version()
        raise Settled
