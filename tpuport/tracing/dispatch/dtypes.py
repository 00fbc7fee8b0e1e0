"""Dtypes that an op has no kernel for, which meta tensors do not tell."""

from typing import Any

import torch

from tpuport.tracing.core.values import map_tensors

# CUDA has kernels for the floating dtypes, also where the CPU has none.
_FLOATING = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
# What eager says about an op and the dtypes of its operands; None if it runs.
_KNOWN: dict[Any, str | None] = {}


def refuse(func: Any, args: Any, kwargs: Any, operands: list[Any]) -> None:
    """Refuse integers, bools and complex numbers where eager does.

    Eager is asked once for each op and dtypes, with operands of one element or none.

    Raises:
        NotImplementedError: as in eager.
    """
    tensors = [o for o in operands if isinstance(o, torch.Tensor)]
    if len(tensors) < len(operands) or all(t.dtype in _FLOATING for t in tensors):
        return
    key = (func, *(t.dtype for t in tensors), kwargs.get("dtype"))
    if key not in _KNOWN:
        _KNOWN[key] = _asked(func, args, kwargs)
    message = _KNOWN[key]
    if message is not None:
        raise NotImplementedError(message)


def _asked(func: Any, args: Any, kwargs: Any) -> str | None:
    def small(tensor: torch.Tensor) -> torch.Tensor:
        sizes = [min(n, 1) for n in torch.Tensor.size(tensor)]
        return torch.zeros(sizes, dtype=tensor.dtype)

    given = [map_tensors(small, a) for a in args]
    named = {name: map_tensors(small, a) for name, a in kwargs.items()}
    try:
        func(*given, **named)
    except NotImplementedError as error:
        return str(error) if "not implemented for" in str(error) else None
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None  # about the sizes, which are not those of the call
    return None
