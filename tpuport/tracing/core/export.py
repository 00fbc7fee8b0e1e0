"""Results of ported programs as plain torch tensors and numpy arrays."""

from typing import Any

import jax
import numpy as np
import torch

from tpuport.foundation.interop import backend
from tpuport.foundation.pytree.tree import map_tensors
from tpuport.tracing.core.tensor import TracedTensor, to_cpu


def to_torch(value: Any) -> Any:
    """Copy every tensor or jax array of any pytree to plain CPU torch tensors.

    bfloat16 and int64 are kept.

    Args:
        value: an output of a ported call, `ported.params`, or any structure of tensors and jax
            arrays.

    Returns:
        The same structure holding plain `torch.Tensor`s on the CPU.
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, TracedTensor):
            return to_cpu(leaf)
        if isinstance(leaf, jax.Array):
            return backend.to_torch(leaf)
        if isinstance(leaf, backend.TorchaxTensor):
            return backend.to_torch(leaf.jax())
        return leaf

    return map_tensors(one, value)


def to_numpy(value: Any) -> Any:
    """Copy every tensor or jax array of any pytree to numpy arrays.

    bfloat16 becomes `ml_dtypes.bfloat16`.
    """

    def one(leaf: Any) -> Any:
        return backend.to_numpy_array(leaf) if isinstance(leaf, torch.Tensor) else np.asarray(leaf)

    return map_tensors(one, to_torch(value))
