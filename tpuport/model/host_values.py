"""Large tensors of the host that a program uses: arguments of it, each value once."""

import hashlib
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.model import backend

# What is smaller is part of the program's text.
HOIST_BYTES = 16 * 1024


class Hoisted:
    """Arrays for the large host tensors of one trace.

    Code that moves the same table to the device in every layer makes a copy each time: equal ones
    share an array. What a tensor holds counts, not which one it is: the host may write to it.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[torch.Tensor, jax.Array]] = {}

    def array(self, tensor: torch.Tensor) -> jax.Array | None:
        """The array to use instead of embedding a tensor; None for a small one."""
        if tensor.numel() * tensor.element_size() < HOIST_BYTES:
            return None
        content = _content(tensor)
        known = self._known.get(content)
        if known is None:
            with jax.ensure_compile_time_eval():
                known = self._known[content] = (tensor, backend.to_jax(tensor))
        return known[1]

    def tensors(self, kept: list[jax.Array]) -> list[torch.Tensor]:
        """One tensor for each array among `kept`."""
        ids = {id(array) for array in kept}
        return [tensor for tensor, array in self._known.values() if id(array) in ids]


def _content(tensor: torch.Tensor) -> Any:
    array = np.ascontiguousarray(backend.to_numpy_array(tensor)).reshape(-1)
    digest = hashlib.blake2b(array.view(np.uint8).data, digest_size=16).digest()
    return tensor.dtype, tuple(tensor.shape), digest


def uniform(array: jax.Array) -> np.ndarray | None:
    """The element that all of an array are, to the bit; None if they differ or it is traced."""
    if isinstance(array, jax.core.Tracer) or not jnp.issubdtype(array.dtype, np.number):
        return None
    host = np.asarray(array)
    if not host.size:
        return None
    first = host.reshape(-1)[:1]
    raw = host.reshape(-1).view(np.uint8).reshape(host.size, -1)
    return first.reshape(()) if (raw == first.view(np.uint8)).all() else None
