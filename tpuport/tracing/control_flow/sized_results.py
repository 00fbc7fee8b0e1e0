"""Results of a branch whose sizes depend on data: one bound and one count for both sides."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core import int64
from tpuport.tracing.core.context import Trace
from tpuport.tracing.dynamic_shapes.extents import (
    attach,
    count_node,
    extents_of,
    isolated,
    note_dynamic,
)

# The bounds of a result's sizes that depend on data, by dim; its sizes on one side.
Bounds = dict[int, int]
Counts = dict[int, jax.Array]


def common_bounds(one: torch.Tensor, other: torch.Tensor) -> Bounds | None:
    """Return the sizes that hold what either side gives, where one depends on data.

    None if the two have other sizes than those in which they differ.
    """
    if one is other:
        return {}
    ours, theirs = (list(torch.Tensor.size(tensor)) for tensor in (one, other))
    if len(ours) != len(theirs):
        return None
    dynamic = {**extents_of(one), **extents_of(other)}
    if any(a != b and d not in dynamic for d, (a, b) in enumerate(zip(ours, theirs, strict=True))):
        return None
    return {dim: max(ours[dim], theirs[dim]) for dim in dynamic}


def counted(leaves: Iterable[Any]) -> list[tuple[int, int, jax.Array]]:
    """Return the sizes of leaves that depend on data: which leaf, which dim, how many."""
    return [
        (id(leaf), dim, jnp.asarray(node.value, jnp.int32))
        for leaf in leaves
        for dim, node in extents_of(leaf).items()
    ]


def within(
    leaf: Any, value: jax.Array, bounds: Bounds, known: dict[tuple[int, int], jax.Array]
) -> tuple[jax.Array, Counts]:
    """Return an array padded to its bounds, and how many of the elements are real.

    Args:
        leaf: the tensor.
        value: its array on one side.
        bounds: the bounds of both sides.
        known: the sizes of the tensors that this side made, by the id of the tensor and the dim.
    """
    counts: Counts = {}
    for dim, bound in bounds.items():
        node = extents_of(leaf).get(dim)
        size = value.shape[dim] if node is None else node.value
        counts[dim] = jnp.asarray(known.get((id(leaf), dim), size), jnp.int32)
        pads = [(0, bound - value.shape[dim] if d == dim else 0) for d in range(value.ndim)]
        with int64.scope():
            value = jnp.pad(value, pads)
    return value, counts


def joined(trace: Trace, made: torch.Tensor, one: Any, other: Any, counts: Counts) -> torch.Tensor:
    """Give a result of a branch the sizes that the side which was taken gives."""
    if not counts:
        return made
    extents = {}
    for dim, count in counts.items():
        ours, theirs = extents_of(one).get(dim), extents_of(other).get(dim)
        same = ours is theirs and ours is not None
        bound = torch.Tensor.size(made)[dim]
        extents[dim] = ours if same and ours is not None else count_node(count, bound)
    note_dynamic(trace)
    return isolated(attach(made, extents))
