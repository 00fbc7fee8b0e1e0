"""The line of the user's code that is running, and errors that name it."""

import ast
import functools
import linecache
import os
from types import CodeType

from tpuport.foundation.errors import PortError
from tpuport.foundation.user_frames import inside_prefixes, user_frame, user_site
from tpuport.tracing.core.active import innermost

_TRACING = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TRACER = os.path.join(_TRACING, "session", "tracer.py")
_INSIDE = inside_prefixes()


def inside_try() -> bool:
    """Return whether an `except` in the user's code would meet an exception raised now."""
    frame = user_frame()
    while frame is not None and frame.f_code.co_filename != _TRACER:
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
    trace = innermost()
    if trace is not None:
        trace.recorder.refusal = trace.recorder.refusal or error
    return error
