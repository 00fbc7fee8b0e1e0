"""Functions of Python's `time`, whose numbers are those of the trace in every call."""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from tpuport.foundation.patching.shim import Replacement, Shim, everywhere, original_of
from tpuport.foundation.user_frames import is_inside
from tpuport.tracing.core.context import current
from tpuport.tracing.core.measured_time import measured
from tpuport.tracing.patches._count import count

_CLOCKS = ("time", "perf_counter", "monotonic", "process_time", "thread_time")
_NAMES = [name for clock in _CLOCKS for name in (clock, f"{clock}_ns")]


class Clock(Shim):
    """`time.time()` and the others give a number that is known again where it leaves the call.

    A call that prints it, or compares it, is no worse for it.
    """

    TARGET = "time.time"
    REASON = "a program would return the time that its trace took, at every call"

    def replacements(self) -> list[Replacement]:
        return everywhere([(time, name, self._read) for name in _NAMES])

    def copied(self) -> list[Any]:
        return [original_of(time, name) for name in _NAMES]

    def _read(self, clock: Callable[[], Any]) -> Callable[[], Any]:
        def read() -> Any:
            number = clock()
            if current() is None:
                return number
            frame = sys._getframe(1)
            if _is_library(frame.f_code.co_filename):
                return number
            count(self.TARGET)
            return measured(number, f"{frame.f_code.co_filename}:{frame.f_lineno}")

        return read


_is_library = functools.cache(is_inside)
