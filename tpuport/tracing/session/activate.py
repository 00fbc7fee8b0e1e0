"""Running a trace: its modes see every ATen op and every torch function of this thread.

Torch code runs in it as eager code, and without kernels that fuse ops.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

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


def eager_compiled() -> Any:
    """Return a context in which functions under `torch.compile` run as eager code.

    There are none unless dynamo was imported, and importing it takes seconds.
    """
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def no_fused_kernels() -> Iterator[None]:
    """Keep torch from oneDNN's fused ops (an LSTM is one), which do not decompose.

    They have no float64 either.
    """
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
