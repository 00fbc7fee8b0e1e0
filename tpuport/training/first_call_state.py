"""Training of models that set something up in Python at their first call.

A step is one program, so Python state that a call changes has no place in it. State that is set up
once, such as Hugging Face's hooks for hidden states, does not change the program of later calls.
In that case the step is traced with the model as its first call leaves it. A tensor that each call
leaves in an attribute and none reads (a loss, a map of attention) is left out of the step.
"""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import jax
import torch

from tpuport.foundation.pytree.clone import clone_module
from tpuport.model.ported_model import PortedModel
from tpuport.model.pure import traced
from tpuport.tracing.scan_layers.jaxpr_equal import same_program
from tpuport.tracing.state.module_state import PythonChanges
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
) -> frozenset[str]:
    """Apply a first call's Python state, if a second call traces the same program.

    The second call must change no Python state.

    Args:
        ported: ported model; a copy of its module gets the state, the module itself is unchanged.
        outcome: result of a first call, which changed Python state.
        request: makes the call's request from a key and arguments.
        given: the state by name, or its shapes.
        key: random key, or its shape.
        values: the arguments, or their shapes.

    Returns:
        The names of tensors that the call leaves in attributes, if a later one does not read them.

    Raises:
        Settled: the state was applied; trace again.
    """
    changes = outcome.python_changes
    if changes is None:
        return frozenset()
    if changes.gone or changes.host_state or changes.replacement is not None:
        return frozenset()
    if any(value.shape != given[n].shape for n, value in outcome.state.items() if n in given):
        return frozenset()  # a hidden state of another number of rows
    left = {name: value for name, value in outcome.state.items() if name not in given}
    inputs = jax.tree.map(
        lambda value: jax.ShapeDtypeStruct(value.shape, value.dtype), (given, key, values, left)
    )
    held: list[TraceResult] = []

    def once_more(model: PortedModel, *, reads: bool = False) -> Any:
        # Defined anew for each call: jax caches the jaxpr of a function object that it has seen.
        def pure(given: dict[str, Any], key: Any, values: list[Any], before: Any) -> Any:
            state = {**given, **before} if reads else given
            held.append(traced(model, request(key, values), state))
            return held[-1].out_leaves, held[-1].state

        return jax.make_jaxpr(pure)(*inputs)

    first = once_more(ported)
    module = changes.apply(clone_module(ported._module, lambda tensor: tensor)[0])
    # A number of Python's that depends on the inputs is no tensor.
    if not left.keys() <= set(changes.names) & outcome.state_metas.keys():
        return frozenset()
    _put_zeros(module, left, changes, outcome)
    # The first program has the tensors left behind as inputs too, and does not use them.
    second = once_more(ported._copy(ported.params, ported.buffers, master=module), reads=bool(left))
    if held[-1].python_changes is not None or not same_program(first, second):
        return frozenset()
    if left.keys() >= set(changes.causes):
        return frozenset(left)
    _put_back(module, left, ported._module, changes)
    ported._replace_module(module)
    ported._new_version()
    raise Settled


def _put_zeros(
    module: Any, left: Collection[str], changes: PythonChanges, outcome: TraceResult
) -> None:
    """Give a module tensors for the placeholders that a call left in its attributes."""
    for name in left:
        fqn, attribute = changes.owners[name]
        meta = outcome.state_metas[name]
        zeros = torch.zeros(meta.shape, dtype=meta.dtype)
        module.get_submodule(fqn).__dict__[attribute] = zeros


def _put_back(module: Any, left: Collection[str], before: Any, changes: PythonChanges) -> None:
    """Give a module what it had in those attributes before the call."""
    for name in left:
        fqn, attribute = changes.owners[name]
        held, first = (one.get_submodule(fqn).__dict__ for one in (module, before))
        if attribute in first:
            held[attribute] = first[attribute]
        else:
            del held[attribute]
