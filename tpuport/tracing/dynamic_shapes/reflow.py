"""Reshapes that split a dim of data-dependent size, or merge it with dims before it.

Rows of `[batch, length, ...]` are apart in the padded array, and follow each other in
`[batch * length, ...]`. Such a reshape is a view that takes its elements one by one.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.sym_node import Linear, NumberNode
from tpuport.tracing.core.tensor import TracedTensor, view_of
from tpuport.tracing.core.view_steps import ViewStep
from tpuport.tracing.dynamic_shapes.extents import (
    attach,
    extents_of,
    node_of,
    refuse,
    require_equal,
    strip,
)

_INVALID = "shape is invalid for input of another size"


def reflowed(base: TracedTensor, sizes: Sequence[Any]) -> torch.Tensor:
    """Return a contiguous tensor in another shape, with at most one size of -1.

    Raises:
        PortError: The largest sizes are not known.
    """
    extents = extents_of(base)
    before = [extents.get(d, node_of(size)) for d, size in enumerate(torch.Tensor.size(base))]
    after = [None if isinstance(s, int) and s == -1 else node_of(s) for s in sizes]
    tail: list[int] = []
    while before and after and _is_same(before[-1], after[-1]):
        tail.insert(0, int(before.pop().low))
        after.pop()
    made = _completed(before, after)
    if any(math.isinf(one.high) for one in made):
        raise refuse(torch.ops.aten.view.default, " to a size without an upper bound")
    step = _step(before, [int(s) for s in torch.Tensor.size(base)[: len(before)]], made, tail)
    meta = torch.empty([*(int(n.high) for n in made), *tail], dtype=base.dtype, device="meta")
    view = view_of(strip(base), step, meta)
    return attach(view, {d: node for d, node in enumerate(made) if node.low != node.high})


def with_rest(base: torch.Tensor, sizes: Sequence[Any]) -> Sequence[Any]:
    """Return sizes with the number that -1 stands for, if that does not depend on data.

    It does not in `x.view(batch, length, -1, width)`, where the length is that of `x`.
    """
    asked = [isinstance(size, int) and size == -1 for size in sizes]
    extents = extents_of(base)
    if sum(asked) != 1 or not extents:
        return sizes
    given = [node_of(size) for size, is_rest in zip(sizes, asked, strict=True) if not is_rest]
    dynamic = [node.expr for node in given if node.low != node.high]
    total = math.prod(n for d, n in enumerate(torch.Tensor.size(base)) if d not in extents)
    known = math.prod(int(node.low) for node in given if node.low == node.high)
    for node in extents.values():
        if node.expr not in dynamic:
            return sizes
        dynamic.remove(node.expr)
        # Of no elements, eager does not know either.
        if node.low < 1:
            raise_if(node.value < 1, _error())
    if dynamic or not known or total % known:
        return sizes
    return [total // known if rest else size for size, rest in zip(sizes, asked, strict=True)]


def _is_same(a: NumberNode, b: NumberNode | None) -> bool:
    return b is not None and a.low == a.high == b.low == b.high


def _completed(before: list[NumberNode], after: list[NumberNode | None]) -> list[NumberNode]:
    """Return the sizes of the result, with what -1 stands for; they hold as many elements."""
    total, known = _product(before), _product([one for one in after if one is not None])
    if None not in after:
        require_equal(known, total, _INVALID)
        return [one for one in after if one is not None]
    raise_if((known.value * (total.value // jnp.maximum(known.value, 1))) != total.value, _error())
    rest = _quotient(total, known)
    return [rest if one is None else one for one in after]


def _error() -> RuntimeError:
    return RuntimeError(_INVALID)


def _product(nodes: Sequence[NumberNode]) -> NumberNode:
    return functools.reduce(lambda a, b: a.mul(b), nodes, node_of(1))  # type: ignore[attr-defined]


def _quotient(total: NumberNode, known: NumberNode) -> NumberNode:
    """Return a size of which `known` times as many are `total`."""
    value = total.value // jnp.maximum(known.value, 1)
    low = int(total.low) // max(int(known.high), 1) if math.isfinite(known.high) else 0
    high = int(total.high) // max(int(known.low), 1) if math.isfinite(total.high) else math.inf
    return NumberNode(value, int, low, high, _divided(total.expr, known))


def _divided(expr: Linear | None, known: NumberNode) -> Linear | None:
    if expr is None or known.low != known.high or known.low < 1:
        return None
    by = int(known.low)
    if expr.const % by or any(factor % by for _, factor in expr.terms):
        return None
    return Linear(expr.const // by, tuple((atom, factor // by) for atom, factor in expr.terms))


def _step(
    before: list[NumberNode], bounds: list[int], after: list[NumberNode], tail: list[int]
) -> ViewStep:
    sizes, new_sizes = [n.value for n in before], [n.value for n in after]
    new_bounds = [int(n.high) for n in after]

    def forward(value: jax.Array) -> jax.Array:
        found, is_real = _places(new_bounds, new_sizes, bounds, sizes)
        rows = jnp.take(value.reshape(-1, *tail), found, axis=0)
        if jnp.issubdtype(rows.dtype, jnp.inexact):
            # What is past the real elements passes no gradient on.
            column = is_real.reshape(-1, *[1] * len(tail))
            rows = jnp.where(column, rows, jax.lax.stop_gradient(rows))
        return rows.reshape(*new_bounds, *tail)

    def inverse(old: jax.Array, new: jax.Array) -> jax.Array:
        found, is_real = _places(bounds, sizes, new_bounds, new_sizes)
        rows = jnp.take(new.reshape(-1, *tail), found, axis=0)
        column = is_real.reshape(-1, *[1] * len(tail))
        return jnp.where(column, rows, old.reshape(-1, *tail)).reshape(old.shape)

    return ViewStep(forward, inverse)


def _places(
    bounds: list[int], sizes: list[Any], other_bounds: list[int], other_sizes: list[Any]
) -> tuple[jax.Array, jax.Array]:
    """Return where each element of a padded array is in another one, and which are real."""
    count = math.prod(bounds)
    rest, offset = jnp.arange(count, dtype=jnp.int32), jnp.zeros(count, jnp.int32)
    is_real, stride = jnp.ones(count, bool), jnp.int32(1)
    for bound, size in zip(reversed(bounds), reversed(sizes), strict=True):
        index, rest = rest % max(bound, 1), rest // max(bound, 1)
        is_real, offset = is_real & (index < size), offset + index * stride
        stride = stride * jnp.asarray(size, jnp.int32)
    place, step = jnp.zeros(count, jnp.int32), 1
    for bound, size in zip(reversed(other_bounds), reversed(other_sizes), strict=True):
        whole = jnp.maximum(jnp.asarray(size, jnp.int32), 1)
        index, offset = offset % whole, offset // whole
        place, step = place + index * step, step * bound
    return jnp.clip(place, 0, max(step - 1, 0)), is_real
