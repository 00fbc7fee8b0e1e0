"""The helper that rewritten code calls where the original computed attention with a mask."""

from typing import Any

from tpuport.ops.masked import is_plain_torchax

__all__ = ["attention"]


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
