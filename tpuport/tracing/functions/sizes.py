"""Handlers of torch functions that read sizes in C++.

C++ would see the padded sizes of tensors whose size depends on data.
"""

import functools
import math
from typing import Any

import torch

from tpuport.foundation.errors import PortError
from tpuport.foundation.user_frames import user_line
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import meta_of
from tpuport.tracing.dynamic_shapes.extents import extents_of, refuse
from tpuport.tracing.dynamic_shapes.handlers import involved
from tpuport.tracing.dynamic_shapes.reflow import reflowed, with_rest
from tpuport.tracing.dynamic_shapes.rowwise import physical_sizes
from tpuport.tracing.dynamic_shapes.views import keeps_dims
from tpuport.tracing.functions.registry import function, holds_traced


@function(torch.Tensor.expand_as)
def _expand_as(
    trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    if kwargs or not any(map(extents_of, args)):
        return NotImplemented
    return args[0].expand(args[1].shape)


@function(torch.Tensor.view_as, torch.Tensor.reshape_as)
def _shaped_as(
    trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    if kwargs or not any(map(extents_of, args)):
        return NotImplemented
    source, sizes = args[0], args[1].shape
    made = _reshape(trace, torch.Tensor.reshape, (source, sizes), {})
    return source.reshape(sizes) if made is NotImplemented else made


@function(torch.Tensor.reshape, torch.reshape)
def _reshape(
    trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return a view where eager does, else a copy: C++ would compare with padded sizes."""
    if not extents_of(args[0] if args else kwargs.get("input")):
        return NotImplemented
    source, *rest = args or (kwargs["input"],)
    sizes = kwargs.get("shape", rest)
    if sizes and isinstance(sizes[0], (tuple, list)):
        (sizes,) = sizes
    sizes = with_rest(source, sizes)
    if _splits(source, sizes):
        if torch.Tensor.is_contiguous(source) or not keeps_dims(source, sizes):
            return _reflowed(trace, source, sizes)
    if not any(isinstance(size, torch.SymInt) for size in sizes):
        return NotImplemented
    try:
        meta_of(source).view([int(physical_sizes(size, (source,))) for size in sizes])
    except RuntimeError:
        source = source.clone(memory_format=torch.contiguous_format)
    return source.view(sizes)


@function(torch.Tensor.view)
def _view(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    source, *sizes = args
    if kwargs or not extents_of(source):
        return NotImplemented
    if sizes and isinstance(sizes[0], (tuple, list)):
        (sizes,) = sizes
    # A dtype is no size.
    if not all(isinstance(size, (int, torch.SymInt)) for size in sizes):
        return NotImplemented
    known = with_rest(source, sizes)
    if _splits(source, known) and torch.Tensor.is_contiguous(source):
        return _reflowed(trace, source, known)
    return NotImplemented if known is sizes else source.view(known)


@function(torch.flatten, torch.Tensor.flatten, torch.ravel, torch.Tensor.ravel)
def _flatten(
    trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    source, *dims = args or (kwargs["input"],)
    if not extents_of(source) or source.dim() < 2 or not {*map(type, dims)} <= {int}:
        return NotImplemented
    ends = {"start_dim": 0, "end_dim": -1}
    ends |= dict(zip(ends, dims, strict=False)) | {k: v for k, v in kwargs.items() if k in ends}
    start, end = (range(source.dim())[dim] for dim in ends.values())
    if start >= end:
        return NotImplemented
    sizes = (*source.shape[:start], -1, *source.shape[end + 1 :])
    return _reshape(trace, torch.Tensor.reshape, (source, *sizes), {})


def _reflowed(trace: Trace, source: Any, sizes: Any) -> torch.Tensor:
    """Return the real elements in another shape, of a tensor that has no gaps where all are real.

    A part of a longer tensor may have gaps in eager PyTorch, so that no write may follow.
    """
    if not source._chain and torch.Tensor.is_contiguous(source):
        return reflowed(source, sizes)
    # Eager has a view where the memory has no gaps, and a copy where it does.
    made = reflowed(source.clone(memory_format=torch.contiguous_format), sizes)
    site = user_line()
    refusal = functools.partial(_written, site)
    one, other = _memory_of(source), _memory_of(made)
    trace.shared.add(one, other, None, trace.regions[-1], refusal)
    return made


def _memory_of(tensor: Any) -> Any:
    """Return the storage of a traced tensor."""
    return tensor._storage


def _written(site: str) -> PortError:
    return port_error(
        "a reshape of a tensor whose size depends on data may be a view or a copy of it, and one"
        " of the two is written",
        code="TPU203",
        place=site,
        remedy="write to a .clone() of it",
    )


def _splits(source: Any, sizes: Any) -> bool:
    """Return whether a reshape splits a dim of data-dependent size, or merges it with earlier dims.

    Otherwise the dims before it stay as they are, but for dims of size 1.
    """
    extents = extents_of(source)
    last = max(extents)
    lead = [size for size in torch.Tensor.size(source)[:last] if size != 1]
    given = [size for size in sizes if not isinstance(size, int) or size != 1]
    known = [
        isinstance(size, int) and size == own and dim not in extents
        for dim, (size, own) in enumerate(zip(given, lead, strict=False))
    ]
    if len(extents) > 1 or len(given) <= len(lead) or not all(known):
        return len(extents) == 1
    node, size = extents[last], given[len(lead)]
    if isinstance(size, torch.SymInt):
        return size.node.expr is None or not _is_multiple(size.node.expr, node.expr)
    # What follows the dim stays, or merges into it.
    rest = given[len(lead) + 1 :]
    tail = math.prod(torch.Tensor.size(source)[last + 1 :])
    is_tail = all(isinstance(one, int) and one > 0 for one in rest)
    return not (is_tail and size == -1 and tail % math.prod(rest) == 0)


def _is_multiple(expr: Any, of: Any) -> bool:
    """Return whether a linear expression is a multiple of another one."""
    return of is not None and any(
        of.times(factor) == expr for factor in {f for _, f in expr.terms} | {1}
    )


@function(torch.Tensor.unflatten, torch.unflatten)
def _unflatten(
    trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    if not extents_of(args[0]) or len(args) + len(kwargs) != 3:
        return NotImplemented
    source, rest = args[0], list(args[1:])
    dim = kwargs["dim"] if "dim" in kwargs else rest.pop(0)
    sizes = kwargs["sizes"] if "sizes" in kwargs else rest.pop(0)
    dim %= source.dim()
    shape = [*source.shape[:dim], *sizes, *source.shape[dim + 1 :]]
    made = _view(trace, torch.Tensor.view, (source, shape), {})
    return source.view(shape) if made is NotImplemented else made


@function(torch.meshgrid)
def _meshgrid(
    trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    rows = list(args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args)
    if not any(map(extents_of, rows)):
        return NotImplemented
    rows = [row.reshape(1) if row.dim() == 0 else row for row in rows]
    is_turned = kwargs.get("indexing") == "xy" and len(rows) > 1
    if is_turned:
        rows[:2] = rows[1::-1]
    sizes = [row.shape[0] for row in rows]
    shaped = [
        row[(None,) * at + (..., *[None] * (len(rows) - 1 - at))] for at, row in enumerate(rows)
    ]
    grids = [row.expand(sizes) for row in shaped]
    if is_turned:
        grids[:2] = grids[1::-1]
    return tuple(grids)


@function(torch.broadcast_tensors)
def _broadcast_tensors(
    trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    given = list(args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args)
    if not any(map(extents_of, given)):
        return NotImplemented
    rank = max(one.dim() for one in given)
    sizes: list[Any] = [1] * rank
    for one in given:
        for dim, size in enumerate(one.shape, rank - one.dim()):
            # A size that depends on data counts for more than one that does not.
            if isinstance(size, torch.SymInt) or (type(sizes[dim]) is int and size != 1):
                sizes[dim] = size
    return tuple(one.expand(sizes) for one in given)


@function(torch.Tensor.nbytes.__get__)  # type: ignore[attr-defined]
def _nbytes(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not extents_of(args[0]):
        return NotImplemented
    return args[0].numel() * args[0].itemsize


@function(torch.tensor_split, torch.Tensor.tensor_split)
def _tensor_split(
    trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    places = [*args, *kwargs.values()][1]
    if isinstance(places, torch.Tensor) and holds_traced(trace, places):
        numbers = places.tolist()
        given = [numbers if value is places else value for value in args]
        return func(*given, **{k: numbers if v is places else v for k, v in kwargs.items()})
    return _refused(trace, func, args, kwargs)


@function(
    torch.hsplit,
    torch.Tensor.hsplit,
    torch.vsplit,
    torch.Tensor.vsplit,
    torch.dsplit,
    torch.Tensor.dsplit,
    torch.vander,
    torch.gradient,
    torch.trapezoid,
    torch.trapz,
    torch.cumulative_trapezoid,
    torch.kron,
    torch.Tensor.kron,
    torch.stft,
    torch.Tensor.stft,
    torch.istft,
    torch.Tensor.istft,
)
def _refused(trace: Trace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if trace.dynamic and involved(args, kwargs):
        raise refuse(func)
    return NotImplemented
