"""Sorting and reversal along a dim of data-dependent size: the padding stays behind."""

from typing import Any

import jax.numpy as jnp
import torch

from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.dynamic_shapes.extents import (
    attach,
    bound_of,
    extents_of,
    filled,
    isolated,
    natural,
    node_of,
    strip,
    valid,
    wrap_now,
)
from tpuport.tracing.dynamic_shapes.handlers import handles
from tpuport.tracing.dynamic_shapes.rowwise import rowwise
from tpuport.tracing.dynamic_shapes.views import at_most


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


def _ordered(
    source: Any, dim: int, node: NumberNode, *, descending: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements of a physical array in order along a dim, and their places."""
    plain = filled(source, 0, [dim])
    size = bound_of(source, dim)
    order = torch.sort(plain.detach(), dim=dim, descending=descending, stable=True).indices
    column = [-1 if d == dim else 1 for d in range(plain.dim())]
    padding = ~valid(node, size).reshape(column).expand(plain.shape)
    moved = padding.gather(dim, order).to(torch.int32)
    order = order.gather(dim, torch.sort(moved, dim=dim, stable=True).indices)
    return plain.gather(dim, order), order


@handles("sort")
def _sort(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, given = args[0], _given(func, args, kwargs)
    extents, dim = extents_of(source), given.get("dim", -1) % max(source.dim(), 1)
    if dim not in extents:
        return rowwise(func, args, kwargs) if extents else NotImplemented
    descending = bool(given.get("descending", False))
    found = _ordered(source, dim, extents[dim], descending=descending)
    values, order = (attach(one, dict(extents)) for one in found)
    return isolated(values), order


@handles("topk")
def _topk(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, given = args[0], _given(func, args, kwargs)
    extents, dim = extents_of(source), given.get("dim", -1) % max(source.dim(), 1)
    is_traced = isinstance(given["k"], torch.SymInt)
    if dim not in extents and not is_traced:
        return rowwise(func, args, kwargs) if extents else NotImplemented
    size = bound_of(source, dim)
    count, node = node_of(given["k"]), extents.get(dim, node_of(size))
    error = RuntimeError("selected index k out of range")
    if count.low > size:
        raise error
    if not at_most(count, node):
        raise_if(node.value < count.value, error)
    count = natural(count, error)
    bound = int(min(count.high, size))
    found = _ordered(source, dim, node, descending=bool(given.get("largest", True)))
    left = {d: n for d, n in extents.items() if d != dim}
    if is_traced:
        left[dim] = NumberNode(count.value, int, int(count.low), bound, count.expr)
    values, order = (attach(one.narrow(dim, 0, bound), dict(left)) for one in found)
    order._bounds = (0, size - 1)
    return isolated(values), order


@handles("flip")
def _flip(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source, extents = args[0], extents_of(args[0])
    dims = [dim % max(source.dim(), 1) for dim in args[1]]
    dynamic = [dim for dim in dims if dim in extents]
    if not dynamic:
        return rowwise(func, args, kwargs) if extents else NotImplemented
    made = strip(source).flip([dim for dim in dims if dim not in extents])
    for dim in dynamic:
        places = jnp.maximum(extents[dim].value - 1 - jnp.arange(bound_of(source, dim)), 0)
        made = made.index_select(dim, wrap_now(places, torch.int64))
    return isolated(attach(made, dict(extents)))
