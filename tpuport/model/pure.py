"""The pure function behind a ported model's calls, for transformations of the user's own."""

from typing import TYPE_CHECKING, Any

import jax
import jax.core
from jax.extend.core import jaxpr_as_fun

from tpuport.model import arguments, structure
from tpuport.model.blocks import at_rest
from tpuport.model.random_keys import as_key
from tpuport.model.request import Outcome, Request

if TYPE_CHECKING:
    from tpuport.model.ported import PortedModel


def apply(
    ported: "PortedModel",
    params: dict[str, Any],
    buffers: dict[str, Any],
    rng: jax.Array | None,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, jax.Array]]:
    """See `PortedModel.apply`."""
    given = {**buffers, **params}
    values = ported._checked_values(at_rest.unstack(params), at_rest.unstack(buffers))
    leaves, spec, paths = arguments.take_apart((args, kwargs))
    arrays, metas = arguments.argument_arrays(leaves, paths)
    key = None if rng is None else as_key(rng)
    with ported._precision_scope():
        known = {n: v for n, v in values.items() if not isinstance(v, jax.core.Tracer)}
        request = Request(method, values, key, arrays, metas, spec, checks=False, known=known)
        request.known_leaves = {
            i: a for i, a in enumerate(arrays) if not isinstance(a, jax.core.Tracer)
        }
        outcome = _traced(ported, request, given)
    leaves = arguments.static_leaves(outcome.out_leaves, outcome.out_metas)
    out = structure.rebuild(outcome.out_spec, leaves)
    state = at_rest.restack(outcome.state, given)
    changed = {name: value for name, value in state.items() if name not in params}
    return out, {**buffers, **changed}


def _traced(ported: "PortedModel", request: Request, given: dict[str, Any]) -> Outcome:
    """Trace a call, with repeated blocks as loops where that pays."""
    program = ported._program
    if not program.rolls:
        return program.trace(request)
    held: dict[str, Outcome] = {}

    def pure(given: dict[str, Any], key: Any, leaves: list[Any]) -> Any:
        request.values, request.key, request.leaves = at_rest.unstack(given), key, leaves
        outcome = held["outcome"] = program.trace(request)
        return outcome.out_leaves, outcome.state

    inputs = (given, request.key, request.leaves)
    closed, shape = jax.make_jaxpr(pure, return_shape=True)(*inputs)
    run = jaxpr_as_fun(program.rolled(closed))
    outs = run(*jax.tree.leaves(inputs))
    outcome = held["outcome"]
    outcome.out_leaves, outcome.state = jax.tree.unflatten(jax.tree.structure(shape), outs)
    return outcome
