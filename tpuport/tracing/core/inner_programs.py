"""The programs inside of an equation (calls, branches, loops), and the equation with others."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from tpuport.foundation.interop.scan_params import scan_counts
from tpuport.tracing.core.paths import CALLS, INLINED, RECOMPUTED


def inner_programs(eqn: Any) -> list[Any]:
    """Return the jaxprs, closed or not, of a call, a branch or a scan."""
    name = eqn.primitive.name
    if name == "cond":
        return list(eqn.params["branches"])
    body = CALLS.get(name, "jaxpr" if name == "scan" else None)
    return [] if body is None or name == "shard_map" else [eqn.params[body]]


def run_with(
    eqn: Any, bodies: Sequence[Callable[..., list[Any]]], operands: Sequence[Any]
) -> list[Any]:
    """Run an equation with other programs inside, functions of their inputs; calls are inlined."""
    params, name = eqn.params, eqn.primitive.name
    if name == "cond":
        return jax.lax.switch(operands[0], bodies, *operands[1:])
    if name in INLINED:
        return bodies[0](*operands)
    if name in RECOMPUTED:
        options = {k: params[k] for k in ("policy", "prevent_cse")}
        return jax.checkpoint(bodies[0], **options)(*operands)
    return _scanned(params, bodies[0], operands)


def _scanned(
    params: dict[str, Any], body: Callable[..., list[Any]], operands: Sequence[Any]
) -> list[Any]:
    first, carried = scan_counts(params)
    consts, carry = operands[:first], list(operands[first : first + carried])

    def step(carry: list[Any], rows: list[Any]) -> Any:
        outs = body(*consts, *carry, *rows)
        return outs[:carried], outs[carried:]

    options = {k: params[k] for k in ("reverse", "length", "unroll")}
    after, rows = jax.lax.scan(step, carry, list(operands[first + carried :]), **options)
    return [*after, *rows]
