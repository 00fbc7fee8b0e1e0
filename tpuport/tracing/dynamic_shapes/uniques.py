"""The distinct elements of a tensor: as many as there are, at most all."""

from typing import Any

import torch

from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.dynamic_shapes.extents import attach, extents_of, refuse, strip
from tpuport.tracing.dynamic_shapes.handlers import handles
from tpuport.tracing.dynamic_shapes.statistics import flattened

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@handles("_unique2")
def unique(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """Return the distinct elements in order, where each element is among them, and how often."""
    source = args[0]
    asked = _asked(("sorted", "return_inverse", "return_counts"), args, kwargs)
    values, order = torch.sort(flattened(source.detach()), stable=True)
    found, inverse, counts = _runs(values, asked)
    if isinstance(found, TracedTensor) and not source.dtype.is_floating_point:
        found._bounds, found._ascends = source._bounds, True
    if asked.get("return_inverse") and torch.Tensor.numel(inverse):
        inverse = _put_back(inverse, order)
        inverse = inverse if source.dim() == 1 else _shaped_as(inverse, source)
        inverse._bounds = (0, max(torch.Tensor.numel(values) - 1, 0))  # type: ignore[attr-defined]
    return found, inverse, counts


@handles("unique_consecutive")
def unique_consecutive(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """Return the first element of each run of equal ones, the run of each, and their lengths."""
    source = args[0]
    asked = _asked(("return_inverse", "return_counts", "dim"), args, kwargs)
    dim = asked.get("dim")
    if dim is not None and extents_of(source):
        raise refuse(func, ", along a dim")
    if dim is not None:
        rows = source.detach().movedim(dim, 0)
        found, inverse, counts = _runs(rows, asked)
        return _moved(found, dim), inverse, counts
    found, inverse, counts = _runs(flattened(source.detach()), asked)
    is_asked = bool(asked.get("return_inverse"))
    return found, _shaped_as(inverse, source) if is_asked else inverse, counts


# Rows are sorted by one column after the other.
_MOST_COLUMNS = 64


@handles("unique_dim")
def unique_dim(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Found:
    """Return the distinct slices along a dim in order, where each one is, and how often."""
    source, dim = args[0], args[1]
    asked = _asked(("dim", "sorted", "return_inverse", "return_counts"), args, kwargs)
    if extents_of(source) or not source.numel():
        raise refuse(func, "" if extents_of(source) else ", without elements")
    rows = source.detach().movedim(dim, 0)
    columns = rows.reshape(rows.shape[0], -1)
    if columns.shape[1] > _MOST_COLUMNS:
        raise refuse(func, f", of slices with more than {_MOST_COLUMNS} elements")
    order = torch.sort(columns[:, -1], stable=True).indices
    for column in reversed(range(columns.shape[1] - 1)):
        order = order[torch.sort(columns[order, column], stable=True).indices]
    found, inverse, counts = _runs(rows[order], asked)
    if asked.get("return_inverse"):
        inverse = _put_back(inverse, order)
        inverse._bounds = (0, rows.shape[0] - 1)  # type: ignore[attr-defined]
    return _moved(found, dim), inverse, counts


def _moved(rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Move the first dim to a place."""
    order = list(range(1, rows.dim()))
    order.insert(dim % rows.dim(), 0)
    return rows.permute(order)


def _shaped_as(rows: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    made = strip(rows).view(torch.Tensor.size(source))
    return attach(made, dict(extents_of(source))) if extents_of(source) else made


def _put_back(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return values to the places that they had before they were taken in an order."""
    return values[torch.sort(order).indices]


def _asked(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args[1:], strict=False)) | kwargs


def _runs(values: torch.Tensor, asked: dict[str, Any]) -> Found:
    """Return the first row of each run of equal ones, the number of each one's run, and lengths.

    What was not asked for is empty.
    """

    first = torch.ones_like(values[:1], dtype=torch.bool)
    starts = torch.cat([first, values[1:] != values[:-1]])
    if values.dim() > 1:
        starts = starts.reshape(starts.shape[0], -1).any(1)
    inverse = counts = torch.empty(0, dtype=torch.int64)
    if asked.get("return_inverse"):
        inverse = torch.cumsum(starts, 0) - 1
    if asked.get("return_counts"):
        counts = _lengths(starts)
    return values[starts], inverse, counts


def _lengths(starts: torch.Tensor) -> torch.Tensor:
    """Return how far it is from each start to the next one, or to the end."""
    counted = torch.ones_like(starts, dtype=torch.int64)
    first = (counted.cumsum(0) - 1)[starts]
    found = torch.ones_like(first)
    is_last = found.cumsum(0) == found.sum()
    return torch.where(is_last, counted.sum(), first.roll(-1, 0)) - first
