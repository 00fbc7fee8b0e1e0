"""The tensors to save, each as it will be in the file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop.dtypes import cast
from tpuport.weights.checkpoint import Checkpoint, of_mapping
from tpuport.weights.read import TensorInfo, same_bits


@runtime_checkable
class HasWeights(Protocol):
    """A model that says which weights a checkpoint of it has: a `tpuport.PortedModel`."""

    def _checkpoint_values(
        self, like: Checkpoint | None
    ) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
        """Return the weights by the names of a checkpoint, and their dtypes in its files."""
        ...

    def _checkpoint_metadata(self) -> dict[str, str]:
        """Return what a safetensors file says about them besides."""
        ...


@dataclass(frozen=True)
class Values:
    """Tensors to save.

    Attributes:
        source: Their values.
        dtypes: Their dtypes in the file.
        like: The checkpoint to imitate.
    """

    source: Checkpoint
    dtypes: Mapping[str, torch.dtype]
    like: Checkpoint | None

    def infos(self, names: Iterable[str]) -> dict[str, TensorInfo]:
        """Return name, shape and dtype of these tensors in the file."""
        return {n: TensorInfo(n, self.source[n].shape, self.dtypes[n]) for n in names}

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor as it will be in the file.

        Raises:
            CheckpointError: a value does not fit in the file's dtype.
        """
        found, dtype = self.source.read(name), self.dtypes[name]
        if found.dtype == dtype:
            return found
        if self.like is not None and self.like[name].shape == tuple(found.shape):
            original = self.like.read(name)
            # Held in fewer bits than in the file: an unchanged tensor is saved with all its bits.
            if original.dtype == dtype and same_bits(original.to(found.dtype), found):
                return original
        return cast(found, dtype, name)


def values_of(weights: Mapping[str, Any] | HasWeights, like: Checkpoint | None) -> Values:
    """Return the tensors to save of weights, or of a ported model.

    Raises:
        UsageError: the model has no values, or a name is in only one of `weights` and `like`.
        CheckpointError: a value is neither a tensor nor an array.
    """
    dtypes: dict[str, torch.dtype] = {}
    if isinstance(weights, HasWeights):
        weights, dtypes = weights._checkpoint_values(like)
    source = weights if isinstance(weights, Checkpoint) else of_mapping(weights)
    _refuse_spread(weights)
    if like is not None:
        _check_names(source, like)
        dtypes = {name: info.dtype for name, info in like.items()}
    return Values(source, {n: dtypes.get(n, info.dtype) for n, info in source.items()}, like)


def _refuse_spread(weights: Mapping[str, Any]) -> None:
    for name, value in weights.items():
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            msg = (
                f"{name!r} is spread over several processes; gather it first with"
                " jax.experimental.multihost_utils.process_allgather(x, tiled=True)"
            )
            raise UsageError(msg)


def _check_names(source: Checkpoint, like: Checkpoint) -> None:
    absent = [name for name in like if name not in source]
    more = [name for name in source if name not in like]
    for names, what in ((absent, "not among the weights"), (more, "not in like")):
        if names:
            msg = (
                f"like={str(like.path)!r} has other names than the weights: {', '.join(names[:5])}"
                f" ({len(names)}) {what}; save without like, or pass the weights by its names"
            )
            raise UsageError(msg)
    for name, info in source.items():
        kinds = [
            (d.is_floating_point, d.is_complex, d is torch.bool)
            for d in (info.dtype, like[name].dtype)
        ]
        if kinds[0] != kinds[1]:
            msg = f"{name!r} is {info.dtype} and {like[name].dtype} in like: these differ in kind"
            raise UsageError(msg)
