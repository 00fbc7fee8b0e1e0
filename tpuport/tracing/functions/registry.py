"""The table of torch functions that are handled while a trace runs, and tests for handlers."""

from collections.abc import Callable
from typing import Any

import torch

from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import flat

Handler = Callable[[Trace, Any, tuple[Any, ...], dict[str, Any]], Any]


FUNCTIONS: dict[Any, Handler] = {}


def function(*targets: Any) -> Callable[[Handler], Handler]:
    """Register a handler for torch functions.

    A handler may return NotImplemented: torch then runs the call.
    """

    def register(handler: Handler) -> Handler:
        for target in targets:
            FUNCTIONS[target] = handler
        return handler

    return register


def traced(trace: Trace, value: Any) -> TracedTensor | None:
    """Return `value` if it is traced, else its traced alias, or None if it has none."""
    if isinstance(value, TracedTensor):
        return value
    return trace.alias(value) if isinstance(value, torch.Tensor) else None


def holds_traced(trace: Trace, data: Any) -> bool:
    """Return whether nested lists hold a traced tensor or number."""
    return any(
        isinstance(one, sym_numbers.SYMBOLIC) or traced(trace, one) is not None
        for one in flat((data,), {})
    )


def any_traced(trace: Trace, values: Any) -> bool:
    """Return whether one of these values is a traced tensor, or one with a traced alias."""
    return any(traced(trace, v) is not None for v in values if isinstance(v, torch.Tensor))
