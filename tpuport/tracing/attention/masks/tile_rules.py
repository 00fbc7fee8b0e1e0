"""Rules that compute a tile of one operation from tiles of its operands."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.tracing.attention.masks.graph import Node
from tpuport.tracing.attention.masks.tiles import ONE, Parts, TilePart, Tiles, Whole, picked, rule
from tpuport.tracing.attention.masks.views import regrouped


@rule("iota")
def _iota(tiles: Tiles, node: Node, parts: Parts) -> Any:
    del tiles
    dim = node.params["dimension"]
    shape = [-1 if d == dim else 1 for d in range(len(node.shape))]
    return parts[dim].ids.astype(node.dtype).reshape(shape)


@rule("broadcast_in_dim")
def _broadcast(tiles: Tiles, node: Node, parts: Parts) -> Any:
    dims = node.params["broadcast_dimensions"]
    value = tiles.tile(node.inputs[0], [parts[d] for d in dims])
    shape = [1] * len(parts)
    for d, size in zip(dims, value.shape, strict=True):
        shape[d] = size
    return value.reshape(shape)


@rule("transpose")
def _transpose(tiles: Tiles, node: Node, parts: Parts) -> Any:
    order = node.params["permutation"]
    inner = [parts[order.index(d)] for d in range(len(order))]
    return tiles.tile(node.inputs[0], inner).transpose(order)


@rule("sharding_constraint", "reshard")
def _constrained(tiles: Tiles, node: Node, parts: Parts) -> Any:
    return tiles.tile(node.inputs[0], parts)


@rule("tile")
def _repeat(tiles: Tiles, node: Node, parts: Parts) -> Any:
    (x,) = node.inputs
    lead = len(parts) - len(x.shape)
    inner = [
        part if n in (1, whole) else part.at(part.ids % n)
        for part, n, whole in zip(parts[lead:], x.shape, node.shape[lead:], strict=True)
    ]
    value = tiles.tile(x, inner)
    return value.reshape((1,) * lead + value.shape)


@rule("diagonals")
def _diagonals(tiles: Tiles, node: Node, parts: Parts) -> Any:
    (values,) = (tiles.whole(x) for x in node.inputs)
    rows, columns = parts[-2:]
    lead = (1,) * (len(parts) - 2)
    most = node.shape[-2] - 1
    if rows.points is not None or columns.points is not None:
        ids = columns.ids[None, :] - rows.ids[:, None] + most
        return jnp.take(values, ids, mode="clip").reshape(*lead, rows.size, columns.size)
    length = rows.size + columns.size - 1
    first = columns.start - rows.start - rows.size + 1 + most
    # Padded, because jax would clamp the start of a slice that reaches past an end.
    values = jnp.pad(values, (length, length))
    near = jax.lax.dynamic_slice_in_dim(values, first + length, length)
    # Each row is the one above shifted right by one. Concatenated rows that are one element shorter
    # have that shift.
    flat = jnp.broadcast_to(jnp.pad(near, (0, 1)), (rows.size, length + 1)).reshape(-1)
    moved = flat[: rows.size * length].reshape(rows.size, length)[:, rows.size - 1 :]
    return moved.reshape(*lead, rows.size, columns.size)


@rule("squeeze")
def _squeeze(tiles: Tiles, node: Node, parts: Parts) -> Any:
    (x,) = node.inputs
    rest = iter(parts)
    dropped = {d % len(x.shape) for d in node.params["dimensions"]}
    inner = [ONE if d in dropped else next(rest) for d in range(len(x.shape))]
    return tiles.tile(x, inner).squeeze(tuple(dropped))


@rule("rev")
def _rev(tiles: Tiles, node: Node, parts: Parts) -> Any:
    dims = node.params["dimensions"]
    inner = [
        p.at(n - 1 - p.ids) if d in dims else p
        for d, (p, n) in enumerate(zip(parts, node.shape, strict=True))
    ]
    return tiles.tile(node.inputs[0], inner)


@rule("slice")
def _slice(tiles: Tiles, node: Node, parts: Parts) -> Any:
    (x,) = node.inputs
    strides = node.params["strides"] or (1,) * len(parts)
    inner = [
        p if size == whole else p.at(start + p.ids * step)
        for p, size, whole, start, step in zip(
            parts, node.shape, x.shape, node.params["start_indices"], strides, strict=True
        )
    ]
    return tiles.tile(x, inner)


@rule("dynamic_slice")
def _dynamic_slice(tiles: Tiles, node: Node, parts: Parts) -> Any:
    x, *starts = node.inputs
    inner = []
    for part, size, whole, start in zip(parts, node.shape, x.shape, starts, strict=True):
        first = jnp.clip(tiles.whole(start), 0, whole - size).astype(jnp.int32)
        inner.append(part if size == whole else part.at(first + part.ids))
    return tiles.tile(x, inner)


@rule("pad")
def _pad(tiles: Tiles, node: Node, parts: Parts) -> Any:
    x, filling = node.inputs
    config = node.params["padding_config"]
    if any(interior for _, _, interior in config):
        raise Whole
    inner, inside = [], True
    for dim, (part, size, (low, high, _)) in enumerate(zip(parts, x.shape, config, strict=True)):
        if low == high == 0:
            inner.append(part)
            continue
        ids = part.ids - low
        inner.append(part.at(jnp.clip(ids, 0, size - 1)))
        inside = inside & _along(dim, len(parts), (ids >= 0) & (ids < size))
    return jnp.where(inside, tiles.tile(x, inner), tiles.whole(filling))


@rule("concatenate")
def _concatenate(tiles: Tiles, node: Node, parts: Parts) -> Any:
    dim = node.params["dimension"]
    ids, result, start = parts[dim].ids, None, 0
    for x in node.inputs:
        size = x.shape[dim]
        inner = list(parts)
        inner[dim] = parts[dim].at(jnp.clip(ids - start, 0, size - 1))
        piece = tiles.tile(x, inner)
        here = _along(dim, len(parts), ids >= start)
        result = piece if result is None else jnp.where(here, piece, result)
        start += size
    return result


@rule("dynamic_update_slice")
def _update(tiles: Tiles, node: Node, parts: Parts) -> Any:
    x, new, *starts = node.inputs
    inner, inside = [], True
    for dim, (part, size, start) in enumerate(zip(parts, new.shape, starts, strict=True)):
        if size == x.shape[dim]:
            inner.append(part)
            continue
        first = jnp.clip(tiles.whole(start), 0, x.shape[dim] - size).astype(jnp.int32)
        ids = part.ids - first
        inner.append(part.at(jnp.clip(ids, 0, size - 1)))
        inside = inside & _along(dim, len(parts), (ids >= 0) & (ids < size))
    return jnp.where(inside, tiles.tile(new, inner), tiles.tile(x, parts))


@rule("reduce_and", "reduce_or", "reduce_max", "reduce_min", "reduce_sum")
def _reduce(tiles: Tiles, node: Node, parts: Parts) -> Any:
    (x,) = node.inputs
    axes, rest = node.params["axes"], iter(parts)
    inner = [TilePart(0, n) if d in axes else next(rest) for d, n in enumerate(x.shape)]
    value = tiles.tile(x, inner)
    # Tiles have size 1 along dims that do not vary; a sum has to count every element.
    shape = [n if d in axes else value.shape[d] for d, n in enumerate(x.shape)]
    return node.op.bind(jnp.broadcast_to(value, shape), **node.params)


@rule("dot_general")
def _dot(tiles: Tiles, node: Node, parts: Parts) -> Any:
    ((left_c, right_c), (left_b, right_b)) = node.params["dimension_numbers"]
    values, position = [], len(left_b)
    for x, contracted, batch in zip(node.inputs, (left_c, right_c), (left_b, right_b), strict=True):
        inner: list[TilePart] = [TilePart(0, n) for n in x.shape]
        for at, dim in enumerate(batch):
            inner[dim] = parts[at]
        for dim in range(len(x.shape)):
            if dim not in (*contracted, *batch):
                inner[dim], position = parts[position], position + 1
        shape = [n if d in contracted else inner[d].size for d, n in enumerate(x.shape)]
        shape = [1 if n == 1 else size for n, size in zip(x.shape, shape, strict=True)]
        values.append(jnp.broadcast_to(tiles.tile(x, inner), shape))
    return node.op.bind(*values, **node.params)


# Rows of a table that is still small compared with the scores.
_TABLE = 64


@rule("gather")
def _gather(tiles: Tiles, node: Node, parts: Parts) -> Any:
    """Take rows of a small table, as an embedding does."""
    table, ids = node.inputs
    numbers = node.params["dimension_numbers"]
    rank, width = len(parts), len(numbers.offset_dims)
    rows = numbers.offset_dims == tuple(range(rank - width, rank))
    if not (
        rows
        and numbers.collapsed_slice_dims == numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and node.params["slice_sizes"][1:] == table.shape[1:]
        and table.size <= _TABLE * tiles.limit
    ):
        raise Whole
    places = tiles.tile(ids, [*parts[: rank - width], ONE])
    sizes = (1, *table.shape[1:])
    params = node.params | {"slice_sizes": sizes}
    value = node.op.bind(tiles.whole(table), places, **params)
    return picked(
        value, [TilePart(0, n) for n in value.shape[: rank - width]] + [*parts[rank - width :]]
    )


@rule("reshape")
def _reshape(tiles: Tiles, node: Node, parts: Parts) -> Any:
    (x,) = node.inputs
    if node.params.get("dimensions") is not None:
        raise Whole
    plans = [
        _regroup(tiles, x, ins, [(node.shape[d], parts[d]) for d in outs])
        for ins, outs in regrouped(x.shape, node.shape)
    ]
    value = tiles.tile(x, [part for inner, _, _ in plans for part in inner])
    full = [n for _, filled, _ in plans for n in filled]
    shape = tuple(max(a, b) for a, b in zip(value.shape, full, strict=True))
    value = jnp.broadcast_to(value, shape)
    sizes, dim = [], 0
    for inner, _, wanted in plans:
        had = [n for n in shape[dim : dim + len(inner)] if n > 1]
        dim += len(inner)
        sizes += wanted(had)
    return value.reshape(sizes)


def _regroup(
    tiles: Tiles, x: Node, ins: list[int], outs: list[tuple[int, TilePart]]
) -> tuple[list[TilePart], list[int], Callable[[list[int]], list[int]]]:
    """Map dims of a reshape's operand to dims of its result.

    Returns:
        The request for the operand's dims, the least sizes that they are to have, and a function
        from these sizes (without ones) to the sizes of the result's dims.
    """
    before = [x.shape[d] for d in ins]
    real = [(n, p) for n, p in outs if n > 1]
    ones = [1] * len(ins)
    if [n for n, _ in real] == [n for n in before if n > 1] and len(real) == 1:
        inner = [ONE if n == 1 else real[0][1] for n in before]
        return inner, ones, lambda had: [1 if n == 1 or not had else had[0] for n, _ in outs]
    if all(p.is_whole(n) for n, p in real):
        return [TilePart(0, n) for n in before], before, lambda had: [n for n, _ in outs]
    moving = [d for d in ins if d in tiles.varying(x)]
    if len(moving) > 1:
        raise Whole
    # One dim becomes several: its positions are sums of theirs.
    flat: Any = jnp.zeros((1,), jnp.int32)
    for n, part in real:
        flat = (flat[:, None] * n + part.ids[None, :]).reshape(-1)
    inner = [ONE] * len(ins)
    for d in moving:
        at = ins.index(d)
        places = flat // math.prod(before[at + 1 :]) % before[at]
        inner[at] = TilePart(0, flat.shape[0], places)
    return inner, ones, lambda had: [p.size if n > 1 and had else 1 for n, p in outs]


def _along(dim: int, rank: int, value: Any) -> Any:
    return value.reshape([-1 if d == dim else 1 for d in range(rank)])
