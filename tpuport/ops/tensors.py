"""Tensors made or moved, and attention, for rewritten code."""

import functools
from collections.abc import Callable
from typing import Any

from tpuport.ops.branches import check
from tpuport.ops.traced import is_plain, is_plain_torchax, is_traced


def to_cpu(value: Any) -> Any:
    """Return `value.cpu()`; a traced tensor stays on its device, in the program."""
    return value if is_plain(value) else value.cpu()


def cuda(value: Any, *args: Any, **kwargs: Any) -> Any:
    """Return `value.cuda(*args, **kwargs)` where PyTorch has CUDA, and the value itself elsewhere.

    Args:
        value: A tensor, a module, or anything else with a method `cuda`.
        args: Positional arguments of `cuda`, such as the device's index.
        kwargs: Keyword arguments of `cuda`, such as `non_blocking`.

    Returns:
        The result of `value.cuda`, or `value` itself: tensors and modules stay on their device,
        and a traced tensor stays in its program.
    """
    import torch

    return value.cuda(*args, **kwargs) if torch.cuda.is_available() else value


def attention(*args: Any, **kwargs: Any) -> Any:
    """Return `torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)`.

    A query that may attend to nothing gives zeros, as in PyTorch, also in a program that torchax
    alone traces.
    """
    import torch

    function: Any = torch.nn.functional.scaled_dot_product_attention
    mask: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if not is_plain_torchax(mask):
        return function(*args, **kwargs)
    if mask.dtype is torch.bool:
        empty = ~mask.any(-1, keepdim=True)
        safe = mask | empty
    else:
        empty = (mask == float("-inf")).all(-1, keepdim=True)
        safe = mask.masked_fill(empty, 0.0)
    if len(args) > 3:
        args = (*args[:3], safe, *args[4:])
    else:
        kwargs["attn_mask"] = safe
    # An empty row attends to everything here, as a softmax over nothing is NaN. `where` drops
    # its result, and with it the gradient.
    return torch.where(empty, 0.0, function(*args, **kwargs))


def one_hot(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.nn.functional.one_hot` so that it makes the first columns alone.

    Args:
        function: That function, or any other, which is called as it is.

    Returns:
        A function of an index, the number of classes, and the number of columns to keep. The
        classes may be traced if the columns are known and no more; what `one_hot` refuses is
        refused for them too.
    """
    import torch

    def columns(index: Any, classes: Any, kept: Any) -> Any:
        known = type(kept) is int and kept >= 0
        if function is not torch.nn.functional.one_hot or not is_traced(classes) or not known:
            return function(index, classes)[..., :kept]
        few = f"one_hot: fewer classes than the {kept} columns that the program was traced for"
        for failed, message in (
            ((index < 0).any(), "Class values must be non-negative."),
            ((index >= classes).any(), "Class values must be smaller than num_classes."),
            (classes < kept, few),
        ):
            check(failed, functools.partial(RuntimeError, message))
        return (index.unsqueeze(-1) == torch.arange(kept, device=index.device)).to(torch.int64)

    return columns


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
            from tpuport.ops.torchax.values import filled

            # A device is ignored: a tensor made of a traced number is part of the program.
            dtype = kwargs.get("dtype")
            if function.__name__ == "full_like":
                dtype, shape = dtype or shape.dtype, shape.shape
            return filled((shape,) if isinstance(shape, int) else tuple(shape), value, dtype)
        # PyTorch reads the value of a tensor before it dispatches the call, so the trace would stop
        # there. A traced number passes.
        if getattr(value, "is_traced", False) is True:
            return function(shape, **{**kwargs, "fill_value": value.item()})
        return function(shape, *args, **kwargs)

    return call
