"""What rewritten code calls where the original named a CUDA device."""

from typing import Any

__all__ = ["cuda"]


def cuda(value: Any, *args: Any, **kwargs: Any) -> Any:
    """`value.cuda(*args, **kwargs)` where PyTorch has CUDA, and the value as it is elsewhere.

    Args:
        value: A tensor, a module, or anything else with a method `cuda`.
        args: What `cuda` takes by position, such as the device's number.
        kwargs: What it takes by name, such as `non_blocking`.

    Returns:
        What `value.cuda` returns, or `value` itself: tensors and modules stay where they are, and
        a traced tensor stays in its program.
    """
    import torch

    return value.cuda(*args, **kwargs) if torch.cuda.is_available() else value
