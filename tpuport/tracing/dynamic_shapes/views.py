"""Reshapes, slices, selects and splits of tensors of data-dependent size, or at traced ends."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import current
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import TracedTensor, view_of
from tpuport.tracing.core.view_steps import ViewStep
from tpuport.tracing.dynamic_shapes.extents import (
    Extents,
    attach,
    bound_of,
    extents_of,
    isolating,
    natural,
    node_of,
    refuse,
    require_equal,
    strip,
)
from tpuport.tracing.dynamic_shapes.handlers import dim_of, handles, run
from tpuport.tracing.dynamic_shapes.rowwise import physical_sizes, rowwise, scaled_size

aten = torch.ops.aten


@handles("view", "_unsafe_view", "_reshape_alias")
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshape; the data-dependent dim may merge with dims after it (or of size 1 before it)."""
    base = args[0]
    if func._overloadname == "dtype":
        return rowwise(func, args, kwargs)
    sizes = [int(physical_sizes(s, args)) for s in args[1]]
    shape = list(torch.Tensor.size(base))
    out = list(torch.empty(shape, device="meta").reshape(sizes).shape)
    extents: Extents = {}
    for dim, node in extents_of(base).items():
        position, factor = _place(func, shape, out, dim)
        extents[position] = node if factor == 1 else scaled_size(node, factor)
    return attach(run(aten.view.default, (strip(base), out), {}), extents)


def _place(func: Any, shape: list[int], out: list[int], dim: int) -> tuple[int, int]:
    """Return the dim that a dim becomes in a reshape, and by which factor its size grows.

    The factor is the number of elements of the later dims that merge into it.
    """
    candidates = _places(shape, out, dim)
    exact = [c for c in candidates if c[1] == 1]
    if not candidates:
        raise refuse(func, ", merged with dims before it or split")
    return min(exact or candidates, key=lambda c: abs(c[0] - dim))


def _places(shape: list[int], out: list[int], dim: int) -> list[tuple[int, int]]:
    """Return the dims that a dim may become in a reshape, each with the factor of its size."""
    lead = math.prod(shape[:dim])
    running = 1
    candidates = []
    for position, size in enumerate(out):
        if running == lead and size % max(shape[dim], 1) == 0 and size >= shape[dim]:
            candidates.append((position, size // max(shape[dim], 1)))
        running *= size
    return candidates


def keeps_dims(base: torch.Tensor, sizes: Sequence[Any]) -> bool:
    """Return whether each data-dependent dim is a dim, or leads one, in a reshape to these sizes.

    It does not in `x[:, :3].reshape(-1, 4)`, where it leads a dim only if there is no row.
    """
    shape = list(torch.Tensor.size(base))
    try:
        given = [int(physical_sizes(size, (base,))) for size in sizes]
        out = list(torch.empty(shape, device="meta").reshape(given).shape)
    except RuntimeError:
        return False
    return all(_places(shape, out, dim) for dim in extents_of(base))


def _clamped(end: Any, size: NumberNode, default: NumberNode) -> NumberNode:
    """Clamp a slice end as Python does: negative counts from the end, then into [0, size]."""
    if end is None:
        return default
    if isinstance(end, int):
        end = max(min(end, 2**31 - 1), -(2**31) + 1)
    node = node_of(end)
    if node.high < 0:
        node = node.add(size)  # type: ignore[attr-defined]
    elif node.low < 0:
        wrapped = jnp.where(node.value < 0, node.value + size.value, node.value)
        node = NumberNode(wrapped, int, min(node.low + size.low, 0), max(node.high, size.high - 1))
    if node.low < 0:
        node = node.sym_max(node_of(0))  # type: ignore[attr-defined]
    decided = at_most(node, size)
    if decided is not None:
        return node if decided else size
    return node.sym_min(size)  # type: ignore[attr-defined]


def at_most(a: NumberNode, b: NumberNode) -> bool | None:
    """Return whether a number is known to be at most another, None where that is not known."""
    if a.expr == b.expr or a.high <= b.low:
        return True
    if a.low >= b.high:
        return False
    difference = b.expr.plus(a.expr, -1)  # type: ignore[union-attr, arg-type]
    if not difference.terms:
        return difference.const >= 0
    return True if difference.is_natural() else None


def _traced(base: torch.Tensor) -> TracedTensor:
    if isinstance(base, TracedTensor):
        return base
    trace = current()
    assert trace is not None
    return trace.promote(base)


@handles("slice")
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("self", "dim", "start", "end", "step")
    given = dict(zip(names, args, strict=False)) | kwargs
    base, dim = given["self"], given.get("dim", 0)
    base = _traced(base)
    dim %= base.dim()
    extents = extents_of(base)
    physical = bound_of(base, dim)
    start, end, step = given.get("start"), given.get("end"), given.get("step", 1)
    if dim not in extents and not any(isinstance(v, torch.SymInt) for v in (start, end, step)):
        result = run(func, (strip(base), dim, start, end, step), {})
        return attach(result, extents)
    if isinstance(step, torch.SymInt):
        raise refuse(func, " with a traced step")
    size = extents.get(dim, node_of(physical))
    low, high = _clamped(start, size, node_of(0)), _clamped(end, size, size)
    in_order = at_most(low, high)
    length = high.sub(low)  # type: ignore[attr-defined]
    if not in_order:
        length = length.sym_max(node_of(0))  # type: ignore[attr-defined]
    if step != 1:
        count = -(-length.value // step)
        length = NumberNode(count, int, -(-length.low // step), -(-length.high // step))
    return _part(base, dim, low, length, step)


def _part(
    base: TracedTensor, dim: int, low: NumberNode, length: NumberNode, stride: int = 1
) -> torch.Tensor:
    """Return a view of `length` elements from `low` on, which are all inside the size."""
    physical = bound_of(base, dim)
    bound = int(min(physical, max(length.high, 0)))
    length = NumberNode(length.value, int, 0, bound, length.expr)
    first = low.value.astype(jnp.int32)
    count = length.value

    def forward(value: jax.Array) -> jax.Array:
        if low.low == low.high == 0 and stride == 1:
            return jax.lax.slice_in_dim(value, 0, bound, axis=dim)
        places = first + stride * jnp.arange(bound)
        return jnp.take(value, jnp.clip(places, 0, physical - 1), axis=dim)

    def inverse(old: jax.Array, new: jax.Array) -> jax.Array:
        where, rest = jnp.divmod(jnp.arange(physical) - first, stride)
        inside = (where >= 0) & (where < count) & (rest == 0)
        moved = jnp.take(new, jnp.clip(where, 0, max(bound - 1, 0)), axis=dim)
        shape = [-1 if d == dim else 1 for d in range(old.ndim)]
        return jnp.where(inside.reshape(shape), moved, old)

    sizes = list(torch.Tensor.size(base))
    sizes[dim] = bound
    meta = torch.empty(sizes, dtype=base.dtype, device="meta")
    step = ViewStep(forward, inverse)
    step = step if base._frozen else isolating(step, dim, length)
    view = view_of(strip(base), step, meta)
    return attach(view, extents_of(base) | {dim: length})


@handles("split_with_sizes")
def _split_with_sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, sizes = args[0], args[1]
    dim = dim_of(args, kwargs, 2, 0)
    if dim not in extents_of(base) and not any(isinstance(s, torch.SymInt) for s in sizes):
        return rowwise(func, args, kwargs)
    base = _traced(base)
    message = "split_with_sizes expects split_sizes to have only non-negative entries"
    lengths = [natural(node_of(size), RuntimeError(message)) for size in sizes]
    starts = [node_of(0)]
    for node in lengths:
        starts.append(starts[-1].add(node))  # type: ignore[attr-defined]
    size = extents_of(base).get(dim, node_of(bound_of(base, dim)))
    require_equal(
        starts[-1], size, "split_with_sizes expects split_sizes to sum exactly to the tensor's size"
    )
    # The last length is derived, so that concatenating the parts gives the known size back.
    lengths[-1] = size.sub(starts[-2])  # type: ignore[attr-defined]
    return [_part(base, dim, low, length) for low, length in zip(starts[:-1], lengths, strict=True)]


@handles("select")
def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, dim, index = args
    dim %= base.dim()
    if dim not in extents_of(base) and not isinstance(index, torch.SymInt):
        return rowwise(func, args, kwargs)
    if not isinstance(base, TracedTensor):
        trace = current()
        assert trace is not None
        base = trace.promote(base)
    physical = bound_of(base, dim)
    size = extents_of(base).get(dim, node_of(physical))
    node = node_of(index)
    position = jnp.where(node.value < 0, node.value + size.value, node.value).astype(jnp.int32)
    _check_range(node, size)
    position = jnp.clip(position, 0, max(physical - 1, 0))

    def forward(value: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(value, position, dim, keepdims=False)

    def inverse(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(old, new, position, dim)

    sizes = [s for d, s in enumerate(torch.Tensor.size(base)) if d != dim]
    meta = torch.empty(sizes, dtype=base.dtype, device="meta")
    view = view_of(strip(base), ViewStep(forward, inverse), meta)
    left = {d - (d > dim): n for d, n in extents_of(base).items() if d != dim}
    return attach(view, left) if left else view


def _check_range(index: NumberNode, size: NumberNode) -> None:
    if -size.low <= index.low and index.high < size.low:
        return
    known = size.low == size.high
    expected = f"-{size.low} <= index < {size.low}" if known else "a size that depends on data"
    failed = (index.value < -size.value) | (index.value >= size.value)
    raise_if(failed, IndexError(f"select(): index is out of range: expected {expected}"))
