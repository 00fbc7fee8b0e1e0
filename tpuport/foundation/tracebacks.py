"""Tracebacks for users of someone else's code: without the frames of the machinery around it."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from tpuport.foundation.errors import TpuportError

_OWN = os.path.join(str(Path(__file__).parents[1]), "")
_MACHINERY = ("<frozen runpy>", "<frozen importlib")
_NOTE_OF_JAX = "--------------------\nFor simplicity, JAX has removed"
# Set to 1, it keeps the frames of tpuport.
DEBUG = "TPUPORT_DEBUG"


def trim(error: BaseException) -> None:
    """Drop the frames of tpuport and of Python's import system, here and in what led to the error.

    An error without other frames keeps them, unless tpuport raised it on purpose, or the compiler:
    their messages say it all. The environment variable TPUPORT_DEBUG=1 keeps everything.
    """
    if os.environ.get(DEBUG) == "1":
        return
    for one in _chain(error, set()):
        if notes := getattr(one, "__notes__", None):
            notes[:] = [note for note in notes if not note.startswith(_NOTE_OF_JAX)]
        kept = [frame for frame in _frames(one.__traceback__) if not _is_hidden(frame)]
        if kept or isinstance(one, TpuportError | SyntaxError):
            one.__traceback__ = _linked(kept)


def forget(error: BaseException) -> None:
    """Drop the traceback of an error and of what led to it.

    An error that is kept would keep the variables of all frames alive that ran when it was raised.
    """
    for one in _chain(error, set()):
        one.__traceback__ = None


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    yield error
    for other in (error.__cause__, error.__context__):
        yield from _chain(other, seen)
    if isinstance(error, BaseExceptionGroup):
        for other in error.exceptions:
            yield from _chain(other, seen)


def _frames(trace: TracebackType | None) -> list[TracebackType]:
    found: list[TracebackType] = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _is_hidden(trace: TracebackType) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith(_OWN) or file.startswith(_MACHINERY)


def _linked(frames: list[TracebackType]) -> TracebackType | None:
    last: TracebackType | None = None
    for trace in reversed(frames):
        last = TracebackType(last, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
    return last
