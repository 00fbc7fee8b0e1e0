"""The line of the user's code that is running, and errors that name it."""

import ast
import functools
import linecache
import os
import sys
from types import CodeType, FrameType
from typing import Any

from tpuport.diagnosis.frames import inside_prefixes
from tpuport.errors import PortError

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PROGRAM = os.path.join(_HERE, "model", "program.py")
_INSIDE = inside_prefixes()


def user_frame() -> FrameType | None:
    """Return the innermost frame that is neither tpuport's nor torch's nor jax's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INSIDE):
            return frame
        frame = frame.f_back
    return None


def user_site() -> tuple[str, int, CodeType] | None:
    """Return the file, line and code object of the user's code that is running."""
    frame = user_frame()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code)


def inside_try() -> bool:
    """Return whether an `except` in the user's code would meet an exception raised now."""
    frame = user_frame()
    while frame is not None and frame.f_code.co_filename != _PROGRAM:
        if frame.f_lineno in _guarded_lines(frame.f_code):
            return True
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=4096)
def _guarded_lines(code: CodeType) -> frozenset[int]:
    """Return the lines of a function's file that are in the body of a `try` with an `except`."""
    if code.co_filename.startswith(_INSIDE):
        return frozenset()
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return frozenset()
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and node.handlers:
            lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
    return frozenset(lines)


def user_line() -> str:
    """Return `file:line` of the user's code that is running."""
    site = user_site()
    return "?" if site is None else f"{site[0]}:{site[1]}"


def port_error(
    message: str, *, code: str | None = None, remedy: str, cause: BaseException | None = None
) -> PortError:
    """Return a PortError at the user's line that is running now."""
    site = user_site()
    file, line = (site[0], site[1]) if site else (None, None)
    source = linecache.getline(file, line).strip() if file and line else None
    error = PortError(message, code=code, file=file, line=line, source_line=source, remedy=remedy)
    error.__cause__ = cause
    # A bare `except` in the user's code must not turn a refusal into another path of the program.
    trace = trace_running()
    if trace is not None:
        trace.refusal = trace.refusal or error
    return error


def trace_running() -> Any:
    """Return the trace running in this thread, if any."""
    # Imported late: the trace module imports this one.
    from tpuport.model.trace import current

    return current()
