"""Functions that read what the host's state is at the time: files, the environment, seeds."""

import builtins
import functools
import io
import os
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tpuport.foundation.patching.shim import Replacement, Shim, everywhere, original_of
from tpuport.foundation.user_frames import is_inside, is_standard
from tpuport.tracing.core.context import current
from tpuport.tracing.core.guards import HostRead
from tpuport.tracing.patches._count import count

_ENVIRONMENT: Any = type(os.environ)
# Reads that can be repeated, with their owners.
_REPEATED: list[tuple[Any, str]] = [
    *((os, name) for name in ("stat", "lstat", "listdir", "getcwd")),
    (_ENVIRONMENT, "__getitem__"),
    (threading, "active_count"),
    (sys, "getrecursionlimit"),
    (np, "geterr"),
    (torch, "initial_seed"),
    (torch.random, "initial_seed"),
]
# Reads that give something new each time.
_NEW: list[tuple[Any, str]] = [(os, "urandom"), (os, "times"), (uuid, "uuid1"), (uuid, "uuid4")]
_OPENING: list[tuple[Any, str]] = [(builtins, "open"), (io, "open"), (os, "scandir")]
# They read code for messages, and modules.
_OF_CODE = ("linecache.py", "<frozen importlib")
_stat = os.stat


class HostReads(Shim):
    """What code reads of the host while it is traced is read again before each later call.

    If the value has changed, the model is traced again for that call. Values that are new each
    time, such as a `uuid`, cannot be compared so; they are noted as clocks are, for
    `tpuport.model.moments`.
    """

    TARGET = "os.stat"
    REASON = "the program would have what was there when it was traced, at every call"

    def replacements(self) -> list[Replacement]:
        made = [(owner, name, functools.partial(_repeated, name)) for owner, name in _REPEATED]
        made += [(owner, name, _new) for owner, name in _NEW]
        return everywhere([*made, *((owner, name, _opening) for owner, name in _OPENING)])

    def copied(self) -> list[Any]:
        return [original_of(owner, name) for owner, name in (*_REPEATED, *_NEW, *_OPENING)]


def _place() -> str | None:
    """Return the line of the user's code that asks in a trace, by itself or by a library."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith(_OF_CODE[0]) or file.startswith(_OF_CODE[1]):
            return None
        if not _is_passed(file):
            return None if _is_library(file) else f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _noted(name: str, key: Any, again: Callable[[], Any]) -> None:
    trace = current()
    if trace is not None and key not in trace.recorder.guards.reads:
        count(HostReads.TARGET)
        trace.recorder.guards.reads[key] = HostRead(name, again, again())


def _outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function gives, or the class of what it raises."""
    try:
        return function(*args, **kwargs)
    except (OSError, KeyError) as error:
        return type(error)


def _repeated(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def read(*args: Any, **kwargs: Any) -> Any:
        if current() is not None and (place := _place()) is not None:
            again = functools.partial(_outcome, _unread(name, function), *args, **kwargs)
            key = (name, repr(args), repr(kwargs)) if args[:1] != (os.environ,) else args[1]
            _noted(f"what {place} reads by {name}", key, again)
        return function(*args, **kwargs)

    return read


def _unread(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, without what reading a file by it changes of the file."""
    if name not in ("stat", "lstat"):
        return function
    return lambda *args, **kwargs: _fields(function(*args, **kwargs))


def _fields(found: os.stat_result) -> tuple[int, ...]:
    return found.st_mode, found.st_ino, found.st_size, found.st_mtime_ns


def _new(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def read(*args: Any, **kwargs: Any) -> Any:
        trace = current()
        if trace is not None and (place := _place()) is not None:
            trace.recorder.guards.moments.append(place)
        return function(*args, **kwargs)

    return read


def _opening(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def read(file: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if current() is not None and isinstance(file, (str, bytes, os.PathLike)):
            mode = kwargs.get("mode", args[0] if args else "r")
            if set(mode) <= set("rbt") and (place := _place()) is not None:
                again = functools.partial(_outcome, _unread("stat", _stat), file)
                _noted(f"the file that {place} reads", ("stat", repr((file,)), "{}"), again)
        return function(file, *args, **kwargs)

    return read


# Libraries that code reads files by.
_READERS = tuple(os.path.dirname(one.__file__ or "") + os.sep for one in (np, torch))
_is_library = functools.cache(is_inside)


@functools.cache
def _is_passed(file: str) -> bool:
    return is_standard(file) or file.startswith(_READERS)
