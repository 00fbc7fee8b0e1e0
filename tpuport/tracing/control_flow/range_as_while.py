"""Loops over a range that traced values end, as a `while`: it carries any number as a variable."""

from functools import partial
from typing import Any

import jax
import torch

from tpuport.foundation.errors import PortError
from tpuport.foundation.plain_loops import begins_unbound
from tpuport.tracing.control_flow.cond import truth
from tpuport.tracing.control_flow.first_rounds import explored
from tpuport.tracing.control_flow.loop_sources import RangeSource, Source
from tpuport.tracing.control_flow.while_loop import traced_while
from tpuport.tracing.core.context import Trace, current
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.core.storage import Flow
from tpuport.tracing.core.tensor import TracedTensor, wrap

# How an attempt begins that follows a refused one; the last of them has no successor.
_NEXT = {None: "after a round", "after a round": "refused"}


def as_while(
    trace: Trace, key: Any, source: Source, operands: tuple[Any, ...], ran: int
) -> tuple[Any, ...] | None:
    """Run a loop over a range that a traced value may end, which is no scan, as a `while`.

    Args:
        trace: The trace.
        key: What the loop is known by.
        source: The loop.
        operands: Its variables.
        ran: How many of its rounds have run.

    Returns:
        Its variables after it; None for another loop, and if that has been refused.

    Raises:
        RestartTrace: It is refused. The next attempt runs a round first, which may give variables
            other types than they begin with.
    """
    if type(source) is not RangeSource or not source.may_end:
        return None
    explorer = trace.explorer
    assert explorer is not None
    known = explorer.plan.loops
    key = ("as while", key)
    if known.get(key) == "refused" or len(source.numbers) <= ran:
        return None
    ended: Any = False
    if begins_unbound(operands) or (known.get(key) and not ran):
        round_ = partial(source.round, ran, operands)
        ended, operands = explored(explorer, round_, source.functions, operands)
        ran += 1
    body, count, first = source.body, len(source.numbers), source.numbers.start
    step = source.numbers.step

    def test(ended: Any, number: Any, *carried: Any) -> Any:
        del carried
        return _both(~truth(ended), truth(number < count))

    def round_of_while(ended: Any, number: Any, *carried: Any) -> tuple[Any, ...]:
        del ended
        stop, *made = body(first + step * number, *carried)
        return stop, number + 1, *made

    def round_by_round() -> BaseException:
        known[key] = "refused"
        return RestartTrace()

    begun = (ended, ran, *operands)
    try:
        ended, _, *made = traced_while(test, round_of_while, begun, round_by_round)
    except PortError as error:
        known[key] = _NEXT[known.get(key)]
        raise RestartTrace() from error
    return (*made, ended) if source.tells else tuple(made)


def _both(first: jax.Array, second: jax.Array) -> TracedTensor:
    """Return the truth of two values as the condition of a loop."""
    trace = current()
    assert trace is not None
    return wrap(first & second, torch.bool, trace=trace, flow=Flow.STOPPED)
