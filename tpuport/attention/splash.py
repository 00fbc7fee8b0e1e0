"""JAX's splash attention kernel for one chip: blocks, padding, masks at no cost where none is seen.

The kernel is `jax.experimental.pallas.ops.tpu.splash_attention`. Its gradient kernels take the
logsumexp and output of a softmax over more keys than they are given, which is what both the two
schedules of `schedule.py` and a ring of chips need; JAX keeps the function that calls them private.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

from tpuport.attention.problem import Gradients, Local
from tpuport.attention.schedule import Band, Piece, make_pieces

# What the kernel gives a score that is not seen. A row's logsumexp below half of it has seen none.
MASK_VALUE = kernels.DEFAULT_MASK_VALUE
# An id that no query has.
NOBODY = np.iinfo(np.int32).min


class Example(NamedTuple):
    """One example of the batch: (heads, sequence, size), padded to whole blocks.

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


@dataclass(frozen=True)
class Prepared:
    """A batch as the kernel takes it, and how to take its gradients back."""

    examples: Example
    band: Band
    order: jax.Array | None
    sorted_already: jax.Array | None


def forward(local: Local, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `blockwise.forward`."""
    prepared = _prepare(local, q, k, v, local.problem.tiles.q, local.problem.tiles.kv)
    out, lse = _over_batch(lambda e: _forward_one(local, prepared.band, e), prepared.examples)
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
    """As `blockwise.backward`."""
    tiles = local.problem.tiles
    prepared = _prepare(local, q, k, v, tiles.q_back, tiles.kv_back)
    # A row that saw nothing has no gradient, and its logsumexp must not make NaN of zero.
    empty = jnp.isneginf(lse)
    grad = jnp.where(empty[..., None], 0, grad.astype(q.dtype))
    lse = jnp.where(empty, 0, lse).astype(jnp.float32)
    rows = [_pad(x, 2, tiles.q_back) for x in (out, lse, grad)]

    def one(args: Any) -> tuple[jax.Array, ...]:
        return _backward_one(local, prepared.band, *args)

    dq, dk, dv = _over_batch(one, (prepared.examples, *rows))
    dq = (dq[:, :, : q.shape[2]].astype(jnp.float32) * local.problem.scale).astype(q.dtype)
    dk, dv = dk[:, :, : k.shape[2]], dv[:, :, : k.shape[2]]
    if prepared.order is not None:
        back = jnp.argsort(prepared.order, axis=1)
        dk, dv = (_reorder(x, back, prepared.sorted_already) for x in (dk, dv))
    return Gradients(dq, dk.astype(k.dtype), dv.astype(v.dtype))


def _prepare(
    local: Local, q: jax.Array, k: jax.Array, v: jax.Array, q_block: int, kv_block: int
) -> Prepared:
    """Scales, orders and pads a batch, and says by band and segments what is seen."""
    problem, parts, origin = local.problem, local.parts, local.origin
    num_keys: Any = k.shape[2]
    if not problem.keys_whole:
        num_keys = _number_of_keys(problem.num_keys, origin.k, num_keys)
    q_segments: Any = parts.q_segments
    kv_segments: Any = parts.kv_segments
    valid: Any = parts.key_valid
    order = counts = is_sorted = None
    is_free = problem.low is None and problem.high is None and q_segments is None
    if valid is not None and is_free and not isinstance(num_keys, jax.Array):
        # Nobody minds the order of the keys: the valid ones go first, and are counted.
        valid = valid & (jnp.arange(k.shape[2]) < num_keys)
        order, is_sorted = jnp.argsort(~valid, axis=1, stable=True), _is_prefix(valid)
        k, v = _reorder(k, order, is_sorted), _reorder(v, order, is_sorted)
        counts = valid.sum(1, dtype=jnp.int32)
        num_keys = counts
    elif valid is not None or (isinstance(num_keys, jax.Array) and problem.low is not None):
        within = jnp.arange(k.shape[2]) < num_keys
        valid = within if valid is None else valid & within
        num_keys = k.shape[2]
        if q_segments is None:
            q_segments = jnp.zeros((q.shape[0], q.shape[2]), jnp.int32)
            kv_segments = jnp.zeros((k.shape[0], k.shape[2]), jnp.int32)
        kv_segments = jnp.where(valid, kv_segments, NOBODY)
    band = Band(problem.low, problem.high, origin.q - origin.k, q.shape[2], num_keys)
    scaled = (q.astype(jnp.float32) * problem.scale).astype(q.dtype)
    examples = Example(
        _pad(scaled, 2, q_block),
        _pad(k, 2, kv_block),
        _pad(v, 2, kv_block),
        None if q_segments is None else _pad(q_segments, 1, q_block),
        None if kv_segments is None else _pad(kv_segments, 1, kv_block),
        counts,
    )
    return Prepared(examples, band, order, is_sorted)


def _number_of_keys(whole: int, start: Any, size: int) -> Any:
    """How many of `size` keys from `start` belong to a sequence of `whole`."""
    if isinstance(start, jax.Array):
        return jnp.clip(whole - start, 0, size).astype(jnp.int32)
    return min(max(whole - start, 0), size)


def _is_prefix(valid: jax.Array) -> jax.Array:
    """Whether every example's valid keys come before all others."""
    return jnp.all(valid[:, :-1] | ~valid[:, 1:])


def _reorder(x: jax.Array, order: jax.Array, is_sorted: jax.Array | None) -> jax.Array:
    """(B, H, S, D) with the sequence in this order (B, S); moved only where it is not yet so."""

    def move(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, order[:, None, :, None], axis=2)

    return lax.cond(is_sorted, lambda x: x, move, x)


def _pad(x: jax.Array, axis: int, block: int) -> jax.Array:
    """`x` with zeros at the end of an axis, to whole blocks."""
    more = -x.shape[axis] % block
    if not more:
        return x
    return jnp.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)])


def _over_batch(one: Callable[[Any], Any], batch: Any) -> Any:
    """`one` of every example of the batch."""
    examples = batch if isinstance(batch, Example) else batch[0]
    if examples.num_keys is None:
        return jax.vmap(one)(batch)
    # The schedules differ, and a kernel has one.
    if examples.q.shape[0] == 1:
        first = one(jax.tree.map(lambda x: x[0], batch))
        return jax.tree.map(lambda x: x[None], first)
    return lax.map(one, batch)


def _pieces(band: Band, example: Example, sizes: tuple[int, int], by_key: bool) -> list[Piece]:
    """The schedules of one example."""
    if example.num_keys is not None:
        band = Band(band.low, band.high, band.shift, band.num_queries, example.num_keys)
    num_blocks = example.q.shape[1] // sizes[0], example.k.shape[1] // sizes[1]
    return make_pieces(band, num_blocks, sizes, by_key=by_key)


def _segments(example: Example) -> kernels.SegmentIds | None:
    if example.q_segments is None:
        return None
    return kernels.SegmentIds(example.q_segments, example.kv_segments)


def _forward_one(local: Local, band: Band, example: Example) -> tuple[jax.Array, jax.Array]:
    """Output (Hq, Sq, Dv) and logsumexp (Hq, Sq) of one example."""
    problem = local.problem
    tiles = problem.tiles
    results = []
    for piece in _pieces(band, example, (tiles.q, tiles.kv), by_key=False):
        kernel = kernels.SplashAttentionKernel(
            jax.tree.map(jnp.asarray, piece.info),
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
        out, (lse,) = kernel(example.q, example.k, example.v, _segments(example))
        empty = ~(lse > MASK_VALUE / 2)
        out = jnp.where(empty[..., None], 0, out)
        results.append((out, jnp.where(empty, -jnp.inf, lse)))
    if not results:
        shape = example.q.shape[:2]
        dim = example.v.shape[-1]
        return jnp.zeros((*shape, dim), example.q.dtype), jnp.full(shape, -jnp.inf, jnp.float32)
    merged = results[0]
    for other in results[1:]:
        merged = merge(merged, other)
    return merged[0].astype(example.q.dtype), merged[1]


def merge(
    one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Output (..., S, D) and logsumexp (..., S) over two sets of keys, from those over each."""
    (out_a, lse_a), (out_b, lse_b) = one, other
    lse = jnp.logaddexp(lse_a, lse_b)
    base = jnp.where(jnp.isneginf(lse), 0, lse)
    share_a, share_b = jnp.exp(lse_a - base)[..., None], jnp.exp(lse_b - base)[..., None]
    return share_a * out_a + share_b * out_b, lse


def _backward_one(
    local: Local, band: Band, example: Example, out: jax.Array, lse: jax.Array, grad: jax.Array
) -> tuple[jax.Array, ...]:
    """Gradients of scaled queries, keys and values of one example."""
    problem = local.problem
    tiles = problem.tiles
    sizes = (tiles.q_back, tiles.kv_back)
    by_query = _pieces(band, example, sizes, by_key=False)
    by_key = _pieces(band, example, sizes, by_key=True)
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
    total = tuple(jnp.zeros(x.shape, jnp.float32) for x in (example.q, example.k, example.v))
    for dq_piece, dkv_piece in zip(by_query, by_key, strict=True):
        saved = (
            *(example.q, example.k, example.v, _segments(example), None, out, lse),
            *(jax.tree.map(jnp.asarray, p.info) for p in (dq_piece, dkv_piece)),
        )
        found = kernels._splash_attention_bwd(
            save_residuals=False,
            mask_value=MASK_VALUE,
            is_mqa=False,
            block_sizes=blocks,
            residual_checkpoint_name=None,
            mask_function=dq_piece.function,
            attn_logits_soft_cap=problem.softcap,
            interpret=problem.interpret,
            res=saved,
            do=grad,
        )
        total = tuple(a + b.astype(jnp.float32) for a, b in zip(total, found[3:6], strict=True))
    return total
