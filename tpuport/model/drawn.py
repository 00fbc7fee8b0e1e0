"""Programs that take what is drawn on the host before each call."""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.extend import core

from tpuport.foundation.errors import PortError
from tpuport.model.moments import is_same_program
from tpuport.model.program_cache import CachedProgram, CallArguments, release
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.host_tape import REMEDY, TapeChanged
from tpuport.tracing.core.speculation import SpeculationLog
from tpuport.tracing.guards import host_randomness


def with_draws(closed: Any, trace: Trace) -> tuple[Any, Any]:
    """Return a traced program whose last arguments are what its tape gives, and the tape.

    In the trace they are constants, as what a program takes of its tape is known at its end only.
    """
    tape = next(iter(trace.recorder.tapes), None)
    if not tape:
        return closed, None
    jaxpr, taken = closed.jaxpr, {id(array): index for index, array in enumerate(tape.taken)}
    pairs = list(zip(jaxpr.constvars, closed.consts, strict=True))
    moved = {taken[id(const)]: var for var, const in pairs if id(const) in taken}
    # An earlier attempt at the trace has left constants of what it drew.
    used = {v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, core.Var)}
    used.update(v for v in jaxpr.outvars if isinstance(v, core.Var))
    kept = [(var, const) for var, const in pairs if id(const) not in taken and var in used]
    tape.keep(sorted(moved))
    tape.release()
    program = jaxpr.replace(
        constvars=[var for var, _ in kept],
        invars=[*jaxpr.invars, *(moved[index] for index in sorted(moved))],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return core.ClosedJaxpr(program, [const for _, const in kept]), tape


_MOST_TRACES = 16


def settled(
    plan: Callable[[], SpeculationLog], trace: Callable[[], tuple[CachedProgram, Any]]
) -> tuple[CachedProgram, Any]:
    """Trace a program that is right whatever is drawn.

    It is traced again with other states of the generators. A number or size that differs then is
    computed by the program itself.

    Args:
        plan: returns what is known of such calls.
        trace: traces it, and returns it with its constants.

    Raises:
        PortError: something that was drawn is a constant of it.
    """
    place = None
    for _ in range(_MOST_TRACES):
        made, constants = trace()
        if made.tape is None:
            return made, constants
        with _other_states():
            again, _ = trace()
        is_same = is_same_program(made, again, lambda: trace()[0])
        release(again.outcome)
        if is_same:
            return made, constants
        place = made.tape.differing(again.tape) if again.tape else None
        varying = made.tape.varying(again.tape) if again.tape else None
        if varying is None or varying in plan().varying:
            break
        plan().varying.add(varying)
    raise port_error(
        "the program itself, such as a size in it, depends on a draw from the host's generators",
        code="TPU404",
        remedy=REMEDY,
        place=place,
    )


def program_for(
    ported: Any, method: str, state: dict[str, Any], given: CallArguments
) -> tuple[CachedProgram, bool, CallArguments]:
    """Return the program of a call, whether it is new, and the arguments with what is drawn."""
    place = None
    for _ in range(_MOST_TRACES):
        compiled, is_new = ported._program_for(method, state, given, is_call=True)
        if compiled.tape is None:
            return compiled, is_new, given
        module = ported._tracer.master
        compiled.tape.before = host_randomness.States(compiled.tape.held)
        try:
            drawn = compiled.tape.run(module)
        except PortError:
            compiled.tape.before.restore()
            raise
        except TapeChanged as changed:
            compiled.tape.before.restore()
            ported._tracer.plan_for(method, given.spec).varying.add(changed.place)
            ported._cache.drop(compiled)
            place = changed.place
        else:
            return compiled, is_new, dataclasses.replace(given, values=[*given.values, *drawn])
    raise port_error(
        "each program for this call depends on what is drawn from the host's generators",
        code="TPU404",
        remedy=REMEDY,
        place=place,
    )


@contextlib.contextmanager
def _other_states() -> Iterator[None]:
    """Let the host's generators draw other numbers inside."""
    with host_randomness.restored([]):
        random.seed(random.getrandbits(64) ^ 1)
        np.random.seed(np.random.randint(1 << 31))
        yield
