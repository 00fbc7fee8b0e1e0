"""The pure function behind a ported model's calls, inside a jax transformation."""

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.core
from jax.extend.core import jaxpr_as_fun

from tpuport.model import report_builder
from tpuport.tracing.core.untaken import gated, runs_branches
from tpuport.tracing.functions.inner_gradients import NeedsProgram
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.state.request import TraceRequest, TraceResult

if TYPE_CHECKING:
    from tpuport.model.ported_model import PortedModel


def traced(
    ported: "PortedModel", request: TraceRequest, given: dict[str, Any], *, gates: bool = False
) -> TraceResult:
    """Trace a call, with repeated blocks as loops where that pays.

    Args:
        ported: The model to trace.
        request: The call; its `values` are taken from `given`.
        given: The state by name, stacked weights included.
        gates: Whether the caller may differentiate it as it is: then branches that are not taken
            pass no gradient. `gradient_paths.evaluated` sees to that otherwise.

    Returns:
        The outcome of the call. A change of a weight in a stack appears as a change of the stack.

    Raises:
        PortError: The code cannot be ported exactly.
    """
    held: dict[str, TraceResult] = {}
    tracer = ported._tracer

    def pure(given: dict[str, Any], key: Any, leaves: list[Any]) -> Any:
        values = stacked_params.unstack(given)
        outcome = tracer.trace(replace(request, values=values, key=key, leaves=leaves))
        held["outcome"] = outcome
        state = stacked_params.restack(outcome.state, given)
        return outcome.out_leaves, state, outcome.error_code

    inputs = (given, request.key, request.leaves)
    results = None
    if not tracer.finishes:
        with contextlib.suppress(NeedsProgram):
            results = pure(*inputs)
    if results is None or (gates and held["outcome"].trace.branches):
        closed, shape = jax.make_jaxpr(pure, return_shape=True)(*inputs)
        closed, run = tracer.finished(closed, held["outcome"].trace), None
        if gates and runs_branches(closed):
            run = gated(closed, range(len(closed.jaxpr.outvars)))
        outs = (run or jaxpr_as_fun(closed))(*jax.tree.leaves(inputs))
        results = jax.tree.unflatten(jax.tree.structure(shape), outs)
    outcome = held["outcome"]
    report_builder.record_attention(ported.report, outcome.trace)
    outcome.out_leaves, outcome.state, outcome.error_code = results
    return outcome
