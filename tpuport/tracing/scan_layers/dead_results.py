"""Dead code elimination that leaves calls of one block alike where their weights are a stack.

Of the last block, often a part alone is read, such as keys and values. Without the rest it is
another program than the other blocks, and they are a loop without it. Such a loop has to copy its
part of each stack of weights, which takes longer than the rest of one block, and memory.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend import core

from tpuport.tracing.core.jaxpr_dce import without_dead_code
from tpuport.tracing.scan_layers.shared_programs import NAME
from tpuport.tracing.scan_layers.unstack_p import UNSTACK


def without_dead_results(closed: Any) -> Any:
    """Return the program without what no result needs; calls of one block stay calls of one.

    What most calls of a block are read for, all of them compute if their weights are a stack. A
    call of which nothing is read is left out.
    """
    jaxpr = closed.jaxpr
    calls = _calls_with_stacks(jaxpr)
    kept: list[Any] = []
    while True:
        pruned = without_dead_code(_with_results(closed, [*jaxpr.outvars, *kept]))
        more = [var for group in calls for var in _missing(group, pruned, len(jaxpr.outvars))]
        if not more:
            return _with_results(pruned, list(pruned.jaxpr.outvars[: len(jaxpr.outvars)]))
        kept += more


def _with_results(closed: Any, outvars: list[Any]) -> Any:
    if len(outvars) == len(closed.jaxpr.outvars):
        return closed
    info = closed.jaxpr.debug_info.with_unknown_names()
    return closed.replace(jaxpr=closed.jaxpr.replace(outvars=outvars, debug_info=info))


def _calls_with_stacks(jaxpr: Any) -> list[list[Any]]:
    """Return the calls of each block that reads a part of a stack, in any dtype."""
    parts: set[Any] = set()
    groups: dict[int, list[Any]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive is UNSTACK:
            parts.update(eqn.outvars)
        elif parts and eqn.primitive.name == "convert_element_type":
            parts.update(() if parts.isdisjoint(_variables(eqn)) else eqn.outvars)
        elif parts and eqn.params.get("name") == NAME and not parts.isdisjoint(_variables(eqn)):
            groups.setdefault(id(eqn.params["jaxpr"]), []).append(eqn)
    return list(groups.values())


def _variables(eqn: Any) -> list[Any]:
    """Return the operands that are variables."""
    return [atom for atom in eqn.invars if isinstance(atom, core.Var)]


def _missing(calls: list[Any], pruned: Any, results: int) -> Iterator[Any]:
    """Yield results that a program lacks of some calls, and has of most.

    Args:
        calls: The calls of one block.
        pruned: The program without dead code.
        results: The number of its results, the first of its outputs.
    """
    read = {id(var) for eqn in pruned.jaxpr.eqns for var in eqn.invars}
    read |= {id(var) for var in pruned.jaxpr.outvars[:results]}
    made = {id(var) for eqn in pruned.jaxpr.eqns for var in eqn.outvars}
    alive = [eqn for eqn in calls if any(id(var) in made for var in eqn.outvars)]
    for each in zip(*(eqn.outvars for eqn in alive), strict=True):
        if 2 * sum(id(var) in read for var in each) > len(each):
            yield from (var for var in each if id(var) not in made)
