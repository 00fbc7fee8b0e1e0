"""JAX's splash attention kernel for one chip: blocks, padding, and masks only where needed.

The kernel is `jax.experimental.pallas.ops.tpu.splash_attention`. Its gradient kernels take the
logsumexp and output of a softmax over more keys than they are given. Both the two schedules of
`schedule.py` and a ring of chips need that; JAX keeps the function that calls them private.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

from tpuport.kernels.attention.problem import Gradients, Local, Parts
from tpuport.kernels.attention.schedule import (
    NOBODY,
    MaskInfo,
    Piece,
    ScheduleBand,
    SegmentIds,
    make_pieces,
    without_nobody,
)

# The kernel's score of a pair that is not seen. A row whose logsumexp is below half of it saw none.
MASK_VALUE = kernels.DEFAULT_MASK_VALUE
# Up to this many blocks of keys, ids are compared in all of them: one call of the kernel costs less
# than two, and one schedule serves the whole batch.
FEW_BLOCKS = 2
_LANES = 128


class TileExample(NamedTuple):
    """One example of the batch: (heads, sequence, size), padded to full blocks.

    Args:
        q: queries, scaled.
        k: keys.
        v: values.
        q_segments: (Sq,), or None.
        kv_segments: (Sk,), or None.
        num_keys: traced number of keys that are seen, where the batch's differ; else None.
    """

    q: Any
    k: Any
    v: Any
    q_segments: Any
    kv_segments: Any
    num_keys: Any


class Sorting(NamedTuple):
    """Keys moved so that the valid ones come first, each kind in its old order.

    `jax.lax.sort` would do, but takes libtpu a quarter of a minute to compile.

    Args:
        place: (B, Sk), the position that each key moves to.
        is_sorted: whether every key is at its position already.
    """

    place: jax.Array
    is_sorted: jax.Array

    @classmethod
    def by(cls, valid: jax.Array) -> "Sorting":
        """Build the sorting of keys from whether they are valid, (B, Sk)."""
        so_far, number = _count_so_far(valid), jnp.arange(valid.shape[1], dtype=jnp.int32)
        count = valid.sum(1, keepdims=True, dtype=jnp.int32)
        place = jnp.where(valid, so_far - 1, count + number - so_far)
        return cls(place, jnp.all(place == number))

    def apply(self, x: jax.Array) -> jax.Array:
        """Sort (B, H, Sk, D)."""

        def move(x: jax.Array) -> jax.Array:
            rows = jnp.arange(self.place.shape[0])[:, None]
            order = (
                jnp.zeros_like(self.place)
                .at[rows, self.place]
                .set(jnp.arange(self.place.shape[1], dtype=jnp.int32), unique_indices=True)
            )
            return jnp.take_along_axis(x, order[:, None, :, None], axis=2)

        return lax.cond(self.is_sorted, lambda x: x, move, x)

    def undo(self, x: jax.Array) -> jax.Array:
        """Apply the inverse of `apply`."""

        def move(x: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, self.place[:, None, :, None], axis=2)

        return lax.cond(self.is_sorted, lambda x: x, move, x)


@dataclass(frozen=True)
class Prepared:
    """A batch in the kernel's layout, with what is needed to map its gradients back.

    Args:
        examples: all examples of the batch, along the first axis.
        band: the band that all of them see.
        sorting: sorting of their keys, or None.
        sizes: rows of one block of queries and of keys.
        by_ids: whether ids decide which blocks are visited, not only what is seen of them.
    """

    examples: TileExample
    band: ScheduleBand
    sorting: Sorting | None
    sizes: tuple[int, int]
    by_ids: bool

    def pieces(self, example: TileExample, by_key: bool) -> list[Piece]:
        """Return the schedules of one example."""
        band = self.band
        if example.num_keys is not None:
            band = dataclasses.replace(band, num_keys=example.num_keys)
        num_blocks = tuple(
            x.shape[1] // size for x, size in zip((example.q, example.k), self.sizes, strict=True)
        )
        ids = SegmentIds(example.q_segments, example.kv_segments) if self.by_ids else None
        return make_pieces(band, num_blocks, self.sizes, by_key=by_key, ids=ids)

    def ids_of(self, example: TileExample, piece: Piece) -> kernels.SegmentIds | None:
        """Return the ids that the kernel compares in the blocks of a piece, or None."""
        if example.q_segments is None or (self.by_ids and not piece.at_edge):
            return None
        return kernels.SegmentIds(example.q_segments, example.kv_segments)

    def over_batch(self, one: Callable[..., Any], *rows: jax.Array) -> Any:
        """Apply `one` to every example of the batch and its rows of the further arrays."""
        batch = (self.examples, *rows)
        if self.examples.num_keys is None and not self.by_ids:
            return jax.vmap(one)(*batch)
        # Each example has a schedule of its own, and a kernel takes one: no vmap over them.
        if self.examples.q.shape[0] == 1:
            first = one(*jax.tree.map(lambda x: x[0], batch))
            return jax.tree.map(lambda x: x[None], first)
        return lax.map(lambda args: one(*args), batch)


def _count_so_far(flags: jax.Array) -> jax.Array:
    """Compute `cumsum` of booleans (B, N) along the last axis, as int32.

    Within a row of lanes it is a product, exact in any precision; libtpu takes ten times as long to
    compile a sum over windows of a long row.
    """
    batch, length = flags.shape
    lanes = jnp.pad(flags, [(0, 0), (0, -length % _LANES)]).reshape(batch, -1, _LANES)
    up_to = np.triu(np.ones((_LANES, _LANES), jnp.bfloat16))
    within = jnp.dot(lanes.astype(jnp.bfloat16), up_to, preferred_element_type=jnp.float32)
    within = within.astype(jnp.int32)
    before = jnp.cumsum(within[..., -1], 1) - within[..., -1]
    return (within + before[..., None]).reshape(batch, -1)[:, :length]


def forward(local: Local, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute what `blockwise.forward` does."""
    prepared = _prepare(local, q, k, v, local.problem.tiles.q, local.problem.tiles.kv)
    out, lse = prepared.over_batch(lambda example: _forward_one(local, prepared, example))
    num_q = q.shape[2]
    return out[:, :, :num_q], lse[:, :, :num_q]


def backward(
    local: Local,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
) -> Gradients:
    """Compute what `blockwise.backward` does."""
    tiles = local.problem.tiles
    prepared = _prepare(local, q, k, v, tiles.q_back, tiles.kv_back)
    # A row that saw nothing has no gradient, and its logsumexp must not make NaN of zero.
    empty = jnp.isneginf(lse)
    grad = jnp.where(empty[..., None], 0, grad.astype(q.dtype))
    lse = jnp.where(empty, 0, lse).astype(jnp.float32)
    rows = [_pad(x, 2, tiles.q_back) for x in (out, lse, grad)]

    def one(*args: Any) -> tuple[jax.Array, ...]:
        return _backward_one(local, prepared, *args)

    dq, dk, dv = prepared.over_batch(one, *rows)
    dq = (dq[:, :, : q.shape[2]].astype(jnp.float32) * local.problem.scale).astype(q.dtype)
    dk, dv = dk[:, :, : k.shape[2]], dv[:, :, : k.shape[2]]
    if prepared.sorting is not None:
        dk, dv = prepared.sorting.undo(dk), prepared.sorting.undo(dv)
    return Gradients(dq, dk.astype(k.dtype), dv.astype(v.dtype))


def _prepare(
    local: Local, q: jax.Array, k: jax.Array, v: jax.Array, q_block: int, kv_block: int
) -> Prepared:
    """Scale, order and pad a batch, and describe by band and ids what is seen."""
    problem, parts, origin = local.problem, local.parts, local.origin
    num_keys: Any = local_keys(local, k.shape[2])
    sorting = counts = ids = None
    is_cut = isinstance(num_keys, jax.Array)
    is_free = problem.low is None and problem.high is None and parts.q_segments is None
    if parts.key_valid is not None and is_free and not is_cut:
        # No query depends on the order of the keys: valid ones go first, so a count masks them.
        valid = parts.key_valid & (jnp.arange(k.shape[2]) < num_keys)
        sorting = Sorting.by(valid)
        k, v = sorting.apply(k), sorting.apply(v)
        counts = valid.sum(1, dtype=jnp.int32)
        num_keys = counts
    elif (
        parts.key_valid is not None
        or parts.q_segments is not None
        or (is_cut and problem.low is not None)
    ):
        ids = make_ids(parts, q, k, num_keys, (q_block, kv_block))
        num_keys = ids.kv.shape[1]
    band = ScheduleBand(problem.low, problem.high, origin.q - origin.k, q.shape[2], num_keys)
    scaled = (q.astype(jnp.float32) * problem.scale).astype(q.dtype)
    examples = TileExample(
        _pad(scaled, 2, q_block),
        _pad(k, 2, kv_block),
        _pad(v, 2, kv_block),
        None if ids is None else ids.q,
        None if ids is None else ids.kv,
        counts,
    )
    by_ids = ids is not None and k.shape[2] > FEW_BLOCKS * kv_block
    return Prepared(examples, band, sorting, (q_block, kv_block), by_ids)


def make_ids(
    parts: Parts, q: jax.Array, k: jax.Array, num_keys: Any, blocks: tuple[int, int]
) -> SegmentIds:
    """Return ids (B, full blocks) by which queries see the valid keys of their segment.

    Keys from `num_keys` on are not valid.
    """
    q_ids: Any = jnp.zeros((q.shape[0], q.shape[2]), jnp.int32)
    kv_ids: Any = jnp.zeros((k.shape[0], k.shape[2]), jnp.int32)
    if parts.q_segments is not None:
        q_ids, kv_ids = without_nobody(parts.q_segments, parts.kv_segments)
    seen = jnp.arange(k.shape[2]) < num_keys
    if parts.key_valid is not None:
        seen = seen & parts.key_valid
    # Padding repeats the last query's id, so that the last block has no further id to compare.
    q_ids = jnp.pad(q_ids, [(0, 0), (0, -q.shape[2] % blocks[0])], mode="edge")
    kv_ids = jnp.where(seen, kv_ids, NOBODY)
    more = -k.shape[2] % blocks[1]
    return SegmentIds(q_ids, jnp.pad(kv_ids, [(0, 0), (0, more)], constant_values=NOBODY))


def local_keys(local: Local, size: int) -> Any:
    """Return how many of this chip's `size` keys belong to the sequence; a number, maybe traced."""
    whole, start = local.problem.num_keys, local.origin.k
    if local.problem.keys_whole:
        return size
    if isinstance(start, jax.Array):
        return jnp.clip(whole - start, 0, size).astype(jnp.int32)
    return min(max(whole - start, 0), size)


def _pad(x: jax.Array, axis: int, block: int) -> jax.Array:
    """Return `x` with zeros at the end of an axis, up to full blocks."""
    more = -x.shape[axis] % block
    if not more:
        return x
    return jnp.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)])


def _forward_one(
    local: Local, prepared: Prepared, example: TileExample
) -> tuple[jax.Array, jax.Array]:
    """Return output (Hq, Sq, Dv) and logsumexp (Hq, Sq) of one example."""
    problem = local.problem
    tiles = problem.tiles

    def run(piece: Piece, info: MaskInfo) -> tuple[jax.Array, jax.Array]:
        kernel = kernels.SplashAttentionKernel(
            jax.tree.map(jnp.asarray, info),
            None,
            None,
            block_sizes=kernels.BlockSizes(tiles.q, tiles.kv, tiles.kv_compute),
            is_mqa=False,
            save_residuals=True,
            mask_value=MASK_VALUE,
            attn_logits_soft_cap=problem.softcap,
            residual_checkpoint_name=None,
            mask_function=piece.function,
            interpret=problem.interpret,
        )
        ids = prepared.ids_of(example, piece)
        out, (lse,) = kernel(example.q, example.k, example.v, ids)
        empty = ~(lse > MASK_VALUE / 2)
        return jnp.where(empty[..., None], 0, out), jnp.where(empty, -jnp.inf, lse)

    found = None
    for piece in prepared.pieces(example, by_key=False):
        if piece.rounds is None:
            now = run(piece, piece.info)
            found = now if found is None else merge(found, now)
            continue

        def further(number: Any, found: Any, piece: Piece = piece) -> Any:
            out, lse = merge(found, run(piece, piece.of_round(number)))
            return out.astype(found[0].dtype), lse

        found = lax.fori_loop(0, piece.rounds, further, found or _nothing(example))
    out, lse = found or _nothing(example)
    return out.astype(example.q.dtype), lse


def _nothing(example: TileExample) -> tuple[jax.Array, jax.Array]:
    """Return the output and logsumexp of no keys at all."""
    shape = example.q.shape[:2]
    out = jnp.zeros((*shape, example.v.shape[-1]), example.q.dtype)
    return out, jnp.full(shape, -jnp.inf, jnp.float32)


def merge(
    one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Merge (output (..., S, D), logsumexp (..., S)) over two sets of keys."""
    (out_a, lse_a), (out_b, lse_b) = one, other
    lse = jnp.logaddexp(lse_a, lse_b)
    base = jnp.where(jnp.isneginf(lse), 0, lse)
    share_a, share_b = jnp.exp(lse_a - base)[..., None], jnp.exp(lse_b - base)[..., None]
    return share_a * out_a + share_b * out_b, lse


def _backward_one(
    local: Local,
    prepared: Prepared,
    example: TileExample,
    out: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
) -> tuple[jax.Array, ...]:
    """Compute gradients of scaled queries, keys and values of one example."""
    problem = local.problem
    tiles = problem.tiles
    by_query, by_key = (prepared.pieces(example, by_key=by_key) for by_key in (False, True))
    compute = min(tiles.kv_compute, tiles.kv_back)
    blocks = kernels.BlockSizes(
        block_q=tiles.q,
        block_kv=tiles.kv,
        block_kv_compute=tiles.kv_compute,
        block_q_dkv=tiles.q_back,
        block_kv_dkv=tiles.kv_back,
        block_kv_dkv_compute=compute if tiles.kv_back % compute == 0 else tiles.kv_back,
        block_q_dq=tiles.q_back,
        block_kv_dq=tiles.kv_back,
    )

    def run(piece: Piece, dq_info: MaskInfo, dkv_info: MaskInfo) -> tuple[jax.Array, ...]:
        ids = prepared.ids_of(example, piece)
        saved = (
            *(example.q, example.k, example.v, ids, None, out, lse),
            *(jax.tree.map(jnp.asarray, info) for info in (dq_info, dkv_info)),
        )
        found = kernels._splash_attention_bwd(
            save_residuals=False,
            mask_value=MASK_VALUE,
            is_mqa=False,
            block_sizes=blocks,
            residual_checkpoint_name=None,
            mask_function=piece.function,
            attn_logits_soft_cap=problem.softcap,
            interpret=problem.interpret,
            res=saved,
            do=grad,
        )
        return found[3:6]

    total = tuple(jnp.zeros(x.shape, jnp.float32) for x in (example.q, example.k, example.v))

    def add(total: Any, found: Any) -> tuple[jax.Array, ...]:
        return tuple(a + b.astype(jnp.float32) for a, b in zip(total, found, strict=True))

    for dq, dkv in zip(by_query, by_key, strict=True):
        if dq.rounds is None:
            total = add(total, run(dq, dq.info, dkv.info))
            continue

        def further(number: Any, total: Any, dq: Piece = dq, dkv: Piece = dkv) -> Any:
            return add(total, run(dq, dq.of_round(number), dkv.of_round(number)))

        total = lax.fori_loop(0, jnp.maximum(dq.rounds, dkv.rounds), further, total)
    return total
