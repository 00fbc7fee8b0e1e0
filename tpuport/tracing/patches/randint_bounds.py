"""Tensors as the bounds of `torch.randint`, which Python would have to know as it parses them."""

from typing import Any

import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.patches._count import count


class RandintBounds(Shim):
    """`torch.randint(low, high, size)` in a trace takes a traced tensor as `low` or `high`.

    It becomes a number of the program, as `high.item()` would be (SpecAugment draws where the
    columns begin that it drops, from what is left of a drawn width).
    """

    TARGET = "torch.randint"
    REASON = "the parser of its arguments asks a tensor for a Python int"

    def replacements(self) -> list[Replacement]:
        eager: Any = torch.randint

        def randint(*args: Any, **kwargs: Any) -> torch.Tensor:
            given = [*args, *kwargs.values()]
            if not any(map(_is_bound, given)):
                return eager(*args, **kwargs)
            count(self.TARGET)
            named = {name: _number(value) for name, value in kwargs.items()}
            return eager(*map(_number, args), **named)

        return [Replacement(torch, "randint", randint)]


def _is_bound(value: Any) -> bool:
    """Return whether a value is a tensor that Python makes an index of."""
    whole = isinstance(value, TracedTensor) and not value.dtype.is_floating_point
    return whole and not value.dtype.is_complex and value.numel() == 1


def _number(value: Any) -> Any:
    return value.item() if _is_bound(value) else value
