"""Programs whose code read a clock, or random numbers of the system, while it was traced."""

from collections.abc import Callable
from typing import Any

from tpuport.foundation import pytree
from tpuport.foundation.pytree.sealed import apart
from tpuport.model.program_cache import CachedProgram, release
from tpuport.tracing.core.measured_time import at_another_time, of_a_moment


def refuse_moments(made: CachedProgram, trace: Callable[[], CachedProgram]) -> None:
    """Refuse a program that another moment would make another one.

    It is traced again, with clocks that are wrong by more than a year. Code that only prints or
    logs the time gives the same program.

    Args:
        made: the program.
        trace: traces it again.

    Raises:
        PortError: the second program differs.
    """
    moments = made.outcome.trace.recorder.guards.moments
    if not moments:
        return
    with at_another_time():
        again = trace()
    is_same = is_same_program(made, again, trace)
    release(again.outcome)
    if not is_same:
        raise of_a_moment(
            "what the call computes or leaves depends on a time or a random number of the system"
            " that the code reads",
            moments[0],
        )


def is_same_program(
    made: CachedProgram, again: CachedProgram, trace: Callable[[], CachedProgram]
) -> bool:
    """Return whether a second trace, under other conditions, has made the same program.

    Args:
        made: the program of the first trace.
        again: that of the second.
        trace: traces it once more, under the conditions of the first.
    """
    if _values(made) != _values(again):
        return False
    if made.run.same(again.run):
        return True
    # Derivative rules that hold tensors never compare as equal, whatever the time. Then the rest of
    # the program decides: a time that only a derivative has is not seen.
    likewise = trace()
    is_comparable = made.run.same(likewise.run)
    # A first trace may be another one than all later ones, as torch keeps what it has made in it.
    is_same = not is_comparable and any(
        one.run.same(again.run) or one.run.reads_like(again.run) for one in (made, likewise)
    )
    release(likewise.outcome)
    return is_same


def _values(compiled: CachedProgram) -> Any:
    """Return the Python values that a call of the program returns and leaves."""
    outcome, changes = compiled.outcome, compiled.outcome.python_changes
    after = {} if changes is None else changes.after
    left = {name: repr(apart(pytree.flatten(value)[1])[1]) for name, value in after.items()}
    return outcome.out_spec.key, left, sorted(outcome.state)
