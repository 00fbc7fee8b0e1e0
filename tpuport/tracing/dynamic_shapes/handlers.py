"""The table of handlers of ops on tensors of data-dependent size, and helpers for handlers."""

from collections.abc import Callable
from typing import Any

import torch

from tpuport.tracing.core.redispatch import call
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import flat, map_tensors
from tpuport.tracing.dynamic_shapes.extents import strip

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for ATen ops by name (all overloads)."""

    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


def involved(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an op has an operand of data-dependent size, or a traced size argument."""
    return any(_involved(a) for a in args) or any(_involved(a) for a in kwargs.values())


def _involved(value: Any) -> bool:
    if isinstance(value, TracedTensor):
        return value._extents is not None
    if isinstance(value, (list, tuple)):
        return any(_involved(v) or isinstance(v, torch.SymInt) for v in value)
    return isinstance(value, torch.SymInt)


def tensors_of(args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among an op's arguments."""
    return [t for t in flat(tuple(args), kwargs) if isinstance(t, torch.Tensor)]


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the op on physical arrays."""
    return call(
        func,
        tuple(map_tensors(strip, a) for a in args),
        {k: map_tensors(strip, v) for k, v in kwargs.items()},
    )


def dim_of(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, default: int = -1) -> int:
    """Return the dim among an op's arguments, counted from the front."""
    value = args[position] if len(args) > position else kwargs.get("dim", default)
    return int(value) % max(args[0].dim(), 1)
