"""Running a trace: its modes see every ATen op and every torch function of this thread."""

import contextlib
from collections.abc import Iterator

from tpuport.tracing.core import active as active_traces
from tpuport.tracing.core.context import Trace
from tpuport.tracing.session.modes import DispatchMode, FunctionMode


@contextlib.contextmanager
def active(trace: Trace) -> Iterator[Trace]:
    """Make `trace` the running one: torch calls in this thread go through its modes."""
    active_traces.push(trace)
    trace.dispatch_mode, trace.function_mode = DispatchMode(trace), FunctionMode(trace)
    try:
        with trace.dispatch_mode, trace.function_mode:
            yield trace
    finally:
        active_traces.pop()
        trace.closed = True
