"""The handler of one ATen op, known below the modules that handle it.

A tensor hands each op to the dispatcher, and the dispatcher is made of tensors. So the dispatcher
registers itself here, as lowerings and views do in their tables.
"""

from collections.abc import Callable
from typing import Any

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_HANDLERS: list[Handler] = []


def op_handler(handler: Handler) -> Handler:
    """Register the function that runs one ATen op on traced tensors."""
    _HANDLERS[:] = [handler]
    return handler


def handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one ATen op of which at least one tensor is traced.

    Raises:
        PortError: no lowering, or a form of the op that cannot be kept exact.
    """
    return _HANDLERS[0](func, args, kwargs)
