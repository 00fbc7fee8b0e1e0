"""New tensors filled with a traced number, for code that plain torchax traces.

Each function takes what the torch function of its name takes and returns what that returns. The
device argument is ignored: a tensor made of a traced number is part of the program.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch
import torchax
from torchax.tensor import Tensor

from tpuport.foundation.interop import backend
from tpuport.ops.torchax.values import as_array, kind_of


def full(size: Any, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    """Return `torch.full(size, fill_value)`, by default of the dtype for that kind of number."""
    shape = (size,) if isinstance(size, int) else tuple(size)
    return _filled(shape, fill_value, dtype or _default(fill_value))


def full_like(
    input: torch.Tensor, fill_value: Any, *, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    """Return `torch.full_like(input, fill_value)`."""
    return _filled(tuple(input.shape), fill_value, dtype or input.dtype)


def _filled(shape: tuple[int, ...], value: Any, dtype: torch.dtype) -> torch.Tensor:
    array = as_array(value)
    if array.ndim:
        raise TypeError("argument 'fill_value' must be Number, not Tensor")
    array = jax.lax.stop_gradient(array).astype(backend.jax_dtype(dtype))
    return Tensor(jnp.broadcast_to(array, shape), torchax.default_env())


def _default(number: Any) -> torch.dtype:
    """Return the dtype that PyTorch gives a new tensor filled with this number."""
    kind = kind_of(as_array(number).dtype)
    if kind is float:
        return torch.get_default_dtype()
    return {bool: torch.bool, int: torch.int64}.get(kind, torch.complex64)
