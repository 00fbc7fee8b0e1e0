"""Calls of an op from the code that handles another op."""

from typing import Any

from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import current
from tpuport.tracing.core.op_handler import handle
from tpuport.tracing.core.op_info import op_info
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import flat


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an op: through `dispatch` if it concerns the trace, else (on host tensors) in torch."""
    tensors = flat(args, kwargs)
    trace = current()
    random = op_info(func).is_random
    if any(isinstance(t, (TracedTensor, *sym_numbers.SYMBOLIC)) for t in tensors) or (
        trace is not None and (random or any(trace.alias(t) is not None for t in tensors))
    ):
        return handle(func, args, kwargs)
    return func(*args, **kwargs)
