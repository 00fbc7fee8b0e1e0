"""The loop of the user's code whose rounds make a tensor longer: `x = torch.cat([x, y])`."""

import dis
import functools
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from tpuport.foundation.errors import PortError
from tpuport.foundation.user_frames import is_inside
from tpuport.source.rewrite.live import Site
from tpuport.tracing.core.active import innermost
from tpuport.tracing.core.errors import TRACER, port_error
from tpuport.tracing.core.speculation import RestartTrace, SpeculationLog
from tpuport.tracing.core.tensor import TracedTensor

# A running frame, by its id, with its code and the instruction that it is at.
Stack = list[tuple[int, CodeType, int]]


def note_joined(parts: Iterable[Any], result: Any) -> None:
    """Note where tensors were joined; restart to rewrite a loop that joins its own result again.

    Raises:
        RestartTrace: the loop has not been rewritten yet.
    """
    trace = innermost()
    if trace is None or trace.explorer is None or not isinstance(result, TracedTensor):
        return
    stack = _stack()
    for part in parts:
        earlier = part._joined_at if isinstance(part, TracedTensor) else None
        if stack and earlier and stack[0][1:] == earlier[0][1:]:
            _ask(stack, {place[:2] for place in earlier}, trace.explorer.plan)
    result._joined_at = stack


def _ask(stack: Stack, earlier: set[tuple[int, CodeType]], plan: SpeculationLog) -> None:
    for ident, code, position in stack:
        line = _loop_line(code, position) if (ident, code) in earlier else None
        if line is not None:
            if (code.co_filename, line, None) not in plan.tried:
                raise RestartTrace(site=(code, Site(line)))
            if plan.whole:
                why = "it cannot be a function of its variables"
                raise not_whole(why, f"{code.co_filename}:{line}")
            return


def not_whole(why: str, place: str) -> PortError:
    """Return the refusal of a loop whose rounds would be compiled one by one."""
    return port_error(
        f"the rounds of a loop whose tensors grow would be compiled one by one: {why}",
        code="TPU612",
        place=place,
        remedy="write the results into a tensor that has its full size before the loop",
    )


def _stack() -> Stack:
    frame: FrameType | None = sys._getframe(1)
    found: Stack = []
    while frame is not None and frame.f_code.co_filename != TRACER:
        if not is_inside(frame.f_code.co_filename):
            found.append((id(frame), frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


@functools.cache
def _loop_line(code: CodeType, position: int) -> int | None:
    """Return the line of the innermost `for` around an instruction."""
    inner = None
    for step in dis.get_instructions(code):
        if step.opname == "FOR_ITER" and step.offset < position < step.argval:
            inner = step.positions
    return None if inner is None else inner.lineno
