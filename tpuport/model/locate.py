"""Where in the user's code we are, and errors that say so."""

import linecache
import os
import sys
from types import CodeType, FrameType
from typing import Any

import jax
import torch

from tpuport.errors import PortError

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(module.__file__ or "")) + os.sep for module in (torch, jax)
)
_INSIDE = (_HERE + os.sep, *_LIBRARIES, os.path.dirname(os.__file__) + os.sep + "contextlib", "<frozen")


def user_frame() -> FrameType | None:
    """The innermost frame that is neither tpuport's nor torch's nor jax's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INSIDE) and "torchax" not in name:
            return frame
        frame = frame.f_back
    return None


def user_site() -> tuple[str, int, CodeType] | None:
    """File, line and code object of the user's code that is running."""
    frame = user_frame()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code)


def user_line() -> str:
    """`file:line` of the user's code that is running."""
    site = user_site()
    return "?" if site is None else f"{site[0]}:{site[1]}"


def port_error(
    message: str, *, code: str | None = None, remedy: str, cause: BaseException | None = None
) -> PortError:
    """A PortError at the user's line that is running now."""
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
    """The trace running in this thread, if any (imported late: the trace module needs this one)."""
    from tpuport.model.trace import current

    return current()
