"""Large host tensors that a program uses: they become its arguments, equal ones the same one."""

import hashlib
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.foundation.interop import backend

# Smaller constants are embedded in the program.
HOIST_BYTES = 16 * 1024


class Hoisted:
    """Arrays for the large host tensors of one trace.

    Code that moves the same table to the device in every layer makes a copy each time, so equal
    tensors share an array. They are compared by content, not by identity: the host may write to a
    tensor between two uses.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[torch.Tensor, jax.Array]] = {}

    def array(self, tensor: torch.Tensor) -> jax.Array | None:
        """Return the array to use instead of embedding a tensor; None for a small one."""
        if tensor.numel() * tensor.element_size() < HOIST_BYTES:
            return None
        content = _content(tensor)
        known = self._known.get(content)
        if known is None:
            # Concrete, though a trace is running: the array outlives it as an argument.
            with jax.ensure_compile_time_eval():
                known = self._known[content] = (tensor, backend.to_jax(tensor))
        return known[1]

    def tensors(self, kept: list[jax.Array]) -> list[torch.Tensor]:
        """Return one host tensor for each array among `kept`."""
        ids = {id(array) for array in kept}
        return [tensor for tensor, array in self._known.values() if id(array) in ids]


def _content(tensor: torch.Tensor) -> Any:
    array = np.ascontiguousarray(backend.to_numpy_array(tensor)).reshape(-1)
    digest = hashlib.blake2b(array.view(np.uint8).data, digest_size=16).digest()
    return tensor.dtype, tuple(tensor.shape), digest


def uniform(array: jax.Array) -> np.ndarray | None:
    """Return the element that all of an array equal; None if they differ or it is traced."""
    if isinstance(array, jax.core.Tracer) or not jnp.issubdtype(array.dtype, np.number):
        return None
    host = np.asarray(array)
    if not host.size:
        return None
    # Compared as bytes: -0.0 == 0.0, and nan != nan.
    first = host.reshape(-1)[:1]
    raw = host.reshape(-1).view(np.uint8).reshape(host.size, -1)
    return first.reshape(()) if (raw == first.view(np.uint8)).all() else None
