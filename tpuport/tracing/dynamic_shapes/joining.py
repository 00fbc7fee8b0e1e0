"""Concatenation, and padding by data-dependent amounts."""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.cumulative import cumulative
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.dynamic_shapes.extents import (
    Extents,
    attach,
    bound_of,
    extents_of,
    isolated,
    natural,
    node_of,
    refuse,
    require_equal,
    resized,
    strip,
    wrap_now,
)
from tpuport.tracing.dynamic_shapes.handlers import dim_of, handles

aten = torch.ops.aten


def compacted(keep: jax.Array, bound: int) -> jax.Array:
    """Return int32[bound]: positions of the True elements of `keep` (flat) in order.

    The rest repeats the first of them: its value is harmless in whatever follows.
    """
    flat = keep.reshape(-1)
    # False elements go out of range, where the scatter drops them.
    target = jnp.where(flat, cumulative(jnp.cumsum, flat.astype(jnp.int32), 0) - 1, bound)
    first = jnp.argmax(flat).astype(jnp.int32) if flat.size else 0
    return (
        jnp.full(bound, first, jnp.int32)
        .at[target]
        .set(jnp.arange(flat.size, dtype=jnp.int32), mode="drop")
    )


@handles("cat")
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in args[0] if not (t.dim() == 1 and not extents_of(t) and t.shape[0] == 0)]
    dim = dim_of((tensors[0], *args[1:]), kwargs, 1, 0)
    others: Extents = {}
    for tensor in tensors:
        for d, node in extents_of(tensor).items():
            if d != dim:
                require_equal(
                    others.setdefault(d, node),
                    node,
                    f"Sizes of tensors must match except in dimension {dim}",
                )
    aligned = [strip(t) for t in tensors]
    for d in others:
        if any(d not in extents_of(t) for t in tensors):
            raise refuse(func, " with one of static size")
        size = min(t.shape[d] for t in aligned)
        aligned = [resized(t, d, size) for t in aligned]
    joined = torch.cat(aligned, dim)
    if not any(dim in extents_of(t) for t in tensors):
        return attach(joined, others) if others else joined
    sizes = [extents_of(t).get(dim, node_of(bound_of(t, dim))) for t in tensors]
    keep = jnp.concatenate(
        [jnp.arange(bound_of(t, dim)) < n.value for t, n in zip(tensors, sizes, strict=True)]
    )
    total = sizes[0]
    for node in sizes[1:]:
        total = total.add(node)  # type: ignore[attr-defined]
    bound = int(total.low) if total.low == total.high else min(int(total.high), joined.shape[dim])
    order = wrap_now(compacted(keep, bound), torch.int64)
    return isolated(attach(joined.index_select(dim, order), {**others, dim: total}))


@handles("constant_pad_nd")
def _pad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base, pads = args[0], args[1]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    result: Any = base
    for pair in range(len(pads) // 2):
        before, after = pads[2 * pair : 2 * pair + 2]
        if any(isinstance(amount, torch.SymInt) or amount for amount in (before, after)):
            dim = result.dim() - 1 - pair
            result = _padded(result, dim, node_of(before), node_of(after), value)
    return result.clone() if result is base else result


def _padded(base: Any, dim: int, before: NumberNode, after: NumberNode, value: Any) -> Any:
    """Pad both ends of a dim, or cut off what a negative amount says."""
    func, extents = aten.constant_pad_nd.default, extents_of(base)
    physical = bound_of(base, dim)
    size = extents.get(dim, node_of(physical))
    length = size.add(before).add(after)  # type: ignore[attr-defined]
    length = natural(length, RuntimeError("constant_pad_nd: the resulting size is negative"))
    if length.high > _MOST_PADDED:
        raise refuse(func, " by an amount without an upper bound")
    places = jnp.arange(int(length.high), dtype=jnp.int32) - before.value
    inside = (places >= 0) & (places < size.value)
    filling = torch.full((), value, dtype=base.dtype)
    if physical:
        order = wrap_now(jnp.clip(places, 0, physical - 1), torch.int64)
        shape = [-1 if d == dim else 1 for d in range(base.dim())]
        taken = strip(base).index_select(dim, order)
        made = torch.where(wrap_now(inside.reshape(shape)), taken, filling)
    else:
        sizes = list(torch.Tensor.size(base))
        sizes[dim] = int(length.high)
        made = strip(base).new_full(sizes, value)
    return isolated(attach(made, {**extents, dim: length}))


# A bound above this is one that nobody gave: the padding would be made in this length.
_MOST_PADDED = 1 << 24
