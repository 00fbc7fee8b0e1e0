"""What one attempt at a loop as one program tells the next."""

from dataclasses import replace
from typing import Any

from tpuport.foundation.user_frames import user_line
from tpuport.tracing.control_flow.appended import Unread
from tpuport.tracing.control_flow.first_rounds import reason
from tpuport.tracing.control_flow.growth import Growth
from tpuport.tracing.control_flow.loop_sources import CountedSource, RangeSource, Source
from tpuport.tracing.control_flow.path_explorer import MAX_BRANCHES
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.dynamic_shapes.counted_rows import refused

SHARES = "a variable, or what it appends to a list, shares memory with what is written later"


def left(
    loops: dict[Any, Any], key: Any, source: Source, growth: Growth, why: str
) -> BaseException:
    """Return what to raise where code after a loop does `why` with what it left."""
    if isinstance(source, CountedSource) and why != SHARES:
        return refused(why)
    why = why if why == SHARES else f"the list to which it appends is {why} at {user_line()}"
    loops[key] = Growth(why=why, ends=_is_long(source, growth))
    return RestartTrace()


def next_try(source: Source, growth: Growth, error: Exception) -> Growth:
    """Return what is known of a loop that was not one program, for the next attempt.

    With the rows of a list carried or without its first round it may be one; otherwise it is what
    it was before.
    """
    is_reading = isinstance(error, TypeError) or (isinstance(error, Unread) and error.is_reading)
    if is_reading and source.may_end and not all(one.is_read for one in growth.lists):
        read = [replace(one, is_read=True) for one in growth.lists]
        return replace(growth, lists=tuple(read))
    if growth.peel == 0 and not isinstance(source, CountedSource):
        return Growth(1)
    return Growth(growth.peel, why=reason(error), ends=_is_long(source, growth))


def _is_long(source: Source, growth: Growth) -> bool:
    """Return whether a loop that a traced value ends, and that appends, is too long for paths."""
    rounds = len(source.numbers) if isinstance(source, RangeSource) else 0
    return bool(growth.lists) and source.may_end and rounds > MAX_BRANCHES
