"""The distinct elements of a tensor: as many as there are, at most all."""

from typing import Any

import torch

from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.dynamic_shapes.extents import extents_of, refuse
from tpuport.tracing.dynamic_shapes.handlers import handles

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@handles("_unique2")
def unique(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """Return the distinct elements in order, where each element is among them, and how often."""
    source = args[0]
    if extents_of(source):
        raise refuse(func)
    asked = _asked(("sorted", "return_inverse", "return_counts"), args, kwargs)
    values, order = torch.sort(source.detach().reshape(-1), stable=True)
    found, inverse, counts = _runs(values, asked)
    if isinstance(found, TracedTensor) and not source.dtype.is_floating_point:
        found._bounds, found._ascends = source._bounds, True
    if inverse.numel():
        inverse = torch.empty_like(inverse).scatter(0, order, inverse).reshape(source.shape)
        inverse._bounds = (0, max(values.numel() - 1, 0))  # type: ignore[attr-defined]
    return found, inverse, counts


@handles("unique_consecutive")
def unique_consecutive(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """Return the first element of each run of equal ones, the run of each, and their lengths."""
    source = args[0]
    asked = _asked(("return_inverse", "return_counts", "dim"), args, kwargs)
    if extents_of(source) or asked.get("dim") is not None:
        raise refuse(func, " along a dim" if asked.get("dim") is not None else "")
    found, inverse, counts = _runs(source.detach().reshape(-1), asked)
    return found, inverse.reshape(source.shape) if inverse.numel() else inverse, counts


def _asked(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args[1:], strict=False)) | kwargs


def _runs(values: torch.Tensor, asked: dict[str, Any]) -> Found:
    """Return the first element of each run of a vector, the number of each one's run, and lengths.

    What was not asked for is empty.
    """
    size = values.shape[0]
    first = torch.ones_like(values[:1], dtype=torch.bool)
    starts = torch.cat([first, values[1:] != values[:-1]])
    inverse = counts = torch.empty(0, dtype=torch.int64)
    if asked.get("return_inverse"):
        inverse = torch.cumsum(starts, 0) - 1
    if asked.get("return_counts"):
        places = torch.arange(size)
        # The next start after each place, or the end.
        ends = torch.full((1,), size)
        later = torch.cat([torch.where(starts, places, size)[1:], ends])
        following = torch.cummin(later.flip(0), 0).values.flip(0) if size else later[:0]
        counts = (following - places)[starts]
    return values[starts], inverse, counts
