"""Arithmetic of a traced tensor with an array of numpy: `x * np.hanning(9)`."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tpuport.foundation.interop import backend
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core.tensor import TracedTensor


class NumpyOperands(Shim):
    """`x + a` and others of a tensor and an array give a tensor of numpy's dtype for the two.

    torch leaves these operators to numpy, which takes the tensor for an array and returns a tensor.
    What numpy refuses (the tensor requires grad, or has a dtype that numpy lacks), this refuses.
    """

    TARGET = "torch.Tensor.__mul__"
    REASON = "numpy reads the values of a tensor in C, and a traced one has none yet"

    def replacements(self) -> list[Replacement]:
        return [Replacement(TracedTensor, name, _method(name)) for name in _OPERATORS]


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    **{"__add__": operator.add, "__sub__": operator.sub, "__mul__": operator.mul},
    **{"__truediv__": operator.truediv, "__pow__": operator.pow},
}


def _method(name: str) -> Callable[[torch.Tensor, Any], Any]:
    original = getattr(torch.Tensor, name)

    def method(self: torch.Tensor, other: Any) -> Any:
        if type(other) is not np.ndarray or not _is_taken(self, other):
            return original(self, other)
        held = backend.torch_dtype(np.result_type(_numpy_dtype(self), other.dtype))
        array = torch.from_numpy(np.array(other)).to(held)
        return original(self.to(held), array)

    return method


def _is_taken(tensor: torch.Tensor, array: np.ndarray) -> bool:
    """Return whether torch computes what numpy does, of numbers that are no integers."""
    if tensor.requires_grad or tensor.dtype not in _NUMPY or array.dtype.kind not in "biuf":
        return False
    made = np.result_type(_numpy_dtype(tensor), array.dtype)
    return made in (np.float32, np.float64)


def _numpy_dtype(tensor: torch.Tensor) -> np.dtype:
    return _NUMPY[tensor.dtype]


_NUMPY = {
    **{torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)},
    **{torch.int32: np.dtype(np.int32), torch.int64: np.dtype(np.int64)},
    **{torch.uint8: np.dtype(np.uint8), torch.bool: np.dtype(np.bool_)},
}
