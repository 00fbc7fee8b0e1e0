"""Calls of replaced functions, counted for the report."""

from tpuport.tracing.core.context import current


def count(name: str) -> None:
    """Count a call of a replaced function, where a trace is running."""
    trace = current()
    if trace is not None:
        trace.recorder.counters.shims[name] = trace.recorder.counters.shims.get(name, 0) + 1
