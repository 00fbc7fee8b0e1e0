"""The structure of one traced mask, in the terms of `tpuport.kernels.attention.Mask`."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuport.kernels.attention import Mask
from tpuport.tracing.attention.masks import tile_rules
from tpuport.tracing.attention.masks.bands import Band, K, Q, band_of
from tpuport.tracing.attention.masks.graph import Graph, Node, leaf
from tpuport.tracing.attention.masks.host_masks import host_mask
from tpuport.tracing.attention.masks.tiles import ONE, TilePart, Tiles, known_tile
from tpuport.tracing.attention.masks.two_valued import conditions, split
from tpuport.tracing.attention.masks.views import broadcast, known_array, sunk

assert tile_rules.__name__  # imported for the rules that it registers


@dataclass
class Structure:
    """The parts of a mask; a key is seen where all of them hold.

    Attributes:
        shape: (batch, heads, queries, keys) of the scores.
        band: Limits of how far a key may be from a query.
        segments: Ids of queries and of keys, where equal ids see each other, or None.
        keys: Conditions on the key alone.
        queries: Conditions on the query alone.
        rest: Any other conditions.
        bias: The number added to the scores, or None.
        fill: What a score becomes where one of `rest` fails; None if it then does not count.
    """

    shape: tuple[int, ...]
    band: Band = field(default_factory=Band)
    segments: tuple[Node, Node] | None = None
    keys: list[Node] = field(default_factory=list)
    queries: list[Node] = field(default_factory=list)
    rest: list[Node] = field(default_factory=list)
    bias: Node | None = None
    fill: float | None = None

    @property
    def limit(self) -> int:
        """Return the number of elements up to which an array is no matrix of scores."""
        return self.shape[0] * max(self.shape[2:])

    @property
    def tiles(self) -> Tiles:
        """Return a computation of tiles of the nodes."""
        return Tiles(self.limit, lambda node: jnp.asarray(node.value))

    def covers(self) -> bool:
        """Return whether every query is sure to see a key."""
        dynamic = self.segments is not None or self.keys or self.queries or self.rest
        return not dynamic and self.band.covers(*self.shape[2:])


def read(value: Any, shape: tuple[int, ...], *, frozen: bool) -> Structure:
    """Return the structure of a mask array or tracer.

    Args:
        value: Broadcastable to `shape`; booleans, or numbers that are added to the scores.
        shape: (batch, heads, queries, keys).
        frozen: Whether no gradient flows into it.
    """
    return read_node(Graph(frozen=frozen).of(value), shape)


def read_node(
    node: Node, shape: tuple[int, ...], *, alone: bool = True, strict: bool = False
) -> Structure:
    """Return the structure of the node of a mask.

    Args:
        node: Broadcastable to `shape`; booleans, or numbers that are added to the scores.
        shape: (batch, heads, queries, keys).
        alone: Whether nothing else hides keys.
        strict: Whether each query is sure to see a key, so that finite numbers hide, too.
    """
    node = _four(node)
    if node.is_bool:
        found = Structure(shape)
        _sort(found, conditions(node))
        return found
    parts = split(node)
    found = Structure(shape, bias=None if parts.bias is None else _four(parts.bias))
    _sort(found, parts.conditions)
    # A bias may outweigh a finite number that hides, and then the key is seen after all.
    if (
        parts.is_finite
        and not strict
        and (parts.bias is not None or not alone or not found.covers())
    ):
        return Structure(shape, bias=node)
    return found


def with_conditions(found: Structure, node: Node) -> Structure:
    """Return the structure with another condition, a boolean node that broadcasts to the scores."""
    found = replace(found, keys=[*found.keys], queries=[*found.queries], rest=[*found.rest])
    _sort(found, conditions(_four(node)))
    return found


def _four(node: Node) -> Node:
    """Return a node with the four dims of scores; an operand within a mask may have fewer."""
    return broadcast(node, (1,) * (4 - len(node.shape)) + tuple(node.shape))


def _sort(found: Structure, parts: list[Node]) -> None:
    tiles = found.tiles
    for part in map(_four, parts):
        along = tiles.varying(part)
        if along <= {0, K}:
            if not _is_all_true(part, along):
                found.keys.append(part)
        elif along <= {0, Q}:
            if not _is_all_true(part, along):
                found.queries.append(part)
        else:
            _place(found, part, along, tiles)


def _is_all_true(node: Node, along: frozenset[int]) -> bool:
    value = known_tile(
        node, [TilePart(0, n) if d in along else ONE for d, n in enumerate(node.shape)]
    )
    return value is not None and bool(value.all())


def _place(found: Structure, part: Node, along: frozenset[int], tiles: Tiles) -> None:
    band = band_of(part, tiles)
    if band is not None:
        found.band &= band
        return
    if along == {Q, K} and known_array(part) is not None and _place_known(found, part):
        return
    ids = _segments(part, tiles)
    if ids is not None and found.segments is None:
        found.segments = ids
        return
    found.rest.append(part)


def _place_known(found: Structure, part: Node) -> bool:
    """Add the structure of a mask that the user's code made on the host; return False if it has
    none.
    """
    shown = known_tile(
        part, [TilePart(0, n) if d in (Q, K) else ONE for d, n in enumerate(part.shape)]
    )
    known = None if shown is None else host_mask(shown[0, 0])
    if known is None or (known.segments is not None and found.segments is not None):
        return False
    found.band &= known.band
    if known.segments is not None:
        q, k = known.segments
        found.segments = leaf(q.reshape(1, 1, -1, 1)), leaf(k.reshape(1, 1, 1, -1))
    return True


def _segments(part: Node, tiles: Tiles) -> tuple[Node, Node] | None:
    """Return the two sides of a condition `ids of queries == ids of keys`, or None."""
    part = sunk(part)
    if part.name != "eq" or any(
        not (x.is_bool or jnp.issubdtype(x.dtype, jnp.integer)) for x in part.inputs
    ):
        return None
    x, y = part.inputs
    if tiles.varying(x) <= {0, K}:
        x, y = y, x
    if not (tiles.varying(x) <= {0, Q} and tiles.varying(y) <= {0, K}):
        return None
    return x, y


def _vector(node: Node, dim: int, tiles: Tiles) -> Any:
    """Return [batch or 1, size of the dim] of a node that varies along no other dims."""
    parts = [TilePart(0, n) if d in (0, dim) else ONE for d, n in enumerate(node.shape)]
    known = known_tile(node, parts)
    value = tiles.tile(node, parts) if known is None else known
    return value.reshape(value.shape[0], -1)


def to_mask(found: Structure) -> Mask:
    """Return the mask in the form that attention takes."""
    num_q, num_k = found.shape[2:]
    low, high = found.band.low, found.band.high
    if high is not None and high >= num_k - 1:
        high = None
    if low is not None and low <= 1 - num_q:
        low = None
    causal = high is not None and (low is None or high == 0)
    segments = _ids(found)
    return Mask(
        causal=causal,
        offset=high if causal and high is not None else 0,
        window=None if low is None else (-low, None if causal else high),
        q_segments=segments[0],
        kv_segments=segments[1],
        key_valid=_valid(found, found.keys, K, num_k),
        query_valid=_valid(found, found.queries, Q, num_q),
        blocks=_blocks(found) if found.rest or found.bias is not None else None,
        fill=found.fill,
    )


def _ids(found: Structure) -> tuple[Any, Any]:
    """Return ids [batch, queries] and [batch, keys], or (None, None)."""
    if found.segments is None:
        return None, None
    q, k = (
        jnp.broadcast_to(
            jnp.asarray(_vector(node, dim, found.tiles), jnp.int32),
            (found.shape[0], found.shape[dim]),
        )
        for node, dim in zip(found.segments, (Q, K), strict=True)
    )
    return q, k


def _valid(found: Structure, nodes: list[Node], dim: int, size: int) -> Any:
    """Return [batch or 1, size]: where all conditions on a dim hold; numpy if concrete."""
    result = None
    for node in nodes:
        value = _vector(node, dim, found.tiles)
        result = value if result is None else result & value
    if result is None or result.shape[1] == size:
        return result
    both = np if isinstance(result, np.ndarray) else jnp
    return both.broadcast_to(result, (result.shape[0], size))


def _blocks(found: Structure) -> Any:
    bias, rest = found.bias, found.rest

    def blocks(q_start: Any, q_size: int, k_start: Any, k_size: int) -> jax.Array:
        tiles = found.tiles
        places = (TilePart(q_start, q_size), TilePart(k_start, k_size))
        seen = None
        for node in rest:
            tile = tiles.tile(node, _parts(node, places))
            seen = tile if seen is None else seen & tile
        if bias is None:
            assert seen is not None
            return seen
        added = tiles.tile(bias, _parts(bias, places))
        if seen is None:
            return added
        if found.fill is None:
            return jnp.where(seen, added, -jnp.inf)
        # Infinity marks what is filled. A bias of infinity makes NaN of its row, and so does NaN.
        return jnp.where(seen, jnp.where(jnp.isposinf(added), jnp.nan, added), jnp.inf)

    return blocks


def _parts(node: Node, places: tuple[TilePart, TilePart]) -> list[TilePart]:
    return [TilePart(0, node.shape[0]), TilePart(0, node.shape[1]), *places]


def rows_seen(found: Structure) -> Any:
    """Return booleans (batch or 1, heads or 1, queries or 1, 1): whether a query sees any key.

    None if each is sure to see one.
    """
    if found.bias is None and (found.fill is not None or found.covers()):
        return None
    tiles, num_q, num_k = found.tiles, *found.shape[2:]
    seen: Any = jnp.ones((1, 1, 1, num_k), bool)
    filled: Any = False
    for node in [*found.keys, *found.queries, *found.rest]:
        tile = tiles.tile(node, [TilePart(0, n) for n in node.shape])
        if found.fill is not None:
            filled |= ~tile
        else:
            seen &= tile
    if found.segments is not None:
        q, k = (tiles.tile(x, [TilePart(0, n) for n in x.shape]) for x in found.segments)
        seen &= q == k
    away = jnp.arange(num_k)[None, :] - jnp.arange(num_q)[:, None]
    if found.band.low is not None:
        seen &= away >= found.band.low
    if found.band.high is not None:
        seen &= away <= found.band.high
    if found.bias is not None:
        bias = found.bias
        seen &= tiles.tile(bias, [TilePart(0, n) for n in bias.shape]) > -jnp.inf
    return (seen | filled).any(-1, keepdims=True)


def arrays_left(found: Structure) -> list[str]:
    """Return arrays of the scores' size that the mask still needs, each with its operation."""
    left: list[str] = []

    def look(node: Node) -> Any:
        if node.size >= found.shape[2] * found.shape[3] and node.size > found.limit:
            shown = f"{np.dtype(node.dtype).name}{list(node.shape)}"
            while node.name == "optimization_barrier" and len(node.inputs) == 1:
                node = node.inputs[0]  # `cumulative` has one around each operation
            left.append(f"{shown} by {node.name or 'an argument'}")
        return jnp.zeros(node.shape, node.dtype)

    tiles = Tiles(found.limit, look)
    places = (TilePart(0, 1), TilePart(0, 1))
    for node in [*found.rest, *([] if found.bias is None else [found.bias])]:
        jax.eval_shape(lambda node=node: tiles.tile(node, _parts(node, places)))
    return list(dict.fromkeys(left))
