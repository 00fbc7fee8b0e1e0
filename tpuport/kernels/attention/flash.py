"""Attention with dropout whose random numbers are drawn in the kernel, for any band and padding.

The numbers are those that `jax.random.bernoulli` draws for the whole array of weights, because the
bits of an element depend on its number in that array alone (`random_bits`). So the result is that
of the matrix of scores, and the matrix is not made.

Scores are kept transposed, keys by queries: what belongs to a query is then one number a lane.
Drawing takes several times as long as all the rest, so the forward kernel keeps one bit a weight,
32 in a word, and the backward kernel does not draw again, unless that would be too many. It makes
all three gradients of a tile at once. The gradient of some thousand queries stays in fast memory
while the kernel passes over the keys.

The softmax is online, after Milakov and Gimelshein (arxiv.org/abs/1805.02867); the backward pass
computes weights from the logsumexp, after Dao et al. (arxiv.org/abs/2205.14135).
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuport.kernels.attention import random_bits
from tpuport.kernels.attention.full import LOWEST, cap
from tpuport.kernels.attention.problem import AttentionProblem, Gradients, Local
from tpuport.kernels.attention.splash import make_ids
from tpuport.kernels.attention.tiles import KernelTiles

FORWARD, BACKWARD = "flash_dropout_forward", "flash_dropout_backward"
# Rows of queries and of keys that are handled at a time, at most.
TILES = KernelTiles(q=640, kv=640, kv_compute=640, q_back=640, kv_back=640)
# By libtpu's schedules a block costs as much as one with so many rows more whose work is in its
# rows alone: blocks of 128, 256 and 512 rows were compared on v5e and v6e.
_FIXED_ROWS = 52
# How much more than that a score may cost by empty and small blocks. XLA's program for the matrix
# takes two to three times as long as the kernel with full blocks (docs/attention_dropout.md).
_MOST_COST = 1.8
# Weights whose bits share a word, at most.
_WORD = 32
_LANES = 128
# Keys of a block, at most: a multiple of 64 of them then has whole tiles of words.
_MOST_KEYS = 2048
# Rows of the smallest tile of words.
_SUBLANES = 8
# Bytes of a chip's bits of one attention up to which they are kept for the backward pass.
_MOST_KEPT = 256 << 20
# Bytes of fast memory for the gradient of queries.
_MOST_QUERIES = 2 << 20


@dataclass(frozen=True)
class FlashTiles:
    """How both kernels split the work of one chip.

    Args:
        q: queries a step.
        kv: keys a step.
        num_q: steps over the queries.
        num_kv: steps over the keys.
        chunk: steps over the queries whose gradient is in fast memory at a time; divides `num_q`.
    """

    q: int
    kv: int
    num_q: int
    num_kv: int
    chunk: int


@dataclass(frozen=True)
class _Kernel:
    """What the kernels know when they are compiled."""

    problem: AttentionProblem
    tiles: FlashTiles
    has_ids: bool
    draws: bool

    @property
    def factor(self) -> float:
        """Return the factor of the weights that are kept."""
        return 1 / (1 - self.problem.dropout)


def choose_tiles(problem: AttentionProblem, num_q: int, num_k: int, head_dim: int) -> FlashTiles:
    """Return the tiles for so many queries and keys of one chip."""
    q, kv = _block(problem.tiles.q, num_q, _LANES), _key_block(problem.tiles.kv, num_k)
    steps = -(-num_q // q)
    most = max(_MOST_QUERIES // (4 * head_dim * q), 1)
    chunk = -(-steps // -(-steps // most))
    return FlashTiles(q, kv, -(-steps // chunk) * chunk, -(-num_k // kv), chunk)


def _block(most: int, length: int, unit: int) -> int:
    """Return the rows of a block, a multiple of `unit`, with which so many rows cost least."""
    sizes = range(unit, max(most, unit) + 1, unit)
    return min(sizes, key=lambda size: (_cost_of(size, length), size))


def _cost_of(size: int, length: int) -> float:
    """Return what rows in blocks of a size cost, in rows of large full blocks."""
    return -(-length // size) * (size + _FIXED_ROWS)


def _key_block(most: int, length: int) -> int:
    """Return a number of keys that whole tiles of words have."""
    if min(most, length) <= _SUBLANES * _WORD:
        return _block(min(most, _SUBLANES * _WORD), length, 2 * _SUBLANES)
    return _block(min(most, _MOST_KEYS), length, 8 * _SUBLANES)


def _word_rows(keys: int) -> int:
    """Return how many words a query has for a block of keys: tiles of them, a power of two."""
    rows = _SUBLANES
    while rows * _WORD < keys:
        rows *= 2
    return rows


def is_faster(num_q: int, num_k: int) -> bool:
    """Return whether the kernel is expected to take less time than the matrix of scores."""
    q, kv = _block(TILES.q, num_q, _LANES), _key_block(TILES.kv, num_k)
    return _cost_of(q, num_q) * _cost_of(kv, num_k) <= _MOST_COST * num_q * num_k


def keeps_bits(weights: int) -> bool:
    """Return whether the bits of so many weights of one chip are kept for the backward pass."""
    return weights // 8 <= _MOST_KEPT


def forward(
    local: Local, q: jax.Array, k: jax.Array, v: jax.Array, *, saving: bool = False
) -> tuple[jax.Array, ...]:
    """Compute what `blockwise.forward` does; if `saving`, return what `backward` needs, too.

    That is the bits of the weights that are kept, (B, Hq, words, queries).
    """
    num_q = q.shape[2]
    tiles = choose_tiles(local.problem, num_q, k.shape[2], q.shape[3])
    kernel, arrays, specs = _inputs(local, tiles, (q, k, v))
    batch, heads, dim = *q.shape[:2], v.shape[3]
    padded_q = tiles.num_q * tiles.q
    out_shape = [
        jax.ShapeDtypeStruct((batch, heads, padded_q, dim), q.dtype),
        jax.ShapeDtypeStruct((batch, heads, 1, padded_q), jnp.float32),
    ]
    out_specs = [
        pl.BlockSpec((None, None, tiles.q, dim), lambda b, h, i, j: (b, h, i, 0)),
        pl.BlockSpec((None, None, 1, tiles.q), lambda b, h, i, j: (b, h, 0, i)),
    ]
    if saving:
        out_shape.append(jax.ShapeDtypeStruct(_bits_shape(q, tiles), jnp.uint32))
        words = (None, None, _word_rows(tiles.kv), tiles.q)
        out_specs.append(pl.BlockSpec(words, lambda b, h, i, j: (b, h, j, i)))
    out, lse, *bits = pl.pallas_call(
        functools.partial(_forward_kernel, kernel=kernel, num_in=len(arrays), saving=saving),
        grid=(batch, heads, tiles.num_q, tiles.num_kv),
        in_specs=specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            pltpu.VMEM((1, tiles.q), jnp.float32),
            pltpu.VMEM((1, tiles.q), jnp.float32),
            pltpu.VMEM((dim, tiles.q), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=_cost(local.problem, q, k, q.shape[3] + dim),
        interpret=local.problem.interpret,
        name=FORWARD,
    )(*arrays)
    return out[:, :, :num_q], lse[:, :, 0, :num_q], *bits


def backward(
    local: Local,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
    *bits: jax.Array,
) -> Gradients:
    """Compute what `blockwise.backward` does, from what `forward` saved, if anything."""
    problem, num_q, num_k = local.problem, q.shape[2], k.shape[2]
    tiles = choose_tiles(problem, num_q, num_k, q.shape[3])
    kernel, arrays, specs = _inputs(local, tiles, (q, k, v), chunked=True)
    kernel = dataclasses.replace(kernel, draws=not bits)
    _add_saved(tiles, (arrays, specs), (out, lse, grad), bits)
    batch, heads, head_dim, dim = *q.shape[:2], q.shape[3], v.shape[3]
    chunks, all_k = tiles.num_q // tiles.chunk, tiles.num_kv * tiles.kv
    # What is summed afterwards is not rounded before.
    is_whole = chunks == 1 and k.shape[1] == heads
    d_q, d_k, d_v = pl.pallas_call(
        functools.partial(_backward_kernel, kernel=kernel, num_in=len(arrays)),
        grid=(batch, heads, chunks, tiles.num_kv, tiles.chunk),
        in_specs=specs,
        out_specs=[
            pl.BlockSpec(
                (None, None, tiles.chunk, tiles.q, head_dim), lambda b, h, c, j, i: (b, h, c, 0, 0)
            ),
            pl.BlockSpec(
                (None, None, None, tiles.kv, head_dim), lambda b, h, c, j, i: (b, h, c, j, 0)
            ),
            pl.BlockSpec((None, None, None, tiles.kv, dim), lambda b, h, c, j, i: (b, h, c, j, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, tiles.num_q, tiles.q, head_dim), q.dtype),
            *(
                jax.ShapeDtypeStruct(
                    (batch, heads, chunks, all_k, x.shape[3]), x.dtype if is_whole else jnp.float32
                )
                for x in (k, v)
            ),
        ],
        scratch_shapes=[
            pltpu.VMEM((tiles.chunk, head_dim, tiles.q), jnp.float32),
            pltpu.VMEM((tiles.kv, head_dim), jnp.float32),
            pltpu.VMEM((tiles.kv, dim), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=_cost(problem, q, k, 3 * q.shape[3] + 2 * dim),
        interpret=problem.interpret,
        name=BACKWARD,
    )(*arrays)
    d_q = d_q.reshape(batch, heads, -1, head_dim)[:, :, :num_q]
    d_k, d_v = (x.reshape(batch, k.shape[1], -1, *x.shape[3:]).sum(2) for x in (d_k, d_v))
    return Gradients(d_q, d_k[:, :, :num_k].astype(k.dtype), d_v[:, :, :num_k].astype(v.dtype))


def _add_saved(
    tiles: FlashTiles,
    inputs: tuple[list[jax.Array], list[pl.BlockSpec]],
    saved: tuple[jax.Array, jax.Array, jax.Array],
    bits: tuple[jax.Array, ...],
) -> None:
    """Append to the inputs of `_inputs`, and their specs, what else the backward kernel takes.

    That is the output's gradient, two numbers a query, and the bits, if they are saved.
    """
    arrays, specs = inputs
    out, lse, grad = saved
    all_q, dtype = tiles.num_q * tiles.q, arrays[1].dtype
    inner = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), -1)
    # A row that saw nothing has no gradient, and its logsumexp must not make NaN of zero.
    lse = jnp.where(jnp.isneginf(lse), 0, lse)
    arrays.append(_pad(grad.astype(dtype), 2, all_q))
    arrays += [_pad(x[:, :, None], 3, all_q) for x in (lse, inner)]

    def at_query(b: Any, h: Any, c: Any, j: Any, i: Any) -> tuple[Any, ...]:
        return b, h, 0, c * tiles.chunk + i

    row = pl.BlockSpec((None, None, 1, tiles.q), at_query)
    specs += [_query_spec(tiles, grad.shape[3], chunked=True), row, row]
    for words in bits:
        shape = (None, None, _word_rows(tiles.kv), tiles.q)
        specs.append(pl.BlockSpec(shape, lambda b, h, c, j, i: (b, h, j, c * tiles.chunk + i)))
        arrays.append(words)


def _bits_shape(q: jax.Array, tiles: FlashTiles) -> tuple[int, ...]:
    return (*q.shape[:2], tiles.num_kv * _word_rows(tiles.kv), tiles.num_q * tiles.q)


def _pad(x: jax.Array, axis: int, length: int) -> jax.Array:
    more = length - x.shape[axis]
    return jnp.pad(x, [(0, more if a == axis else 0) for a in range(x.ndim)]) if more else x


def _query_spec(tiles: FlashTiles, dim: int, *, chunked: bool) -> pl.BlockSpec:
    shape = (None, None, tiles.q, dim)
    if chunked:
        return pl.BlockSpec(shape, lambda b, h, c, j, i: (b, h, c * tiles.chunk + i, 0))
    return pl.BlockSpec(shape, lambda b, h, i, j: (b, h, i, 0))


def _inputs(
    local: Local,
    tiles: FlashTiles,
    operands: tuple[jax.Array, jax.Array, jax.Array],
    chunked: bool = False,
) -> tuple[_Kernel, list[jax.Array], list[pl.BlockSpec]]:
    """Return what both kernels take: the numbers of the call, q, k and v, and ids if need be.

    Args:
        local: the work of this chip.
        tiles: its tiles.
        operands: queries, keys and values.
        chunked: whether the grid is that of the backward kernel.
    """
    problem, parts, origin = local.problem, local.parts, local.origin
    q, k, v = operands
    share = q.shape[1] // k.shape[1]

    def key_at(*grid: Any) -> tuple[Any, Any, Any]:
        return grid[0], lax.div(grid[1], share), grid[3]

    numbers = [
        jnp.asarray(x).astype(jnp.uint32) for x in (origin.batch, origin.head, origin.q, origin.k)
    ]
    # Of two dims, because `vmap` adds one, and of a block the last two have to be whole.
    numbers = jnp.stack([*random_bits.words_of(parts.key), *numbers])[None]
    all_q, all_k = tiles.num_q * tiles.q, tiles.num_kv * tiles.kv
    arrays = [numbers, _pad(q, 2, all_q), _pad(k, 2, all_k), _pad(v, 2, all_k)]
    specs = [
        pl.BlockSpec(memory_space=pltpu.SMEM),
        _query_spec(tiles, q.shape[3], chunked=chunked),
        *(
            pl.BlockSpec((None, None, tiles.kv, x.shape[3]), lambda *grid: (*key_at(*grid), 0))
            for x in (k, v)
        ),
    ]
    has_ids = parts.key_valid is not None or parts.q_segments is not None
    if has_ids:
        ids = make_ids(parts, q, k, min(problem.num_keys, k.shape[2]), (tiles.q, tiles.kv))
        q_ids = jnp.pad(ids.q, [(0, 0), (0, all_q - ids.q.shape[1])])
        arrays += [q_ids[:, None], ids.kv[:, :, None]]
        q_row = pl.BlockSpec((None, 1, tiles.q), lambda b, h, i, j: (b, 0, i))
        if chunked:
            q_row = pl.BlockSpec(
                (None, 1, tiles.q), lambda b, h, c, j, i: (b, 0, c * tiles.chunk + i)
            )
        specs += [q_row, pl.BlockSpec((None, tiles.kv, 1), lambda *grid: (grid[0], grid[3], 0))]
    return _Kernel(problem, tiles, has_ids, draws=True), arrays, specs


def _cost(problem: AttentionProblem, q: jax.Array, k: jax.Array, dims: int) -> pl.CostEstimate:
    """Return the work of products over `dims` numbers a score; a band halves a causal square."""
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if problem.low is not None or problem.high is not None:
        places = np.arange(problem.num_queries)
        low = places + (-problem.num_queries if problem.low is None else problem.low)
        high = places + (problem.num_keys if problem.high is None else problem.high)
        seen = np.minimum(high, problem.num_keys - 1) - np.maximum(low, 0) + 1
        scores *= float(np.maximum(seen, 0).mean()) / problem.num_keys
    moved = (2 * q.size + 2 * k.size) * q.dtype.itemsize + int(scores) // 8
    return pl.CostEstimate(
        flops=int(2 * scores * dims), transcendentals=int(scores), bytes_accessed=moved
    )


class _Tile:
    """One tile of scores, keys by queries, inside a kernel.

    Args:
        kernel: what is known of the kernel.
        inputs: references of its inputs, in the order of `_inputs`.
        q_block: number of the block of queries.
        kv_block: number of the block of keys.
    """

    def __init__(self, kernel: _Kernel, inputs: Any, q_block: Any, kv_block: Any) -> None:
        self.kernel, self.inputs = kernel, inputs
        self.tiles, self.problem = kernel.tiles, kernel.problem
        self.q_start, self.k_start = q_block * self.tiles.q, kv_block * self.tiles.kv
        # Read here, because the interpreter knows them outside of branches only.
        self.batch, self.head = (pl.program_id(axis).astype(jnp.uint32) for axis in (0, 1))
        numbers: Any = inputs[0]
        self.origin = [numbers[0, place].astype(jnp.int32) for place in (4, 5)]

    def is_seen(self) -> Any:
        """Return whether a score of the tile may count; True if that is known beforehand."""
        low, high = self.problem.low, self.problem.high
        first = self.k_start + self.origin[1] - self.q_start - self.origin[0]
        seen: Any = True
        if low is not None:
            seen = first + (self.tiles.kv - 1) >= low
        if high is not None:
            below = first - (self.tiles.q - 1) <= high
            seen = below if seen is True else seen & below
        return seen

    def scores(self) -> tuple[Any, Any]:
        """Return the scores, and where they count; None where all do."""
        _, q, k, *_ = self.inputs
        scores = lax.dot_general(
            k[...], q[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        return cap(scores * self.problem.scale, self.problem.softcap), self._seen()

    def _seen(self) -> Any:
        problem, tiles = self.problem, self.tiles
        parts, shape = [], (tiles.kv, tiles.q)
        column = lax.broadcasted_iota(jnp.int32, shape, 0) + (self.k_start + self.origin[1])
        if problem.low is not None or problem.high is not None:
            row = lax.broadcasted_iota(jnp.int32, shape, 1) + (self.q_start + self.origin[0])
            if problem.low is not None:
                parts.append(column - row >= problem.low)
            if problem.high is not None:
                parts.append(column - row <= problem.high)
        if self.kernel.has_ids:
            q_ids, kv_ids = self.inputs[4:6]
            parts.append(
                jnp.broadcast_to(kv_ids[...], shape) == jnp.broadcast_to(q_ids[...], shape)
            )
        elif problem.num_keys < tiles.num_kv * tiles.kv:
            parts.append(column < problem.num_keys)
        return functools.reduce(jnp.logical_and, parts) if parts else None

    def drawn(self) -> Any:
        """Return which weights of the tile are kept."""
        numbers, (heads, queries, keys) = self.inputs[0], self.problem.drawn_of
        head = (self.batch + numbers[0, 2]) * np.uint32(heads) + self.head + numbers[0, 3]
        row = head * np.uint32(queries) + self.q_start.astype(jnp.uint32) + numbers[0, 4]
        first = random_bits.number_of(row, keys, self.k_start.astype(jnp.uint32) + numbers[0, 5])
        shape = (self.tiles.kv, self.tiles.q)
        # The element's number less that of the tile's first: it fits a word.
        after = lax.broadcasted_iota(jnp.uint32, shape, 1) * np.uint32(keys)
        after = after + lax.broadcasted_iota(jnp.uint32, shape, 0)
        bits = random_bits.bits_of((numbers[0, 0], numbers[0, 1]), *random_bits.add(first, after))
        return random_bits.are_kept(bits, self.problem.dropout)


def _packed(kept: Any) -> Any:
    """Return booleans (keys, queries) as words; a word has rows that are far apart."""
    rows = _word_rows(kept.shape[0])
    words = [
        jnp.where(kept[bit * rows : (bit + 1) * rows], np.uint32(1 << bit), 0)
        for bit in range(kept.shape[0] // rows)
    ]
    return functools.reduce(jnp.bitwise_or, words)


def _unpacked(words: Any, keys: int) -> Any:
    """Return the booleans (keys, queries) that `_packed` had."""
    slabs = [words & np.uint32(1 << bit) for bit in range(keys // words.shape[0])]
    return jnp.concatenate(slabs, 0) != 0


def _run_if(seen: Any, run: Any) -> None:
    if seen is True:
        run()
    else:
        pl.when(seen)(run)


def _forward_kernel(*refs: Any, kernel: _Kernel, num_in: int, saving: bool) -> None:
    """Process one block of keys for one block of queries."""
    inputs, (out_ref, lse_ref, *bits_ref) = refs[:num_in], refs[num_in : num_in + 2 + saving]
    max_ref, total_ref, sum_ref = refs[num_in + 2 + saving :]
    step = pl.program_id(3)
    tile = _Tile(kernel, inputs, pl.program_id(2), step)

    @pl.when(step == 0)
    def _start() -> None:
        max_ref[...] = jnp.full_like(max_ref, LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add_block() -> None:
        scores, seen = tile.scores()
        if seen is not None:
            scores = jnp.where(seen, scores, LOWEST)
        highest = jnp.maximum(max_ref[...], jnp.max(scores, axis=0, keepdims=True))
        # If no key was seen so far, nothing is subtracted: the weights are zero then.
        base = jnp.where(highest > LOWEST / 2, highest, 0)
        shrink = jnp.exp(max_ref[...] - base)
        weights = jnp.exp(scores - base)
        kept = tile.drawn()
        if saving:
            bits_ref[0][...] = _packed(kept)
        dropped = jnp.where(kept, weights, 0)
        values = inputs[3][...]
        added = lax.dot_general(
            values,
            dropped.astype(values.dtype),
            (((0,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        max_ref[...] = highest
        total_ref[...] = total_ref[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        sum_ref[...] = sum_ref[...] * shrink + added

    _run_if(tile.is_seen(), add_block)

    @pl.when(step == pl.num_programs(3) - 1)
    def _end() -> None:
        total = total_ref[...]
        empty = total == 0
        out = sum_ref[...] * (kernel.factor / jnp.where(empty, 1, total))
        out_ref[...] = out.T.astype(out_ref.dtype)
        lse = max_ref[...] + jnp.log(jnp.where(empty, 1, total))
        lse_ref[...] = jnp.where(empty, -jnp.inf, lse)


def _backward_kernel(*refs: Any, kernel: _Kernel, num_in: int) -> None:
    """Add one tile's share of the gradients."""
    inputs, outputs, (dq_ref, dk_ref, dv_ref) = refs[:num_in], refs[num_in:-3], refs[-3:]
    chunk, key_step, query_step = (pl.program_id(axis) for axis in (2, 3, 4))
    tile = _Tile(kernel, inputs, chunk * kernel.tiles.chunk + query_step, key_step)
    after = inputs[6 if kernel.has_ids else 4 :]

    @pl.when(key_step == 0)
    def _start_queries() -> None:
        dq_ref[query_step] = jnp.zeros(dq_ref.shape[1:], jnp.float32)

    @pl.when(query_step == 0)
    def _start_keys() -> None:
        dk_ref[...] = jnp.zeros_like(dk_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

    def add_tile() -> None:
        q, k, v = (ref[...] for ref in inputs[1:4])
        grad, lse, inner = (ref[...] for ref in after[:3])
        scores, seen = tile.scores()
        weights = jnp.exp(scores - lse)
        if seen is not None:
            weights = jnp.where(seen, weights, 0)
        kept = tile.drawn() if kernel.draws else _unpacked(after[3][...], kernel.tiles.kv)
        dropped = jnp.where(kept, weights, 0).astype(grad.dtype)
        dv_ref[...] += jnp.dot(dropped, grad, preferred_element_type=jnp.float32)
        d_weights = lax.dot_general(
            v, grad, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        d_weights = jnp.where(kept, d_weights * kernel.factor, 0)
        d_scores = weights * (d_weights - inner)
        if kernel.problem.softcap is not None:
            d_scores = d_scores * (1 - (scores / kernel.problem.softcap) ** 2)
        d_scores = d_scores.astype(q.dtype)
        dk_ref[...] += jnp.dot(d_scores, q, preferred_element_type=jnp.float32)
        dq_ref[query_step] += lax.dot_general(
            k, d_scores, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )

    _run_if(tile.is_seen(), add_tile)
    scale = kernel.problem.scale

    @pl.when(key_step == pl.num_programs(3) - 1)
    def _end_queries() -> None:
        outputs[0][query_step] = (dq_ref[query_step].T * scale).astype(outputs[0].dtype)

    @pl.when(query_step == pl.num_programs(4) - 1)
    def _end_keys() -> None:
        outputs[1][...] = (dk_ref[...] * scale).astype(outputs[1].dtype)
        outputs[2][...] = (dv_ref[...] * kernel.factor).astype(outputs[2].dtype)
