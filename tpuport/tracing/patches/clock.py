"""Functions of Python's `time` and `datetime`, whose values would be those of the trace."""

import datetime
import functools
import gc
import sys
import time
from collections.abc import Callable
from types import CodeType
from typing import Any

from tpuport.foundation.patching.shim import Replacement, Shim, everywhere, original_of
from tpuport.foundation.user_frames import is_inside
from tpuport.tracing.core.context import current
from tpuport.tracing.core.measured_time import HELD, measured, shift
from tpuport.tracing.patches._count import count

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time", "clock_gettime")
_NAMES = [name for clock in _CLOCKS for name in (clock, f"{clock}_ns")]
# Functions that take the time of now where they are given none, with the place of that argument.
_OF_NOW = {"gmtime": 0, "localtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}
_DATES = ("datetime", "date")
_now, _localtime = time.time, time.localtime


class Clock(Shim):
    """`time.time()` and the others give a number that is known again where it leaves the call.

    A call that prints it, or compares it, is no worse for it. The trace knows that it read a clock.
    """

    TARGET = "time.time"
    REASON = "a program would return the time that its trace took, at every call"

    def replacements(self) -> list[Replacement]:
        made = [(time, name, _number) for name in _NAMES]
        made += [(time, name, _formatted) for name in _OF_NOW]
        return everywhere([*made, *((datetime, name, _dates) for name in _DATES)])

    def copied(self) -> list[Any]:
        named = [*((time, name) for name in (*_NAMES, *_OF_NOW)), *((datetime, n) for n in _DATES)]
        return [original_of(owner, name) for owner, name in named]


def _place() -> str | None:
    """Return the line of the user's code that reads a clock in a trace, and note it there."""
    trace = current()
    if trace is None:
        return None
    frame = sys._getframe(2)
    if _is_library(frame.f_code.co_filename) or _is_of_collection(frame.f_code):
        return None
    count(Clock.TARGET)
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    trace.recorder.guards.moments.append(place)
    return place


def _is_of_collection(code: CodeType) -> bool:
    """Return whether Python runs this code when it collects garbage: no code of the call."""
    return any(getattr(one, "__code__", None) is code for one in gc.callbacks)


def _number(clock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clock)
    def read(*args: Any) -> Any:
        number, place = clock(*args), _place()
        if place is None:
            return number
        return measured(number + type(number)(shift() * _unit(number)), place)

    HELD[id(clock)] = read
    return read


def _unit(number: Any) -> int:
    return 10**9 if type(number) is int else 1


def _formatted(function: Callable[..., Any]) -> Callable[..., Any]:
    index = _OF_NOW[function.__name__]

    @functools.wraps(function)
    def read(*args: Any) -> Any:
        is_now = len(args) <= index or (args[index] is None and index == 0)
        if not is_now or _place() is None:
            return function(*args)
        then = _now() + shift()
        takes_fields = function.__name__ in ("asctime", "strftime")
        return function(*args[:index], _localtime(then) if takes_fields else then)

    HELD[id(function)] = read
    return read


@functools.cache
def _dates(base: Any) -> Any:
    """Return a class that makes dates of another one, and the date of now by clocks of the trace.

    Its instances are those of the other class, which is the user's.
    """

    def is_date(kind: Any, instance: Any) -> bool:
        del kind
        return isinstance(instance, base)

    def is_kind(kind: Any, subclass: Any) -> bool:
        del kind
        return issubclass(subclass, base)

    checks = {"__instancecheck__": is_date, "__subclasscheck__": is_kind}
    likewise = type("Likewise", (type(base),), checks)

    def now(name: str) -> classmethod:
        def read(cls: Any, *args: Any, **kwargs: Any) -> Any:
            del cls
            made = getattr(base, name)(*args, **kwargs)
            return made if _place() is None else made + datetime.timedelta(seconds=shift())

        return classmethod(read)

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        del cls
        return base(*args, **kwargs)

    names = [name for name in ("now", "utcnow", "today") if hasattr(base, name)]
    methods = {"__new__": make, **{name: now(name) for name in names}}
    return likewise(base.__name__, (base,), {**methods, "__module__": base.__module__})


_is_library = functools.cache(is_inside)
