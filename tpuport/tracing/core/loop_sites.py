"""Loops of the user's code that are worth one `lax.scan`.

Their rounds make a tensor longer (`x = torch.cat([x, y])`), run very many ops, or branch on traced
values.
"""

import dis
import functools
import linecache
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from tpuport.foundation.errors import PortError
from tpuport.foundation.user_frames import is_inside
from tpuport.source.rewrite.live import Site
from tpuport.tracing.core.active import Attempts, innermost
from tpuport.tracing.core.counted_loops import is_counted
from tpuport.tracing.core.errors import TRACER, port_error
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.core.tensor import TracedTensor

# A running frame, by its id, with its code and the instruction that it is at.
Stack = list[tuple[int, CodeType, int]]
# One op in so many looks which loops it is in; a loop that so many of them saw is long.
OPS_APART, _SAMPLES = 32, 8


def note_long() -> None:
    """Note the loops that run now; restart to rewrite a long one over a range or rows.

    Raises:
        RestartTrace: it has not been rewritten yet.
    """
    trace = innermost()
    # A method that has to be one program is refused where a rewritten loop is not.
    if trace is None or trace.explorer is None or trace.explorer.plan.whole:
        return
    plan, counts = trace.explorer.plan, trace.loop_samples
    for frame in _frames():
        code = frame.f_code
        for line in _loop_lines(code, frame.f_lasti):
            key = id(frame), code, line
            counts[key] = counts.get(key, 0) + 1
            is_new = plan.is_new(code, line)
            if counts[key] >= _SAMPLES and is_new:
                if is_counted(frame, line):
                    raise RestartTrace(site=(code, Site(line)))
                counts[key] = 0


def branching_loops() -> list[tuple[CodeType, int]]:
    """Return the loops that run now and have not been rewritten yet, but those over other items."""
    trace = innermost()
    if trace is None or trace.explorer is None or trace.explorer.plan.whole:
        return []
    plan = trace.explorer.plan
    return [
        (frame.f_code, line)
        for frame in _frames()
        for line in _loop_lines(frame.f_code, frame.f_lasti, endless=True)
        if plan.is_new(frame.f_code, line)
        if is_counted(frame, line) or _is_while(frame.f_code.co_filename, line)
    ]


def ask_for(loops: list[tuple[CodeType, int]], unrolled: list[str]) -> None:
    """Restart to have the innermost of some loops, whose rounds branch on traced values, as one.

    Args:
        loops: Those that can be rewritten.
        unrolled: The lines of those that are, and whose rounds ran one by one, outermost first.

    Raises:
        RestartTrace: There is one.
    """
    trace = innermost()
    if trace is None or trace.explorer is None:
        return
    plan = trace.explorer.plan
    for code, line in loops:
        plan.branching.add(f"{code.co_filename}:{line}")
        raise RestartTrace(site=(code, Site(line)))
    for site in reversed(unrolled):
        if site not in plan.branching:
            plan.branching.add(site)
            plan.loops = {key: known for key, known in plan.loops.items() if key[0] != site}
            raise RestartTrace()


def note_joined(parts: Iterable[Any], result: Any) -> None:
    """Note where tensors were joined; restart to rewrite a loop that joins its own result again.

    Raises:
        RestartTrace: the loop has not been rewritten yet.
    """
    trace = innermost()
    if trace is None or trace.explorer is None or not isinstance(result, TracedTensor):
        return
    stack = _stack()
    if not stack:
        return
    sizes, plan = [tuple(torch.Tensor.size(part)) for part in parts], trace.explorer.plan
    size, before = trace.joins.get(stack[0], (None, []))
    for part in parts:
        earlier = part._joined_at if isinstance(part, TracedTensor) else None
        if earlier and stack[0][1:] == earlier[0][1:]:
            _ask(stack, {place[:2] for place in earlier}, plan)
    if size in sizes:  # what this line made before, which the code may have changed since
        _ask(stack, {place[:2] for place in before}, plan, counted=True)
    result._joined_at = stack
    trace.joins[stack[0]] = (tuple(torch.Tensor.size(result)), stack)


def _ask(
    stack: Stack,
    earlier: set[tuple[int, CodeType]],
    plan: Attempts,
    *,
    counted: bool = False,
) -> None:
    """Ask for the innermost loop of the frames that ran both times.

    If it is `counted`, only one over a range, or a `while`, is meant.
    """
    for ident, code, position in stack:
        lines = _loop_lines(code, position) if (ident, code) in earlier else []
        if counted:
            lines = [line for line in lines if _counts(code.co_filename, line)]
        for line in lines:
            if plan.is_new(code, line):
                raise RestartTrace(site=(code, Site(line)))
        if lines:
            if plan.whole:
                why = "it cannot be a function of its variables"
                raise not_whole(why, f"{code.co_filename}:{lines[-1]}")
            return


def _counts(file: str, line: int) -> bool:
    return "range(" in linecache.getline(file, line) or _is_while(file, line)


def _is_while(file: str, line: int) -> bool:
    return linecache.getline(file, line).lstrip().startswith("while ")


def not_whole(why: str, place: str) -> PortError:
    """Return the refusal of a loop whose rounds would be compiled one by one."""
    return port_error(
        f"the rounds of a loop whose tensors grow would be compiled one by one: {why}",
        code="TPU612",
        place=place,
        remedy="write the results into a tensor that has its full size before the loop",
    )


def _stack() -> Stack:
    return [(id(frame), frame.f_code, frame.f_lasti) for frame in _frames()]


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != TRACER:
        if not is_inside(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


@functools.cache
def _loop_lines(code: CodeType, position: int, *, endless: bool = False) -> list[int]:
    """Return the lines of `for`, and `while` with a test, around an instruction, innermost first.

    All are tried: the innermost may be over a list of caches. With `endless`, those of `while True`
    are among them, whose line is that of an instruction before the first of the body.
    """
    found: dict[int, int] = {}
    heads, lines = set(), dict[int, int]()
    for step in dis.get_instructions(code):
        start = None
        if step.opname == "NOP" and step.positions and step.positions.lineno:
            lines[step.offset + 2] = step.positions.lineno
        if endless and step.opname == "JUMP_BACKWARD" and step.argval in lines:
            if step.argval <= position < step.offset:
                found[step.argval] = lines[step.argval]
            continue
        if step.opname == "FOR_ITER":
            heads.add(step.offset)
            start = step.offset if step.offset < position < step.argval else None
        elif step.opname.startswith("POP_JUMP_BACKWARD") and step.argval not in heads:
            start = step.argval if step.argval <= position < step.offset else None
        line = None if step.positions is None else step.positions.lineno
        if start is not None and line is not None:
            found[start] = line
    return [found[start] for start in sorted(found, reverse=True)]
