"""Training of models that set something up in Python at their first call.

A step is one program, so Python state that a call changes has no place in it. State that is set up
once, such as Hugging Face's hooks for hidden states, does not change the program of later calls.
In that case the step is traced with the model as its first call leaves it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from tpuport.foundation.pytree.clone import clone_module
from tpuport.model.ported_model import PortedModel
from tpuport.model.pure import traced
from tpuport.tracing.scan_layers.jaxpr_equal import same_program
from tpuport.tracing.state.request import TraceRequest, TraceResult

Result = TypeVar("Result")


class Settled(Exception):
    """Signal that the first call's Python state was applied to the model: trace again."""


def settled(trace: Callable[[], Result]) -> Result:
    """Run `trace`; if it finds that the first call sets up state, that is applied: run it again."""
    try:
        return trace()
    except Settled:
        return trace()


def settle(
    ported: PortedModel,
    outcome: TraceResult,
    request: Callable[[Any, list[Any]], TraceRequest],
    given: dict[str, Any],
    key: Any,
    values: list[Any],
) -> None:
    """Apply a first call's Python state, if a second call traces the same program.

    The second call must change no Python state.

    Args:
        ported: ported model; a copy of its module gets the state, the module itself is unchanged.
        outcome: result of a first call, which changed Python state.
        request: makes the call's request from a key and arguments.
        given: the state by name, or its shapes.
        key: random key, or its shape.
        values: the arguments, or their shapes.

    Raises:
        Settled: the state was applied; trace again.
    """
    changes = outcome.python_changes
    if changes is None:
        return
    if changes.gone or changes.host_state or changes.replacement is not None:
        return
    inputs = jax.tree.map(
        lambda value: jax.ShapeDtypeStruct(value.shape, value.dtype), (given, key, values)
    )
    held: list[TraceResult] = []

    def once_more(model: PortedModel) -> Any:
        # Defined anew for each call: jax caches the jaxpr of a function object that it has seen.
        def pure(given: dict[str, Any], key: Any, values: list[Any]) -> Any:
            held.append(traced(model, request(key, values), given))
            return held[-1].out_leaves, held[-1].state

        return jax.make_jaxpr(pure)(*inputs)

    first = once_more(ported)
    module = changes.apply(clone_module(ported._module, lambda tensor: tensor)[0])
    second = once_more(ported._copy(ported.params, ported.buffers, master=module))
    if held[-1].python_changes is None and same_program(first, second):
        ported._replace_module(module)
        ported._new_version()
        raise Settled
