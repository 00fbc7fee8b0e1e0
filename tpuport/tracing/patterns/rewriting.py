"""A program with its patterns computed in another way, in blocks and branches too.

This runs over the whole program, after it was traced and before it is differentiated: only then is
it known what reads a value, and the new way is what gets a derivative. A pattern is a function of a
`FlatProgram`. It yields a `PatternMatch` for each place, which computes the results of one equation
from other values. Equations that nothing needs any more are dropped.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh

from tpuport.tracing.attention.options import options_for
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.inner_programs import inner_programs, run_with
from tpuport.tracing.patterns.attention import find_attention
from tpuport.tracing.patterns.pairs import find_pairs
from tpuport.tracing.patterns.products import find_products
from tpuport.tracing.patterns.program import FlatProgram, PatternMatch, RunningValues
from tpuport.tracing.patterns.windows import divides, find_windows
from tpuport.tracing.scan_layers.dead_results import without_dead_results
from tpuport.tracing.scan_layers.rolling import run_equations, shape_of
from tpuport.tracing.scan_layers.shared_programs import NAME, jitted

Pattern = Callable[[FlatProgram, Trace], Iterable[PatternMatch]]


def patterns_for(target: str, mesh: Mesh | None) -> tuple[Pattern, ...]:
    """Return the patterns that programs for a platform, and for a mesh if they have one, get."""
    kernels = (find_attention, find_pairs) if options_for(target) is not None else ()
    return (*kernels, find_windows) if divides(mesh) else kernels


def rewritten(closed: Any, trace: Trace) -> Any:
    """Return a program that computes the same, with the patterns in it computed in another way.

    Args:
        closed: A traced program, a `ClosedJaxpr`, without dead code: a pattern is none if another
            equation reads what is inside of it.
        trace: The trace that it comes from, which records what was found.
    """
    patterns = patterns_for(trace.options.target, trace.options.mesh)
    if trace.options.mixes_axes:
        # First, because a product may be part of what others compute in a better way.
        patterns = (find_products, *patterns)
    return (_Rewriting(trace, patterns).changed(closed) or closed) if patterns else closed


class _Rewriting:
    def __init__(self, trace: Trace, patterns: tuple[Pattern, ...]) -> None:
        self._trace, self._patterns = trace, patterns
        self._inside: dict[int, _Inside] = {}

    def changed(self, closed: Any) -> Any:
        """Return the changed program, or None if it has no pattern."""
        program = FlatProgram(closed)
        matches = {
            id(match.equation): match
            for pattern in self._patterns
            for match in pattern(program, self._trace)
        }
        nested = {id(eqn): runs for eqn in program.equations if (runs := self._nested(eqn))}
        if not matches and not nested:
            return None

        def run(*args: Any) -> list[Any]:
            return _run(program, matches, nested, args)

        return without_dead_results(jax.make_jaxpr(run)(*map(shape_of, program.invars)))

    def _nested(self, eqn: Any) -> list[Callable[..., Any]]:
        """Return the programs inside an equation as functions; none if nothing changes there."""
        found = [self._one_inside(eqn, inner) for inner in inner_programs(eqn)]
        if all(one.changed is None for one in found):
            return []
        return [one.changed or core.jaxpr_as_fun(one.closed) for one in found]

    def _one_inside(self, eqn: Any, inner: Any) -> "_Inside":
        notes = self._trace.recorder.counters.attention
        known = self._inside.get(id(inner))
        if known is None:
            is_closed = isinstance(inner, core.ClosedJaxpr)
            closed = inner if is_closed else core.ClosedJaxpr(inner, [])
            before = len(notes)
            after = self.changed(closed)
            known = self._inside[id(inner)] = _Inside(inner, closed, notes=notes[before:])
            if after is not None:
                # Equal blocks are calls of one function: rounds of a loop are found by it.
                is_block = eqn.params.get("name") == NAME
                known.changed = (jitted if is_block else core.jaxpr_as_fun)(after)
        else:
            notes.extend(known.notes)
        return known


@dataclass
class _Inside:
    """A program inside of another one.

    Attributes:
        inner: As it is in the equation; kept, so that its id is not used again.
        closed: The same, closed.
        notes: What the report says of it, once for each call.
        changed: A function that computes the same; None if it has no pattern.
    """

    inner: Any
    closed: Any
    notes: list[Any]
    changed: Callable[..., Any] | None = None


def _run(
    program: FlatProgram,
    matches: dict[int, PatternMatch],
    nested: dict[int, list[Callable[..., Any]]],
    args: Any,
) -> list[Any]:
    known = dict(program.consts)
    known.update(zip(program.invars, args, strict=True))
    values, waiting = RunningValues(program, known), []
    for eqn in program.equations:
        match, runs = matches.get(id(eqn)), nested.get(id(eqn))
        outs = None
        if match is not None or runs is not None:
            run_equations(waiting, known)
            waiting = []
            if match is not None:
                outs = match.compute(values)
            elif runs is not None:
                outs = run_with(eqn, runs, [values.read(atom) for atom in eqn.invars])
        if outs is None:
            waiting.append(eqn)
        else:
            known.update(zip(eqn.outvars, outs, strict=True))
    run_equations(waiting, known)
    return [values.read(atom) for atom in program.outvars]
