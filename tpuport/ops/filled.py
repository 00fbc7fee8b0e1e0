"""The helper that rewritten code calls where the original filled a tensor with a traced number."""

from collections.abc import Callable
from typing import Any

from tpuport.ops.masked import is_plain_torchax

__all__ = ["filled"]


def filled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.full` or `torch.full_like` so that the fill value may be traced.

    Args:
        function: `torch.full` or `torch.full_like`.

    Returns:
        A function that does the same as `function` and keeps a traced fill value in the program.
    """

    def call(shape: Any, *args: Any, **kwargs: Any) -> Any:
        value: Any = args[0] if args else kwargs.get("fill_value")
        if is_plain_torchax(value):
            from tpuport.ops.torchax import filled

            traced: Callable[..., Any] = getattr(filled, function.__name__)
            return traced(shape, *args, **kwargs)
        # PyTorch reads the value of a tensor before it dispatches the call, so the trace would stop
        # there. A traced number passes.
        if getattr(value, "is_traced", False) is True:
            return function(shape, **{**kwargs, "fill_value": value.item()})
        return function(shape, *args, **kwargs)

    return call
