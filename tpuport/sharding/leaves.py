"""Parameters and buffers of a module, a ported model or a mapping, by fqn."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import backend
from tpuport.model.ported_state import PortedState


@dataclass(frozen=True)
class Leaf:
    """Shape and size of one parameter or buffer."""

    shape: tuple[int, ...]
    itemsize: int
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Return its unsharded size."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.itemsize


def shapes_of(target: Any) -> dict[str, Leaf]:
    """Return each parameter's and buffer's shape and size, of a module, ported model or mapping.

    Raises:
        UsageError: `target` is none of these.
    """
    return {name: _leaf(value, name) for name, value in values_of(target).items()}


def values_of(target: Any) -> dict[str, Any]:
    """Return the parameters and buffers themselves, by fqn."""
    if isinstance(target, PortedState):
        return target.by_fqn()
    if isinstance(target, torch.nn.Module):
        return {**dict(target.named_parameters()), **dict(target.named_buffers())}
    if isinstance(target, Mapping):
        return dict(target)
    raise UsageError(
        f"Expected a module, a ported model or a dict by fqn, got a {type(target).__name__}"
    )


def module_of(target: Any) -> torch.nn.Module:
    """Return the module behind a module or a ported model.

    Raises:
        UsageError: `target` is neither.
    """
    if isinstance(target, PortedState):
        return target.module
    if isinstance(target, torch.nn.Module):
        return target
    raise UsageError(f"Expected a module or a ported model, got a {type(target).__name__}")


def _leaf(value: Any, name: str) -> Leaf:
    if isinstance(value, Leaf):
        return value
    if isinstance(value, torch.Tensor):
        dtype = np.dtype(backend.jax_dtype(value.dtype))
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        dtype = value.dtype if _is_key(value.dtype) else np.dtype(value.dtype)
    else:
        raise UsageError(f"Expected an array or a shape for {name!r}, got a {type(value).__name__}")
    return Leaf(tuple(value.shape), int(dtype.itemsize), str(dtype))


def _is_key(dtype: Any) -> bool:
    return not isinstance(dtype, np.dtype | type)
