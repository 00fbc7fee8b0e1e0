"""Convolutions along a dim of data-dependent size."""

from typing import Any

import torch

from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.dynamic_shapes.extents import (
    Extents,
    attach,
    extents_of,
    filled,
    isolated,
    node_of,
    refuse,
)
from tpuport.tracing.dynamic_shapes.handlers import handles, run, tensors_of
from tpuport.tracing.dynamic_shapes.rowwise import rowwise

aten = torch.ops.aten


@handles("convolution")
def _convolution(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Convolve with stride 1: zeros past the size are what padding with zeros has there."""
    if not any(map(extents_of, tensors_of(args, kwargs))):
        return NotImplemented
    base, weight, bias, stride, padding, dilation, transposed, *_ = args
    along = [dim for dim in extents_of(base) if dim >= 2]
    if not along:
        return rowwise(func, args, kwargs)
    if transposed or any(map(extents_of, tensors_of((weight, bias), {}))):
        raise refuse(func, " along that dim")
    extents: Extents = dict(extents_of(base))
    for dim in along:
        at = dim - 2
        if _of(stride, at) != 1 or extents[dim].low < 1:
            raise refuse(func, " along that dim, with a stride or a size that may be 0")
        reach = _of(dilation, at) * (weight.shape[dim] - 1)
        size = extents[dim].add(node_of(2 * _of(padding, at) - reach))  # type: ignore[attr-defined]
        if size.low < 1:
            raise_if(size.value < 1, RuntimeError(_SHORT))
        extents[dim] = size
    # Samples past the real ones hold zeros, too, so they add nothing to the gradient of weights.
    made = run(func, (filled(base, 0), *args[1:]), kwargs)
    return isolated(attach(made, extents))


_SHORT = "Kernel size can't be greater than actual input size"


def _of(sizes: Any, at: int) -> int:
    """Return an option of a convolution along a dim: one number may stand for all dims."""
    return int(sizes[at] if len(sizes) > 1 else sizes[0])
