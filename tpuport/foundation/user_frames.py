"""Distinction between the user's lines and those of the libraries below them."""

import contextlib
import functools
import importlib.util
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import Any

_TPUPORT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PYTHON = os.path.dirname(os.__file__) + os.sep
_LIBRARIES = ("torch", "torchax", "jax", "jaxlib", "numpy")


@functools.cache
def inside_prefixes() -> tuple[str, ...]:
    """Return the file name prefixes of library code, without importing the libraries."""
    found = [_TPUPORT + os.sep]
    for name in _LIBRARIES:
        # `find_spec` raises for a module that a test has hidden in `sys.modules`.
        with contextlib.suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.origin is not None:
                found.append(os.path.dirname(os.path.abspath(spec.origin)) + os.sep)
    return (*found, os.path.join(os.path.dirname(os.__file__), "contextlib"), "<frozen")


def is_inside(file: str) -> bool:
    """Return whether a file belongs to tpuport, torch, torchax, jax, numpy or Python."""
    return file.startswith(inside_prefixes()) or is_standard(file)


def is_standard(file: str) -> bool:
    """Return whether a file belongs to Python."""
    packages = ("site-packages", "dist-packages")
    is_of_python = file.startswith((_PYTHON, "<frozen"))
    return is_of_python and not any(part in file for part in packages)


@dataclass(frozen=True)
class CodePlace:
    """A line of code.

    Attributes:
        file: Its file, as Python names it.
        line: The line, counted from 1.
        source: The code there, without surrounding space; None where it cannot be read.
    """

    file: str
    line: int
    source: str | None

    @classmethod
    def at(cls, file: str, line: int) -> "CodePlace":
        """Make a place with the code that the file has there now."""
        return cls(file, line, linecache.getline(file, line).strip() or None)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def raised_by_tpuport(error: BaseException) -> bool:
    """Return whether the line that raised an error is one of tpuport."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_code.co_filename.startswith(_TPUPORT + os.sep)


def place_of(function: Any) -> str | None:
    """Return where a function is defined, as `file:line`; None for one that is not of Python."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else None


def user_places(trace: TracebackType | None) -> Iterator[CodePlace]:
    """Yield the lines of a traceback that are the user's, the innermost first."""
    for frame, line in reversed(list(traceback.walk_tb(trace))):
        if not is_inside(frame.f_code.co_filename):
            yield CodePlace.at(frame.f_code.co_filename, line)


def ends_inside(trace: TracebackType | None) -> bool:
    """Return whether a traceback ends in library code: the user's own code raised nothing."""
    frames = list(traceback.walk_tb(trace))
    return bool(frames) and is_inside(frames[-1][0].f_code.co_filename)


def passes_through(trace: TracebackType | None, file: str) -> bool:
    """Return whether a traceback has a frame of a tpuport file, named relative to the package."""
    wanted = os.path.join(_TPUPORT, *file.split("/"))
    return any(frame.f_code.co_filename == wanted for frame, _ in traceback.walk_tb(trace))


def failing_line(trace: TracebackType | None) -> tuple[str, CodePlace, CodeType] | None:
    """Return the innermost line of a traceback if it is tpuport's or torchax's and raises nothing.

    Returns:
        The package, the line with its file relative to where the package lies, and its code object;
        None if the line is of other code, or a `raise` statement.
    """
    frames = list(traceback.walk_tb(trace))
    if not frames:
        return None
    frame, line = frames[-1]
    place = CodePlace.at(frame.f_code.co_filename, line)
    for folder in inside_prefixes():
        package = os.path.basename(folder.rstrip(os.sep))
        if package in ("tpuport", "torchax") and place.file.startswith(folder):
            if (place.source or "raise").startswith("raise"):
                return None
            file = os.path.join(package, place.file.removeprefix(folder))
            return package, CodePlace(file, line, place.source), frame.f_code
    return None


def running_module(trace: TracebackType | None) -> str | None:
    """Return the class of the innermost `forward` of a traceback that is the user's."""
    for frame, _ in reversed(list(traceback.walk_tb(trace))):
        code = frame.f_code
        if code.co_name == "forward" and not is_inside(code.co_filename):
            return type(frame.f_locals["self"]).__name__ if "self" in frame.f_locals else None
    return None


def user_frame() -> FrameType | None:
    """Return the innermost running frame that is neither tpuport's nor torch's nor jax's."""
    return next(user_frames(), None)


def user_frames() -> Iterator[FrameType]:
    """Yield the running frames that are not of tpuport, torch or jax, the innermost first."""
    inside = inside_prefixes()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(inside):
            yield frame
        frame = frame.f_back


def user_site() -> tuple[str, int, CodeType] | None:
    """Return the file, line and code object of the user's code that is running."""
    frame = user_frame()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code)


def user_line() -> str:
    """Return `file:line` of the user's code that is running, "?" where none is."""
    site = user_site()
    return "?" if site is None else f"{site[0]}:{site[1]}"
