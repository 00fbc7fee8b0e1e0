"""Helpers that rewritten code calls where the original indexed a tensor with a boolean mask.

In eager PyTorch, and where tpuport itself traces, every function here does exactly what the code
that it replaces does. Under plain torchax and `jax.jit`, where no size can depend on data, masks
select by position instead: see `tpuport.ops.torchax.masked_rows`. Nothing is imported until a
traced mask is met.
"""

import math
from collections.abc import Callable
from typing import Any

from tpuport.ops.traced import is_plain_torchax


def masked(tensor: Any, *, cut: bool = False) -> Any:
    """Return the tensor, so that `masked(x)[mask]` replaces `x[mask]` on both sides of `=`.

    Args:
        tensor: The tensor to index.
        cut: Whether a write drops the rows beyond those that the mask selects, where the program
            cannot raise the error about their number.
    """
    if not is_plain_torchax(tensor):
        return tensor
    from tpuport.ops.torchax.masked_access import Access

    return Access(tensor, cut=cut)


def masked_select(tensor: Any, mask: Any) -> Any:
    """Return `torch.masked_select(tensor, mask)`."""
    import torch

    if not is_plain_torchax(mask):
        return torch.masked_select(tensor, mask)
    tensor, mask = torch.broadcast_tensors(tensor, mask)
    return masked(tensor)[mask]


def count_rows(tensor: Any, mask: Any) -> Any:
    """Return `len(tensor[mask])`; in a program that torchax alone traces, a 0-d int32 tensor."""
    if not is_plain_torchax(mask):
        return tensor[mask].shape[0]
    from tpuport.ops.torchax.masked_access import count

    return count(tensor, mask)


def count_elements(tensor: Any, mask: Any) -> Any:
    """Return `tensor[mask].numel()`; in a program that torchax alone traces, a 0-d int32 tensor."""
    if not is_plain_torchax(mask):
        return tensor[mask].numel()
    from tpuport.ops.torchax.masked_access import count

    return count(tensor, mask) * math.prod(tensor.shape[mask.ndim :])


def inverse(mask: Any) -> Any:
    """Return `~mask`, to be used as an index."""
    if not is_plain_torchax(mask):
        return ~mask
    from tpuport.ops.torchax.masked_access import Inverse

    return Inverse(mask)


def rowwise(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a torch function so that it also takes the rows of `masked(x)[mask]` in a program."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not any(_has_rows(value) for value in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        from tpuport.ops.torchax.masked_functions import call_with_rows

        return call_with_rows(function, args, kwargs)

    return call


def mismatched(tensor: Any, mask: Any, otherwise: Any, value: Any) -> Any:
    """Return the value of a name after a `try` that writes rows, where a program cannot raise.

    Args:
        tensor: The tensor that the `try` wrote to.
        mask: The mask that it wrote through.
        otherwise: The value of the name after the `try`, in eager PyTorch or without an exception.
        value: The value that the handler assigns to the name.

    Returns:
        `otherwise`; in a program a traced value, which is `value` if the number of rows written
        differs from the number of rows that the mask selects.
    """
    del mask
    # A masked write with `cut=True` leaves it on the tensor, in a program only.
    wrong = getattr(tensor, "_tpuport_mismatched", None)
    if wrong is None:
        return otherwise
    from tpuport.ops.torchax.masked_access import chosen

    return chosen(wrong, value, otherwise)


def _has_rows(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_has_rows(part) for part in value)  # pyright: ignore[reportUnknownVariableType]
    return getattr(type(value), "is_rows", False) is True
