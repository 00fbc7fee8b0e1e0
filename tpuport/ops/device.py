"""The helper that rewritten code calls where the original moved a value to CUDA."""

from typing import Any

__all__ = ["cuda"]


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
