"""Rewriting of nodes: a view of an operation becomes the operation on views."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import numpy as np

from tpuport.tracing.attention.masks.graph import Node, computed
from tpuport.tracing.attention.masks.tiles import ELEMENTWISE, ONE, known_tile

VIEWS = frozenset("broadcast_in_dim transpose reshape squeeze slice dynamic_slice rev tile".split())


def is_same(node: Node) -> bool:
    """Return whether a node equals its operand; stopping a gradient makes it another one."""
    is_float = jax.numpy.issubdtype(node.dtype, jax.numpy.inexact)
    return node.name in ("copy", "copy_p", "sharding_constraint", "reshard") or (
        node.name == "stop_gradient" and not is_float
    )


def broadcast(node: Node, shape: tuple[int, ...]) -> Node:
    """Return the node broadcast to a shape of equal or higher rank."""
    if node.shape == shape:
        return node
    lead = len(shape) - len(node.shape)
    params = {
        "shape": shape,
        "broadcast_dimensions": tuple(range(lead, len(shape))),
        "sharding": None,
    }
    aval = jax.ShapeDtypeStruct(shape, node.dtype)
    return computed(jax.lax.broadcast_in_dim_p, params, (node,), aval)


def sunk(node: Node) -> Node:
    """Return the same array with an elementwise operation on top, if there is one below views."""
    while is_same(node):
        node = node.inputs[0]
    if node.name not in VIEWS:
        return node
    below = sunk(node.inputs[0])
    if below.name not in ELEMENTWISE:
        return _view(node, below)
    inputs = [x if not x.shape else _view(node, broadcast(x, below.shape)) for x in below.inputs]
    made = (below.op, below.params, tuple(inputs))
    return Node(node.shape, below.dtype, None, lambda: made)


def _view(view: Node, of: Node) -> Node:
    """Return the view of another array of the same shape."""
    if view.name == "reshape":
        while of.name == "reshape":
            of = of.inputs[0]
        if of.shape == view.shape:
            return of
        if of.name == "broadcast_in_dim" and (moved := _stretched_last(view, of)) is not None:
            return moved
    return view.over(of, *view.inputs[1:], dtype=of.dtype)


def _stretched_last(view: Node, of: Node) -> Node | None:
    """Return the reshape of a broadcast as a broadcast of a reshape; None if dims are mixed.

    So a mask that was stretched to heads, joined with its batch and split again is seen to be the
    same for all heads.
    """
    if len(of.inputs) != 1 or view.params.get("dimensions") is not None:
        return None
    (x,) = of.inputs
    source = {to: d for d, to in enumerate(of.params["broadcast_dimensions"])}
    dims: list[int] = []
    for ins, outs in regrouped(of.shape, view.shape):
        own = [d in source and x.shape[source[d]] > 1 for d in ins if of.shape[d] > 1]
        if any(own) and not all(own):
            return None
        dims += outs if any(own) else []
    sizes = tuple(view.shape[d] for d in dims)
    params = {"new_sizes": sizes, "dimensions": None, "sharding": None}
    aval = jax.ShapeDtypeStruct(sizes, of.dtype)
    inner = _view(computed(jax.lax.reshape_p, params, (x,), aval), x)
    params = {"shape": view.shape, "broadcast_dimensions": tuple(dims), "sharding": None}
    aval = jax.ShapeDtypeStruct(view.shape, of.dtype)
    return computed(jax.lax.broadcast_in_dim_p, params, (inner,), aval)


def regrouped(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Pair the shortest runs of dims of two shapes that have equally many elements."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        ins, outs = [], []
        a = b = 1
        if i < len(before):
            ins, a, i = [i], before[i], i + 1
        if j < len(after):
            outs, b, j = [j], after[j], j + 1
        while a != b:
            if (a < b and i < len(before)) or j >= len(after):
                ins, a, i = [*ins, i], a * before[i], i + 1
            else:
                outs, b, j = [*outs, j], b * after[j], j + 1
        groups.append((ins, outs))
    return groups


def base(node: Node) -> Node:
    """Return the node that a node is a view of."""
    while node.name in VIEWS or is_same(node):
        node = node.inputs[0]
    return node


def known_array(node: Node) -> np.ndarray | None:
    """Return the array that a node is a view of, if it is concrete (made on the host)."""
    value = base(node)
    if value.op is not None or value.value is None or isinstance(value.value, jax.core.Tracer):
        return None
    return np.asarray(value.value)


def uniform(node: Node) -> Any:
    """Return the one element that a known array has everywhere, or None for any other array."""
    value = base(node)
    if value.name == "convert_element_type" and _are_floats(value, *value.inputs):
        before = uniform(value.inputs[0])
        return None if before is None else np.asarray(before).astype(value.dtype)[()]
    found = known_tile(value, [ONE] * len(value.shape)) if value.size == 1 else known_array(node)
    if found is None or not found.size:
        return None
    first = found.reshape(-1)[0]
    return first if found.size == 1 or bool((found == first).all()) else None


def _are_floats(*nodes: Node) -> bool:
    return all(jax.numpy.issubdtype(node.dtype, jax.numpy.floating) for node in nodes)


def rebased(node: Node, other: Node) -> Node:
    """Return the view that a node is of its base, made of another array of the base's shape."""
    if is_same(node):
        return rebased(node.inputs[0], other)
    return _view(node, rebased(node.inputs[0], other)) if node.name in VIEWS else other
