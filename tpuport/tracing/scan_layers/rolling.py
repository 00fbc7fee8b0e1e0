"""Repeated calls of one function in a traced program, turned into one `lax.scan`.

Tracing leaves a chain of calls of the same jaxpr (`body.NAME`), each on its own weights and on the
results of the call before. A round is the stretch from one call to the next. If rounds are equal,
one becomes the body of a loop. Inputs that differ (weights, numbers of random keys) are stacked,
results that the next round reads are carried, and inputs that all rounds share stay outside.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import api_util
from jax.extend import core

from tpuport.tracing.core.jaxpr_dce import without_dead_code
from tpuport.tracing.scan_layers.iterations import Loop, matched
from tpuport.tracing.scan_layers.shared_programs import NAME, strong
from tpuport.tracing.scan_layers.stack import copied_bytes, read_for, stacked

MIN_ROUNDS = 3
_MAX_PERIOD = 8
# A copy of this size costs too little time and memory to matter.
_FEW_BYTES = 16 << 20


def roll(closed: Any, *, copies: bool = True, min_rounds: int = MIN_ROUNDS) -> Any:
    """Return a program with its repeated blocks as loops.

    Args:
        closed: A traced program, a `ClosedJaxpr`.
        copies: Make a loop even if more than a little has to be copied into stacks.
        min_rounds: Fewer rounds are left unrolled.

    Returns:
        A program that computes the same from the same arguments, or `closed` if nothing repeats.
    """
    jaxpr = closed.jaxpr
    definitions = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    limit = None if copies else _FEW_BYTES
    parts = _Search(jaxpr.outvars, definitions, min_rounds, limit).parts(list(jaxpr.eqns))
    if not any(isinstance(part, Loop) for part in parts):
        return closed
    parts = _without_needless(parts, jaxpr.outvars, definitions)

    def program(*args: Any) -> Any:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        for part in parts:
            if isinstance(part, Loop):
                _run_loop(part, env, definitions)
            else:
                run_equations(part, env)
        return [var.val if isinstance(var, core.Literal) else env[var] for var in jaxpr.outvars]

    rolled = jax.make_jaxpr(program)(*map(shape_of, jaxpr.invars))
    return without_dead_code(rolled)


def shape_of(var: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of an input of a program, to trace another one with."""
    aval = var.aval
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=getattr(aval, "sharding", None)
    )


def _without_needless(parts: list[Any], outvars: Any, definitions: dict[Any, Any]) -> list[Any]:
    """Remove equations that nothing reads after loops were made.

    Those that extracted single weights from stacks are such, and there may be very many.
    """
    read = {var for var in outvars if isinstance(var, core.Var)}
    kept: list[Any] = []
    for part in reversed(parts):
        if isinstance(part, Loop):
            read.update(_read_by(part, definitions))
            kept.append(part)
            continue
        equations = []
        for eqn in reversed(part):
            if eqn.effects or not read.isdisjoint(eqn.outvars):
                read.update(var for var in eqn.invars if isinstance(var, core.Var))
                equations.append(eqn)
        kept.append(equations[::-1])
    return kept[::-1]


def _read_by(loop: Loop, definitions: dict[Any, Any]) -> Iterator[Any]:
    """Return the variables whose values a loop needs."""
    for atom in [*(atom for _, atom in loop.fixed), *(atom for _, atom, _ in loop.carried)]:
        if isinstance(atom, core.Var):
            yield atom
    for _, atoms in loop.varying:
        yield from read_for(atoms, definitions)


def run_equations(equations: Sequence[Any], env: dict[Any, Any]) -> None:
    """Run equations on the values in `env`."""
    outputs = [var for eqn in equations for var in eqn.outvars]
    free = free_variables(equations)
    values = _as_function(free, outputs, equations)(*(env[var] for var in free))
    env.update(zip(outputs, values, strict=True))


def _as_function(inputs: list[Any], outputs: list[Any], equations: Sequence[Any]) -> Any:
    """Return a function that computes some variables from others by these equations."""
    effects: set[Any] = set().union(*(eqn.effects for eqn in equations))
    info = api_util.debug_info("repeated blocks", _as_function, (), {})
    piece = core.Jaxpr([], inputs, outputs, list(equations), effects, info.with_unknown_names())
    return core.jaxpr_as_fun(core.ClosedJaxpr(piece, []))


def free_variables(equations: Sequence[Any]) -> list[Any]:
    """Return the variables that equations read and do not define, in order."""
    defined: set[Any] = set()
    free: dict[Any, None] = {}
    for eqn in equations:
        for var in eqn.invars:
            if not isinstance(var, core.Literal) and var not in defined:
                free[var] = None
        defined.update(eqn.outvars)
    return list(free)


def _run_loop(loop: Loop, env: dict[Any, Any], definitions: dict[Any, Any]) -> None:
    """Run a loop on the values in `env`, and store the results that are read later."""
    varying = [stacked(atoms, env, definitions) for _, atoms in loop.varying]
    fixed = {var: _value(atom, env) for var, atom in loop.fixed}
    first = [strong(_value(atom, env)) for _, atom, _ in loop.carried]
    kept = list(dict.fromkeys(var for var, round_, _ in loop.results if round_ is not None))
    outputs = [out for _, _, out in loop.carried] + kept
    free = [*fixed, *(var for var, _, _ in loop.carried), *(var for var, _ in loop.varying)]
    run = _as_function(free, outputs, loop.body)

    def body(carry: list[Any], own: list[Any]) -> tuple[list[Any], list[Any]]:
        values = run(*fixed.values(), *carry, *own)
        handed = [strong(value) for value in values[: len(carry)]]
        return handed, values[len(carry) :]

    last, every = jax.lax.scan(body, first, varying, length=loop.rounds)
    final = dict(zip((out for _, _, out in loop.carried), last, strict=True))
    collected = dict(zip(kept, every, strict=True))
    for var, round_, name in loop.results:
        env[name] = final[var] if round_ is None else collected[var][round_]


def _value(atom: Any, env: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, core.Literal) else env[atom]


# -- finding loops ---------------------------------------------------------------------------------


def callee(eqn: Any) -> int | None:
    """Return an id of the block function that an equation calls, or None."""
    called = eqn.params.get("jaxpr") if eqn.params.get("name") == NAME else None
    return None if called is None else id(called)


def _copied(loop: Loop, definitions: dict[Any, Any]) -> int:
    return sum(copied_bytes(atoms, definitions) for _, atoms in loop.varying)


@dataclass
class _Search:
    """A search for loops in a program.

    Attributes:
        outvars: The outputs of the program.
        definitions: The equation that computes each variable.
        min_rounds: Fewer rounds are left unrolled.
        limit: The bytes that may be copied into stacks, None for any number.
    """

    outvars: Any
    definitions: dict[Any, Any]
    min_rounds: int
    limit: int | None

    def parts(self, equations: list[Any]) -> list[Any]:
        """Split a program's equations, in order, into lists of equations and loops."""
        parts: list[Any] = []
        while True:
            found = self._next(equations)
            if found is None:
                return [*parts, equations]
            before, loop, equations = found
            parts += [before, loop]

    def _next(self, equations: list[Any]) -> tuple[list[Any], Loop, list[Any]] | None:
        """Find the first loop, and return it with the equations before and after it."""
        places = [i for i, eqn in enumerate(equations) if callee(eqn) is not None]
        callees = [callee(equations[i]) for i in places]
        for position in range(len(places)):
            period, rounds = _repeats(callees, position, self.min_rounds)
            if rounds >= self.min_rounds:
                run = places[position : position + period * rounds]
                found = self._loop_at(equations, run, period)
                if found is not None:
                    return found
        return None

    def _loop_at(
        self, equations: list[Any], run: list[int], period: int
    ) -> tuple[list[Any], Loop, list[Any]] | None:
        """Build a loop of these calls, and return it with the equations before and after it."""
        first = run[0]
        calls = {id(equations[place]) for place in run}
        early, dependent = _divided(equations[first:], calls)
        before = equations[:first]
        at = [i for i, eqn in enumerate(dependent) if id(eqn) in calls][::period]
        best: tuple[Loop, list[list[Any]], list[Any]] | None = None
        for rounds, start in _divisions(before, dependent, at, period):
            held = {var for eqn in before[len(start) :] for var in eqn.outvars}
            if not held.isdisjoint(free_variables(early)):
                continue  # an equation moved before the loop would read a result of the loop
            loop = matched(rounds, self.min_rounds)
            if loop is None or (best is not None and loop.rounds <= best[0].rounds):
                continue
            if self.limit is None or _copied(loop, self.definitions) <= self.limit:
                best = loop, rounds, start
        if best is None:
            return None
        loop, rounds, start = best
        # The last round may have been cut: its remaining equations run after the loop.
        rest = rounds[loop.rounds - 1][len(loop.body) :]
        rest += [eqn for equations in rounds[loop.rounds :] for eqn in equations]
        loop.note_results(rounds, rest, self.outvars)
        for equations in rounds[: loop.rounds]:
            for eqn in equations[: len(loop.body)]:
                for var in eqn.outvars:
                    self.definitions.pop(var, None)
        # Equations that need no result of the calls move before the loop, which may read them.
        return start + early, loop, rest


def _divisions(
    before: list[Any], dependent: list[Any], at: list[int], period: int
) -> Iterator[tuple[list[list[Any]], list[Any]]]:
    """Yield ways to divide equations into rounds, with the equations before the first round.

    A round starts with a call, or ends with one.

    Args:
        before: The equations before the first call.
        dependent: The later equations that need a result of the calls.
        at: The index in `dependent` of each round's first call.
        period: How many calls a round has.
    """
    ends = [*at[1:], len(dependent)]
    yield [dependent[a:b] for a, b in zip(at, ends, strict=True)], before
    last = [_last_call(dependent, start, period) + 1 for start in at]
    pieces = [dependent[a:b] for a, b in itertools.pairwise(last)]
    ahead = len(pieces[0]) - (last[0] - at[0])
    if 0 < ahead <= len(before):
        rounds = [before[len(before) - ahead :] + dependent[: last[0]], *pieces]
        rounds[-1] = rounds[-1] + dependent[last[-1] :]
        yield rounds, before[: len(before) - ahead]


def _last_call(equations: list[Any], start: int, period: int) -> int:
    """Return the index of the last of `period` calls from `start` on."""
    calls = (i for i in range(start, len(equations)) if callee(equations[i]) is not None)
    return next(itertools.islice(calls, period - 1, None))


def _repeats(callees: Sequence[Any], start: int, min_rounds: int) -> tuple[int, int]:
    """Return the period that covers the most calls from `start` on, and its number of rounds."""
    best = (1, 1)
    for period in range(1, _MAX_PERIOD + 1):
        pattern = callees[start : start + period]
        rounds = 1
        while callees[start + rounds * period : start + (rounds + 1) * period] == pattern:
            rounds += 1
        if rounds >= min_rounds and period * rounds > best[0] * best[1]:
            best = (period, rounds)
    return best


def _divided(equations: list[Any], calls: set[int]) -> tuple[list[Any], list[Any]]:
    """Split equations into those that need no call's result, and the others (calls included)."""
    results: set[Any] = set()
    early, dependent = [], []
    for eqn in equations:
        needs = any(not isinstance(v, core.Literal) and v in results for v in eqn.invars)
        if needs or id(eqn) in calls:
            results.update(eqn.outvars)
            dependent.append(eqn)
        else:
            early.append(eqn)
    return early, dependent
