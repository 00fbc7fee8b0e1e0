"""Attention tile by tile in plain jax, for any mask and bias, without the full score matrix.

Online softmax, after Milakov and Gimelshein (arxiv.org/abs/1805.02867) and Rabe and Staats
(arxiv.org/abs/2112.05682); the backward pass recomputes each tile from the logsumexp, after Dao et
al. (arxiv.org/abs/2205.14135).

The last tile of a sequence that the tile size does not divide overlaps the one before it, so that
nothing is padded; the rows that it repeats are stale, and count once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpuport.kernels.attention import random_bits
from tpuport.kernels.attention.full import grouped, scores_of
from tpuport.kernels.attention.problem import Gradients, Local, is_float

# A logsumexp below this has lost too many digits.
_LOW = -1e3


class RowBlock(NamedTuple):
    """`size` rows from `start`, of which the first `stale` belong to the tile before."""

    start: Any
    stale: Any
    size: int

    def of(self, array: jax.Array, axis: int) -> jax.Array:
        """Slice these rows out of an array."""
        return lax.dynamic_slice_in_dim(array, self.start, self.size, axis)

    def fresh(self) -> jax.Array:
        """Return booleans (size,) that mark the rows that are this tile's own."""
        return jnp.arange(self.size) >= self.stale


class Tile(NamedTuple):
    """One tile of one chip's attention: the rows of its queries and of its keys."""

    local: Local
    q: RowBlock
    k: RowBlock

    def places(self) -> tuple[Any, Any]:
        """Return the tile's first query and first key as positions in the unsharded sequences."""
        return self.local.origin.q + self.q.start, self.local.origin.k + self.k.start

    def run_if_seen(self, run: Callable[[Any], Any], carry: Any) -> Any:
        """Return `run(carry)`, or `carry` unchanged if the tile is outside the band."""
        low, high = self.local.problem.low, self.local.problem.high
        if low is None and high is None:
            return run(carry)
        q_start, k_start = self.places()
        seen = jnp.bool_(True)
        if low is not None:
            seen &= k_start + self.k.size - 1 - q_start >= low
        if high is not None:
            seen &= k_start - (q_start + self.q.size - 1) <= high
        return lax.cond(seen, run, lambda unchanged: unchanged, carry)

    def seen(self) -> jax.Array:
        """Return which scores count, apart from a further mask, broadcastable to (B, 1, q, k)."""
        problem, parts = self.local.problem, self.local.parts
        q_start, k_start = self.places()
        q_ids = (q_start + jnp.arange(self.q.size))[:, None]
        k_ids = (k_start + jnp.arange(self.k.size))[None, :]
        seen = self.q.fresh()[:, None] & self.k.fresh()[None, :] & (k_ids < problem.num_keys)
        if problem.low is not None:
            seen &= k_ids - q_ids >= problem.low
        if problem.high is not None:
            seen &= k_ids - q_ids <= problem.high
        seen = seen[None, None]
        if parts.q_segments is not None:
            ids = self.q.of(parts.q_segments, 1)[:, None, :, None]
            seen &= ids == self.k.of(parts.kv_segments, 1)[:, None, None, :]
        if parts.key_valid is not None:
            seen &= self.k.of(parts.key_valid, 1)[:, None, None, :]
        return seen

    def scores(
        self, q: jax.Array, k: jax.Array, captured: tuple[Any, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the scores of the tile's grouped queries and keys, and which of them count."""
        problem, origin = self.local.problem, self.local.origin
        further = None
        if problem.further is not None:
            further = problem.further(captured, *self.places())
            further = jnp.reshape(further, (1,) * (4 - further.ndim) + further.shape)
            # The bias is replicated: each chip slices out its own examples and heads.
            own = ((0, origin.batch, q.shape[0]), (1, origin.head, q.shape[1] * q.shape[2]))
            for axis, start, size in own:
                if further.shape[axis] > size:
                    further = lax.dynamic_slice_in_dim(further, start, size, axis)
        scores, seen = scores_of(
            q,
            k,
            scale=problem.scale,
            softcap=problem.softcap,
            seen=self.seen(),
            further=further,
            fill=problem.fill,
        )
        assert seen is not None
        return scores, jnp.broadcast_to(seen, scores.shape)

    def kept(self, shape: tuple[int, ...]) -> jax.Array | float:
        """Return the tile's dropout as factors of its weights; 1 without dropout.

        The random numbers are those of the whole array of weights, where the key allows it.
        """
        rate, origin = self.local.problem.dropout, self.local.origin
        if not rate:
            return 1.0
        key = self.local.parts.key
        if random_bits.draws_by_element(key):
            return self._drawn(shape) / (1 - rate)
        for place in (origin.batch, origin.head, *self.places()):
            key = jax.random.fold_in(key, place)
        return jax.random.bernoulli(key, 1 - rate, shape) / (1 - rate)

    def _drawn(self, shape: tuple[int, ...]) -> jax.Array:
        """Return which weights (B, Hkv, G, q, k) of the tile are kept."""
        problem, origin = self.local.problem, self.local.origin
        heads, queries, keys = problem.drawn_of
        batch, kv_heads, share, num_q, num_k = (jnp.arange(n, dtype=jnp.uint32) for n in shape)
        q_start, k_start, first_batch, first_head = (
            jnp.asarray(x).astype(jnp.uint32) for x in (*self.places(), origin.batch, origin.head)
        )
        head = kv_heads[:, None] * np.uint32(shape[2]) + share + first_head
        row = (batch + first_batch)[:, None, None] * np.uint32(heads) + head
        row = row[..., None] * np.uint32(queries) + num_q + q_start
        high, low = random_bits.number_of(row[..., None], keys, num_k + k_start)
        first, second = random_bits.words_of(self.local.parts.key)
        return random_bits.are_kept(
            random_bits.bits_of((first, second), high, low), problem.dropout
        )


def tile_sizes(local: Local, num_queries: int, num_keys: int) -> tuple[int, int]:
    """Return how many queries and keys one tile has, at most as many as there are."""
    tiles = local.problem.tiles
    return min(tiles.q, num_queries), min(tiles.kv, num_keys)


def forward(local: Local, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return outputs (B, Hq, Sq, Dv) and logsumexp (B, Hq, Sq), -inf where a row is empty."""
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    dim, num_kv_heads = v.shape[-1], k.shape[1]
    q_grouped = grouped(q, num_kv_heads)
    shape = q_grouped.shape[:3]
    q_size, k_size = tile_sizes(local, q.shape[2], k.shape[2])

    def row(carry: tuple[jax.Array, jax.Array], at: tuple[Any, Any]) -> tuple[Any, None]:
        out, lse = carry
        q_rows = RowBlock(*at, q_size)

        def column(carry: Any, at: tuple[Any, Any]) -> tuple[Any, None]:
            tile = Tile(local, q_rows, RowBlock(*at, k_size))
            return tile.run_if_seen(lambda c: _step(tile, c, q_grouped, k, v), carry), None

        first = (
            jnp.full((*shape, q_size), -jnp.inf, accumulate),
            jnp.zeros((*shape, q_size), accumulate),
            jnp.zeros((*shape, q_size, dim), accumulate),
        )
        (high, total, weighted), _ = lax.scan(column, first, _starts(k.shape[2], k_size))
        safe = jnp.where(total > 0, total, 1)
        tile_out = (weighted / safe[..., None]).astype(out.dtype)
        tile_lse = jnp.where(total > 0, high + jnp.log(safe), -jnp.inf)
        fresh = q_rows.fresh()
        tile_out = jnp.where(fresh[:, None], tile_out, q_rows.of(out, 3))
        tile_lse = jnp.where(fresh, tile_lse, q_rows.of(lse, 3))
        out = lax.dynamic_update_slice_in_dim(out, tile_out, q_rows.start, 3)
        return (out, lax.dynamic_update_slice_in_dim(lse, tile_lse, q_rows.start, 3)), None

    empty = (
        jnp.zeros((*shape, q.shape[2], dim), q.dtype),
        jnp.zeros((*shape, q.shape[2]), accumulate),
    )
    (out, lse), _ = lax.scan(row, empty, _starts(q.shape[2], q_size))
    return out.reshape(*q.shape[:3], dim), lse.reshape(q.shape[:3])


def backward(
    local: Local,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
) -> Gradients:
    """Compute gradients from the output of the complete softmax, its logsumexp and its gradient.

    `k` and `v` may be only a part of the keys that `out` and `lse` come from.
    """
    num_kv_heads = k.shape[1]
    accumulate = lse.dtype
    grad = grouped(grad, num_kv_heads).astype(accumulate)
    inner = jnp.sum(grad * grouped(out, num_kv_heads), -1)
    q_grouped = grouped(q, num_kv_heads)
    rows = (q_grouped, grad, grouped(lse, num_kv_heads), inner)
    further = local.problem.further is not None
    q_size, k_size = tile_sizes(local, q.shape[2], k.shape[2])

    def row(carry: Gradients, at: tuple[Any, Any]) -> tuple[Gradients, None]:
        q_rows = RowBlock(*at, q_size)
        own = [q_rows.of(array, 3) for array in rows]
        lost = _lost(local, q_rows, own, k, k_size) if further else 0.0

        def column(carry: Gradients, at: tuple[Any, Any]) -> tuple[Gradients, None]:
            tile = Tile(local, q_rows, RowBlock(*at, k_size))
            return tile.run_if_seen(lambda c: _step_back(tile, c, (own, lost), k, v), carry), None

        return lax.scan(column, carry, _starts(k.shape[2], k_size))[0], None

    zeros = Gradients(
        jnp.zeros(q_grouped.shape, accumulate),
        jnp.zeros(k.shape, accumulate),
        jnp.zeros(v.shape, accumulate),
        tuple(jnp.zeros_like(c) for c in local.parts.captured if is_float(c)),
    )
    total = lax.scan(row, zeros, _starts(q.shape[2], q_size))[0]
    return Gradients(
        total.q.reshape(q.shape).astype(q.dtype),
        total.k.astype(k.dtype),
        total.v.astype(v.dtype),
        total.captured,
    )


def _starts(size: int, tile: int) -> tuple[jax.Array, jax.Array]:
    """Return each tile's start so that they cover `size` rows, and its number of stale rows."""
    wanted = jnp.arange(-(-size // tile), dtype=jnp.int32) * tile
    starts = jnp.minimum(wanted, size - tile)
    return starts, wanted - starts


def _step(tile: Tile, carry: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """Add one tile of keys to the running maximum, sum and weighted values."""
    high, total, weighted = carry
    scores, seen = tile.scores(tile.q.of(q, 3), tile.k.of(k, 2), tile.local.parts.captured)
    scores = jnp.where(seen, scores, -jnp.inf)
    next_high = jnp.maximum(high, scores.max(-1))
    # The maximum of a row that is empty so far is -inf, and -inf - -inf is NaN.
    base = jnp.where(jnp.isneginf(next_high), 0, next_high)
    weights = jnp.exp(scores - base[..., None])
    shrink = jnp.exp(high - base)
    total = total * shrink + weights.sum(-1)
    values = tile.k.of(v, 2)
    added = jnp.einsum(
        "bhgqk,bhkd->bhgqd",
        (weights * tile.kept(weights.shape)).astype(values.dtype),
        values,
        preferred_element_type=weighted.dtype,
    )
    return next_high, total, weighted * shrink[..., None] + added


def _lost(
    local: Local, q_rows: RowBlock, own: list[jax.Array], k: jax.Array, k_size: int
) -> jax.Array:
    """Return the logarithms of sums that were lost in the logsumexp of these rows.

    Where all scores of a row are lowered by a large finite number, such as -1e9, float32 cannot
    hold the logarithm of their count beside it.
    """
    q, _, lse, _ = own

    def counted() -> jax.Array:
        def column(total: jax.Array, at: tuple[Any, Any]) -> tuple[jax.Array, None]:
            tile = Tile(local, q_rows, RowBlock(*at, k_size))
            scores, seen = tile.scores(q, tile.k.of(k, 2), local.parts.captured)
            weights = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0)
            return total + weights.sum(-1), None

        total, _ = lax.scan(column, jnp.zeros_like(lse), _starts(k.shape[2], k_size))
        return jnp.where(is_low, jnp.log(jnp.where(total > 0, total, 1)), 0)

    is_low = (lse < _LOW) & ~jnp.isneginf(lse)
    return lax.cond(is_low.any(), counted, lambda: jnp.zeros_like(lse))


def _step_back(
    tile: Tile,
    carry: Gradients,
    rows: tuple[list[jax.Array], Any],
    k: jax.Array,
    v: jax.Array,
) -> Gradients:
    """Add the gradients of one tile to the running totals."""
    (q, grad, lse, inner), lost = rows
    values = tile.k.of(v, 2)
    captured = tile.local.parts.captured

    def scores(q: jax.Array, k: jax.Array, floats: Any) -> tuple[jax.Array, jax.Array]:
        left = iter(floats)
        return tile.scores(q, k, tuple(next(left) if is_float(c) else c for c in captured))

    floats = tuple(c for c in captured if is_float(c))
    logits, pull, seen = jax.vjp(scores, q, tile.k.of(k, 2), floats, has_aux=True)
    lse = jnp.where(jnp.isneginf(lse), 0, lse)
    logits = logits - lse[..., None] - jnp.asarray(lost)[..., None]
    weights = jnp.where(seen, jnp.exp(logits), 0)
    kept = tile.kept(weights.shape)
    d_values = jnp.einsum("bhgqk,bhgqd->bhkd", weights * kept, grad)
    d_weights = jnp.einsum("bhgqd,bhkd->bhgqk", grad, values.astype(grad.dtype)) * kept
    d_q, d_k, d_floats = pull(weights * (d_weights - inner[..., None]))
    return Gradients(
        _add(carry.q, d_q, tile.q.start, 3),
        _add(carry.k, d_k, tile.k.start, 2),
        _add(carry.v, d_values, tile.k.start, 2),
        tuple(a + b for a, b in zip(carry.captured, d_floats, strict=True)),
    )


def _add(total: jax.Array, part: jax.Array, start: Any, axis: int) -> jax.Array:
    """Return `total` with `part` added to its rows from `start`."""
    old = lax.dynamic_slice_in_dim(total, start, part.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(total, old + part.astype(total.dtype), start, axis)
