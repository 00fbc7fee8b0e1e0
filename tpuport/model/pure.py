"""The pure function behind a ported model's calls, for the user's own jax transformations."""

from typing import TYPE_CHECKING, Any

import jax
import jax.core
from jax.extend.core import jaxpr_as_fun

from tpuport.foundation import pytree
from tpuport.tracing.core import arguments
from tpuport.tracing.core.keys import as_key
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.session.tracer import Tracer
from tpuport.tracing.state.request import TraceRequest, TraceResult

if TYPE_CHECKING:
    from tpuport.model.ported_model import PortedModel


def apply(
    ported: "PortedModel",
    params: dict[str, Any],
    buffers: dict[str, Any],
    rng: jax.Array | None,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, jax.Array]]:
    """Run a method as a pure function; see `PortedModel.apply`."""
    given = {**buffers, **params}
    values = ported._checked_values(stacked_params.unstack(params), stacked_params.unstack(buffers))
    leaves, spec, paths = arguments.flatten_call((args, kwargs))
    arrays, metas = arguments.argument_arrays(leaves, paths)
    key = None if rng is None else as_key(rng)
    with ported._precision_scope():
        known = {n: v for n, v in values.items() if not isinstance(v, jax.core.Tracer)}
        request = TraceRequest(method, values, key, arrays, metas, spec, checks=False, known=known)
        request.known_leaves = {
            i: a for i, a in enumerate(arrays) if not isinstance(a, jax.core.Tracer)
        }
        outcome = traced(ported._program, request, given)
    leaves = arguments.static_leaves(outcome.out_leaves, outcome.out_metas)
    out = pytree.unflatten(outcome.out_spec, leaves)
    changed = {name: value for name, value in outcome.state.items() if name not in params}
    return out, {**buffers, **changed}


def traced(program: Tracer, request: TraceRequest, given: dict[str, Any]) -> TraceResult:
    """Trace a call, with repeated blocks as loops where that pays.

    Args:
        program: The program to trace.
        request: The call; its `values` are taken from `given`.
        given: The state by name, stacked weights included.

    Returns:
        The outcome of the call. A change of a weight in a stack appears as a change of the stack.

    Raises:
        PortError: The code cannot be ported exactly.
    """
    held: dict[str, TraceResult] = {}

    def pure(given: dict[str, Any], key: Any, leaves: list[Any]) -> Any:
        request.values, request.key, request.leaves = stacked_params.unstack(given), key, leaves
        outcome = held["outcome"] = program.trace(request)
        return outcome.out_leaves, stacked_params.restack(outcome.state, given)

    inputs = (given, request.key, request.leaves)
    if program.rolls:
        closed, shape = jax.make_jaxpr(pure, return_shape=True)(*inputs)
        outs = jaxpr_as_fun(program.rolled(closed))(*jax.tree.leaves(inputs))
        results = jax.tree.unflatten(jax.tree.structure(shape), outs)
    else:
        results = pure(*inputs)
    outcome = held["outcome"]
    outcome.out_leaves, outcome.state = results
    return outcome
