"""Attention where every query sees the same keys: a kernel of our own, faster than splash on v6e.

Scores are kept transposed, keys by queries. What a row of scores needs is then one number a lane,
and the second product, values by weights, has the weights held in the matrix unit: its 256 by 256
are full whatever the size of a head, where in the usual order a head of 128 fills half.

The first product leaves half of the unit empty. There the scaled queries stand a second time, as
what rounding took from them, which makes results more exact than splash's. Four rows of it are for
other things, which then cost nothing: a key that nobody sees has its score lowered to nothing, and
every score has the base of its query subtracted. Scales have log2(e) in them: exponentials are
powers of two.

The base takes the place of the running maximum, so that no score waits for others to become a
weight, and none is stored. It is the highest score of a few keys, which the program computes
before. Weights may be larger than one then. Bases that are too low by more than a float32 holds are
seen in the sums of a block, which is then computed again, tile by tile, with higher bases
(`_compute_again`).
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuport.kernels.attention import splash
from tpuport.kernels.attention.problem import AttentionProblem, Local
from tpuport.kernels.attention.tiles import DenseTiles

backward = splash.backward

NAME = "dense_attention_forward"
# Added to the score of a key that nobody sees: its weight is zero.
_HIDDEN = -1e30
# Numbers of rounded queries that are left out of the first product, for the rows in `_put_base`.
_ROWS = 4
# Keys whose scores give a query its base.
_SAMPLE = 32
# Sums of a block above this make it again. Weights are below it, so that values up to 2**63 times
# a weight are still numbers.
MOST = 2.0**64


@dataclass(frozen=True)
class Tuned:
    """The tile sizes that are fastest on one chip for one size of heads.

    Args:
        q: queries a step.
        kv_tile: keys of one product.
        kv: fewest and most keys a step.
        share_of_peak: share of the chip's peak by libtpu's schedule, for full blocks.
    """

    q: int
    kv_tile: int
    kv: tuple[int, int]
    share_of_peak: float


# By chip, size of a head and dtype; only where it is faster than the best splash kernel.
TUNED = {("v6e", 128, "bfloat16"): Tuned(2048, 512, (2048, 6144), 0.628)}
# Keys a step are a multiple of this: the last product of a step may have half a tile.
_UNIT = 256
# Cost of filling and emptying the pipeline once a step, in keys.
_STEP_KEYS = 256
# With fewer queries or keys than this many blocks of queries, too much of a block is padding.
_LEAST_BLOCKS = 2
# More than the default: blocks of keys and values, each twice, and the weights of two tiles.
_VMEM_BYTES = 32 << 20


class Keys(NamedTuple):
    """Keys and values in the kernel's layout, and the blocks of them to visit.

    Args:
        k: (B, H, Sk, D).
        v: (B, H, Dv, Sk), transposed.
        hidden: (B, 1, keys in full blocks): 0, or `_HIDDEN` where a key is not seen or is none.
        visits: (B,), the number of blocks to visit.
        blocks: (B, number of blocks), block indices with those to visit first.
        sample: (B, H, `_SAMPLE`, D), some of the keys that are seen; zeros if none is.
    """

    k: jax.Array
    v: jax.Array
    hidden: jax.Array
    visits: jax.Array
    blocks: jax.Array
    sample: jax.Array


def choose(
    *, chip: str, head_dims: tuple[int, int], dtype: str, num_queries: int, num_keys: int
) -> DenseTiles | None:
    """Return tile sizes where this kernel is known to be faster than splash, else None.

    Args:
        chip: short name, such as "v6e".
        head_dims: size of one head, of queries and of values.
        dtype: dtype of the operands, such as "bfloat16".
        num_queries: queries that one chip handles.
        num_keys: keys that one chip handles at a time.
    """
    tuned = TUNED.get((chip, head_dims[0], dtype))
    if tuned is None or head_dims[0] != head_dims[1]:
        return None
    if min(num_queries, num_keys) < _LEAST_BLOCKS * tuned.q:
        return None
    sizes = range(tuned.kv[1], tuned.kv[0] - 1, -_UNIT)
    kv = min(sizes, key=lambda size: -(-num_keys // size) * (size + _STEP_KEYS))
    return DenseTiles(tuned.q, kv, tuned.kv_tile)


def forward(local: Local, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute what `splash.forward` does, for a problem without a band, segments or a soft cap.

    Heads have more than `_ROWS` numbers.
    """
    out, lse = _call(local.problem, tiles_of(local), q, prepare_keys(local, k, v))
    return out, lse[:, :, 0]


def tiles_of(local: Local) -> DenseTiles:
    """Return a problem's tile sizes for this kernel."""
    assert local.problem.dense is not None, "a problem without tiles for this kernel"
    return local.problem.dense


def prepare_keys(local: Local, k: jax.Array, v: jax.Array) -> Keys:
    """Return keys (B, H, Sk, D) and values (B, H, Sk, Dv) as the kernel takes them.

    They are not padded here, nor are unseen ones replaced: each would copy them, and in the kernel
    it costs nothing.
    """
    size, batch, num_keys = tiles_of(local).kv, k.shape[0], splash.local_keys(local, k.shape[2])
    valid: Any = local.parts.key_valid
    is_known = valid is None and not isinstance(num_keys, jax.Array)
    # Blocks in which nobody sees a key are not even steps if that is known.
    num_blocks = max(-(-(num_keys if is_known else k.shape[2]) // size), 1)
    place = jnp.arange(num_blocks * size)
    seen = place < jnp.minimum(num_keys, k.shape[2])
    if valid is not None:
        seen = seen & jnp.pad(valid, [(0, 0), (0, seen.size - valid.shape[1])])
    seen = jnp.broadcast_to(seen, (batch, seen.shape[-1]))
    hidden = jnp.where(seen, 0, _HIDDEN).astype(jnp.float32)[:, None]
    some = seen.reshape(batch, -1, size).any(2)
    blocks = jnp.argsort(~some, axis=1, stable=True).astype(jnp.int32)
    values = v.swapaxes(2, 3).astype(k.dtype)
    sample = _sample(k, seen, None if valid is not None else num_keys)
    return Keys(k, values, hidden, some.sum(1, dtype=jnp.int32), blocks, sample)


def _sample(k: jax.Array, seen: jax.Array, num_keys: Any) -> jax.Array:
    """Return `_SAMPLE` keys that are seen, evenly among them, from (B, H, Sk, D).

    Args:
        k: keys.
        seen: (B, keys in full blocks).
        num_keys: how many are seen, if those are the first ones; else None.
    """
    steps = jnp.arange(_SAMPLE)
    if num_keys is not None:
        found = jnp.take(k, steps * num_keys // _SAMPLE, axis=2)
        return jnp.where(num_keys > 0, found, 0)
    counts = jnp.cumsum(seen, axis=1)
    total = counts[:, -1:]
    places = jax.vmap(jnp.searchsorted)(counts, steps * total // _SAMPLE + 1)
    found = jnp.take_along_axis(k, places[:, None, :, None], axis=2, mode="clip")
    return jnp.where(total[:, :, None, None] > 0, found, 0)


def _first_bases(q: jax.Array, sample: jax.Array, factor: float) -> jax.Array:
    """Return the highest score (B, Hq, 1, Sq) of each query and the keys of the sample."""
    batch, heads, num_q, head_dim = q.shape
    grouped = q.reshape(batch, sample.shape[1], -1, num_q, head_dim)
    # Keys by queries: a TPU would pad the few keys to 128 if they came last.
    scores = jnp.einsum("bhkd,bhgqd->bhgkq", sample, grouped, preferred_element_type=jnp.float32)
    return (scores * factor).max(3).reshape(batch, heads, 1, num_q)


def _grid(tiles: DenseTiles, q: jax.Array, keys: Keys) -> Any:
    """Build the kernel's grid, and the block specs of what each step reads and writes."""
    batch, heads, num_q, head_dim = q.shape
    share, value_dim = heads // keys.k.shape[1], keys.v.shape[2]
    num_blocks = keys.blocks.shape[1]

    def place(b: Any, j: Any, count: Any, blocks: Any) -> Any:
        # Past the last block the index repeats, so that nothing more is fetched.
        return blocks[b * num_blocks + jnp.minimum(j, jnp.maximum(count[b] - 1, 0))]

    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(batch, heads, -(-num_q // tiles.q), num_blocks),
        in_specs=[
            pl.BlockSpec((None, None, tiles.q, head_dim), lambda b, h, i, j, *_: (b, h, i, 0)),
            pl.BlockSpec((None, None, 1, tiles.q), lambda b, h, i, j, *_: (b, h, 0, i)),
            pl.BlockSpec(
                (None, None, tiles.kv, head_dim),
                lambda b, h, i, j, *order: (b, lax.div(h, share), place(b, j, *order), 0),
            ),
            pl.BlockSpec(
                (None, 1, tiles.kv), lambda b, h, i, j, *order: (b, 0, place(b, j, *order))
            ),
            pl.BlockSpec(
                (None, None, value_dim, tiles.kv),
                lambda b, h, i, j, *order: (b, lax.div(h, share), 0, place(b, j, *order)),
            ),
        ],
        out_specs=[
            pl.BlockSpec((None, None, tiles.q, value_dim), lambda b, h, i, j, *_: (b, h, i, 0)),
            pl.BlockSpec((None, None, 1, tiles.q), lambda b, h, i, j, *_: (b, h, 0, i)),
        ],
        scratch_shapes=[
            pltpu.VMEM((2 * head_dim, tiles.q), q.dtype),
            pltpu.VMEM((value_dim, tiles.q), jnp.float32),
            pltpu.VMEM((value_dim, tiles.q), jnp.float32),
            pltpu.VMEM((8, tiles.q), jnp.float32),
        ],
    )


def _call(
    problem: AttentionProblem, tiles: DenseTiles, q: jax.Array, keys: Keys
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel: output (B, Hq, Sq, Dv) and logsumexp (B, Hq, 1, Sq)."""
    batch, heads, num_q, head_dim = q.shape
    value_dim, num_blocks = keys.v.shape[2], -(-num_q // tiles.q)
    scores = batch * heads * num_blocks * tiles.q * keys.hidden.shape[2]
    factor = problem.scale * math.log2(math.e)
    bases = _first_bases(q, keys.sample, factor)
    return pl.pallas_call(
        functools.partial(_kernel, num_q=num_q, tile=tiles.kv_tile, factor=factor),
        grid_spec=_grid(tiles, q, keys),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, num_q, value_dim), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, num_q), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM_BYTES,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * (head_dim + value_dim),
            transcendentals=scores,
            bytes_accessed=q.nbytes + (keys.k.nbytes + keys.v.nbytes) * num_blocks,
        ),
        interpret=problem.interpret,
        name=NAME,
    )(keys.visits, keys.blocks.reshape(-1), q, bases, keys.k, keys.hidden, keys.v)


def _kernel(
    count_ref: Any,
    blocks_ref: Any,
    q_ref: Any,
    first_base_ref: Any,
    k_ref: Any,
    hidden_ref: Any,
    v_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    query_ref: Any,
    sum_ref: Any,
    found_ref: Any,
    total_ref: Any,
    *,
    num_q: int,
    tile: int,
    factor: float,
) -> None:
    """Process one block of keys for one block of queries.

    Args:
        count_ref: blocks of keys to visit, for each example.
        blocks_ref: their indices, which the block specs have read.
        q_ref: (queries, D).
        first_base_ref: (1, queries).
        k_ref: (keys, D).
        hidden_ref: (1, keys), as in `Keys`.
        v_ref: (Dv, keys). Past the end these and the other blocks hold any numbers.
        out_ref: (queries, Dv).
        lse_ref: (1, queries).
        query_ref: (2 D, queries), as `_put_base` leaves it.
        sum_ref: (Dv, queries), the sums of values by weights.
        found_ref: the same for one block.
        total_ref: (8, queries), whose rows add up to the sums of weights.
        num_q: how many queries there are.
        tile: keys of one product.
        factor: factor of the scores.
    """
    del blocks_ref
    keys = _KeysInVmem(k_ref, v_ref, hidden_ref)
    step, count = pl.program_id(3), count_ref[pl.program_id(0)]
    left = num_q - pl.program_id(2) * query_ref.shape[1]

    @pl.when(step == 0)
    def _start() -> None:
        _put_queries(query_ref, q_ref[...].astype(jnp.float32).T * factor, first_base_ref, left)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when(step < count)
    def _add_block() -> None:
        total = _sum_block(query_ref, keys, found_ref, tile)
        holds = jnp.sum(total) < MOST

        @pl.when(holds)
        def _keep() -> None:
            sum_ref[...] += found_ref[...]
            total_ref[...] += total

        # The name is for `tpuport.cost`, which then counts on this branch not being taken.
        with jax.named_scope("seldom"):

            @pl.when(jnp.logical_not(holds))
            def _again() -> None:
                _compute_again(query_ref, keys, sum_ref, total_ref, tile)

    @pl.when(step == pl.num_programs(3) - 1)
    def _end() -> None:
        weight = jnp.sum(total_ref[...], 0, keepdims=True)
        empty = weight == 0
        weight = jnp.where(empty, 1, weight)
        out_ref[...] = (sum_ref[...] / weight).T.astype(out_ref.dtype)
        lse = (_base(query_ref) + jnp.log2(weight)) * math.log(2)
        lse_ref[...] = jnp.where(empty, -jnp.inf, lse)


def _put_queries(query_ref: Any, exact: Any, first_base_ref: Any, left: Any) -> None:
    """Write scaled queries (D, queries) and their bases, of which the first `left` exist."""
    exists = lax.broadcasted_iota(jnp.int32, (1, exact.shape[1]), 1) < left
    exact = jnp.where(exists, exact, 0)
    rounded = exact.astype(query_ref.dtype)
    query_ref[: exact.shape[0]] = rounded
    base = jnp.where(exists, first_base_ref[...], 0)
    _put_base(query_ref, exact - rounded.astype(jnp.float32), base)


def _put_base(query_ref: Any, rest: Any, base: Any) -> None:
    """Write the second half of the queries: what rounding left, a one, and minus their base.

    Args:
        query_ref: (2 D, queries).
        rest: (D, queries) in float32; its last `_ROWS` rows are not kept.
        base: (1, queries) in float32, written as three numbers of the queries' dtype.
    """
    head_dim = rest.shape[0]
    row = lax.broadcasted_iota(jnp.int32, rest.shape, 0) - (head_dim - _ROWS)
    rest = jnp.where(row == 0, 1.0, rest)
    for place in range(1, _ROWS):
        part = base.astype(query_ref.dtype).astype(jnp.float32)
        rest = jnp.where(row == place, -part, rest)
        base = base - part
    query_ref[head_dim:] = rest.astype(query_ref.dtype)


def _base(query_ref: Any) -> Any:
    """Return the base (1, queries) that the first product subtracts, as it is written there."""
    parts = query_ref[-(_ROWS - 1) :].astype(jnp.float32)
    return -jnp.sum(parts, 0, keepdims=True)


class _KeysInVmem(NamedTuple):
    """One block of keys and values in VMEM.

    Args:
        k_ref: (keys, D).
        v_ref: (Dv, keys).
        hidden_ref: (1, keys), as in `Keys`.
    """

    k_ref: Any
    v_ref: Any
    hidden_ref: Any

    def rows(self, place: Any) -> Any:
        """Return some keys as the first product takes them, (keys, 2 D), zero if they are hidden.

        Each key comes twice. In place of the last `_ROWS` numbers of the second one are a number
        that hides the key, or zero, and ones for the parts of the base.
        """
        k = self.k_ref[place, :]
        hidden = jnp.broadcast_to(self.hidden_ref[:, place], k.shape[::-1]).T.astype(k.dtype)
        k = jnp.where(hidden == 0, k, jnp.zeros_like(k))
        lane = lax.broadcasted_iota(jnp.int32, k.shape, 1).astype(jnp.float32).astype(k.dtype)
        special = jnp.where(lane == k.shape[1] - _ROWS, hidden, jnp.ones_like(k))
        again = jnp.where(lane < k.shape[1] - _ROWS, k, special)
        return jnp.concatenate([k, again], 1)

    def values(self, place: Any) -> Any:
        """Return the values (Dv, keys) of some keys, zero if they are hidden."""
        v = self.v_ref[:, place]
        hidden = jnp.broadcast_to(self.hidden_ref[:, place], v.shape).astype(v.dtype)
        return jnp.where(hidden == 0, v, jnp.zeros_like(v))


def _sum_block(query_ref: Any, keys: _KeysInVmem, found_ref: Any, tile: int) -> Any:
    """Write a block's sums of values by weights; return those of weights, in (8, queries).

    While the weights of a tile meet their values, the next ones are computed: libtpu overlaps what
    is not dependent.
    """
    num_keys = keys.k_ref.shape[0]
    edges = [*range(0, num_keys, tile), num_keys]
    places = [slice(*pair) for pair in itertools.pairwise(edges)]
    total = jnp.zeros((8, query_ref.shape[1]), jnp.float32)
    weights: list[Any] = []
    for now in range(len(places) + 1):
        if now < len(places):
            found = jnp.exp2(_product(keys.rows(places[now]), query_ref[...]))
            total += _sum_rows(found)
            weights.append(found.astype(query_ref.dtype))
        if now:
            found = _product(keys.values(places[now - 1]), weights[now - 1])
            found_ref[...] = found if now == 1 else found_ref[...] + found
    return total


def _compute_again(
    query_ref: Any, keys: _KeysInVmem, sum_ref: Any, total_ref: Any, tile: int
) -> None:
    """Add a block to the sums, and raise bases to the highest scores before making weights."""
    num_keys, head_dim = keys.k_ref.shape[0], query_ref.shape[0] // 2
    tile = math.gcd(num_keys, tile)

    def add(number: Any, _: None) -> None:
        place = pl.ds(pl.multiple_of(number * tile, tile), tile)
        scores, base = _product(keys.rows(place), query_ref[...]), _base(query_ref)
        highest = base + jnp.maximum(jnp.max(scores, 0, keepdims=True), 0)
        _put_base(query_ref, query_ref[head_dim:].astype(jnp.float32), highest)
        # As written: by this much the next scores are lower.
        rise = _base(query_ref) - base
        weights, shrink = jnp.exp2(scores - rise), jnp.exp2(-rise)
        total_ref[...] = total_ref[...] * shrink + _sum_rows(weights)
        found = _product(keys.values(place), weights.astype(query_ref.dtype))
        sum_ref[...] = sum_ref[...] * shrink + found

    lax.fori_loop(0, num_keys // tile, add, None)


def _product(left: Any, right: Any) -> Any:
    return jnp.dot(left, right, preferred_element_type=jnp.float32)


def _sum_rows(weights: Any) -> Any:
    """Return eight rows that add up to all rows."""
    return jnp.sum(weights.reshape(-1, 8, weights.shape[1]), 0)
