"""Attention where every query sees the same keys: a kernel of our own, faster than splash on v6e.

Scores are kept transposed, keys by queries. What a row of scores needs is then one number a lane,
the maximum over keys is elementwise, and the second product, values by weights, has the weights
held in the matrix unit: its 256 by 256 are full whatever the size of a head, where in the usual
order a head of 128 fills half. The sum of the weights is a product too, by rows of ones below the
values.

The first product leaves half of the unit empty, so it has the scaled queries twice: rounded, and
what rounding took from them. That makes results more exact than splash's, which rounds them. Their
scale has log2(e) in it: exponentials are powers of two.

No score is masked. A key that nobody sees has another key's place, so that it changes no maximum,
and zeros for its values and its one. Blocks of such keys alone are skipped.

While the matrix unit makes the scores of one tile, those of the tile before become weights, and
the weights before them meet their values: libtpu overlaps what is not dependent.
"""

import functools
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
# A maximum that no score is below, finite: -inf - -inf is NaN.
_LOWEST = -1e30
# Rows of ones below the values: one tile of bf16.
_ONES = 16


@dataclass(frozen=True)
class Tuned:
    """The tile sizes that are fastest on one chip for one size of heads.

    Args:
        q: queries a step.
        kv_tile: keys a tile.
        tiles: fewest and most tiles of keys a step.
        share_of_peak: share of the chip's peak by libtpu's schedule, for full blocks.
    """

    q: int
    kv_tile: int
    tiles: tuple[int, int]
    share_of_peak: float


# By chip, size of a head and dtype; only where it is faster than the best splash kernel.
TUNED = {("v6e", 128, "bfloat16"): Tuned(768, 256, (13, 24), 0.508)}
# Cost of filling and emptying the pipeline once a step, in tiles.
_STEP_TILES = 3
# With fewer queries or keys than this many steps, most of a step is empty.
_LEAST_STEPS = 4


class Keys(NamedTuple):
    """Keys and values in the kernel's layout, and the blocks of them to visit.

    Args:
        k: (B, H, padded Sk, D); each row holds a key that is seen, if the example has one.
        v: (B, H, Dv + ones, padded Sk): transposed, with zeros where a key is not seen.
        visits: (B,), the number of blocks to visit.
        blocks: (B, number of blocks), block indices with those to visit first.
    """

    k: jax.Array
    v: jax.Array
    visits: jax.Array
    blocks: jax.Array


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
    most = tuned.tiles[1] * tuned.kv_tile
    if num_queries < _LEAST_STEPS * tuned.q or num_keys < _LEAST_STEPS * most:
        return None

    def cost(count: int) -> int:
        return -(-num_keys // (count * tuned.kv_tile)) * (count + _STEP_TILES)

    count = min(range(tuned.tiles[1], tuned.tiles[0] - 1, -1), key=cost)
    return DenseTiles(tuned.q, count * tuned.kv_tile, tuned.kv_tile)


def forward(local: Local, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute what `splash.forward` does, for a problem without a band, segments or a soft cap."""
    problem, tiles, num_q = local.problem, tiles_of(local), q.shape[2]
    padded = jnp.pad(q, [(0, 0), (0, 0), (0, -num_q % tiles.q), (0, 0)])
    keys = prepare_keys(local, k, v)
    out, lse = _call(problem, tiles, padded, keys, v.shape[3])
    return out[:, :, :num_q], lse[:, :, 0, :num_q]


def tiles_of(local: Local) -> DenseTiles:
    """Return a problem's tile sizes for this kernel."""
    assert local.problem.dense is not None, "a problem without tiles for this kernel"
    return local.problem.dense


def prepare_keys(local: Local, k: jax.Array, v: jax.Array) -> Keys:
    """Pad keys (B, H, Sk, D) and values (B, H, Sk, Dv) to full blocks; neutralize unseen keys."""
    size, batch, num_keys = tiles_of(local).kv, k.shape[0], splash.local_keys(local, k.shape[2])
    valid: Any = local.parts.key_valid
    if valid is None and not isinstance(num_keys, jax.Array):
        # The kernel needs at least one key: of none, one is kept that no query sees.
        k, v = (x[:, :, : max(num_keys, 1)] for x in (k, v))
    more = -k.shape[2] % size
    # Each array is padded first, so that libtpu fuses the rest into one pass.
    seen = jnp.arange(k.shape[2] + more) < num_keys
    if valid is not None:
        seen = seen & jnp.pad(valid, [(0, 0), (0, more)])
    seen = jnp.broadcast_to(seen, (batch, seen.shape[-1]))
    one = jnp.take_along_axis(k, jnp.argmax(seen, 1)[:, None, None, None], axis=2)
    k = jnp.pad(k, [(0, 0), (0, 0), (0, more), (0, 0)])
    k = jnp.where(seen[:, None, :, None], k, one)
    value_dim = v.shape[3]
    v = jnp.pad(v.swapaxes(2, 3), [(0, 0), (0, 0), (0, _ONES), (0, more)])
    v = jnp.where(jnp.arange(v.shape[2])[:, None] < value_dim, v, 1)
    v = jnp.where(seen[:, None, None, :], v, 0).astype(k.dtype)
    some = seen.reshape(batch, -1, size).any(2)
    blocks = jnp.argsort(~some, axis=1, stable=True).astype(jnp.int32)
    return Keys(k, v, some.sum(1, dtype=jnp.int32), blocks)


def _grid(tiles: DenseTiles, q: jax.Array, keys: Keys, value_dim: int) -> Any:
    """Build the kernel's grid, and the block specs of what each step reads and writes."""
    batch, heads, num_q, head_dim = q.shape
    share = heads // keys.k.shape[1]
    rows, num_k = keys.v.shape[2:]
    num_blocks = num_k // tiles.kv

    def place(b: Any, j: Any, count: Any, blocks: Any) -> Any:
        # Past the last block the index repeats, so that nothing more is fetched.
        return blocks[b * num_blocks + jnp.minimum(j, jnp.maximum(count[b] - 1, 0))]

    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(batch, heads, num_q // tiles.q, num_blocks),
        in_specs=[
            pl.BlockSpec((None, None, tiles.q, head_dim), lambda b, h, i, j, *_: (b, h, i, 0)),
            pl.BlockSpec(
                (None, None, tiles.kv, head_dim),
                lambda b, h, i, j, *order: (b, lax.div(h, share), place(b, j, *order), 0),
            ),
            pl.BlockSpec(
                (None, None, rows, tiles.kv),
                lambda b, h, i, j, *order: (b, lax.div(h, share), 0, place(b, j, *order)),
            ),
        ],
        out_specs=[
            pl.BlockSpec((None, None, tiles.q, value_dim), lambda b, h, i, j, *_: (b, h, i, 0)),
            pl.BlockSpec((None, None, 1, tiles.q), lambda b, h, i, j, *_: (b, h, 0, i)),
        ],
        scratch_shapes=[
            pltpu.VMEM((2 * head_dim, tiles.q), q.dtype),
            pltpu.VMEM((8, tiles.q), jnp.float32),
            pltpu.VMEM((rows, tiles.q), jnp.float32),
            pltpu.VMEM((2, tiles.kv_tile, tiles.q), jnp.float32),
            pltpu.VMEM((2, tiles.kv_tile, tiles.q), keys.v.dtype),
        ],
    )


def _call(
    problem: AttentionProblem, tiles: DenseTiles, q: jax.Array, keys: Keys, value_dim: int
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel: output (B, Hq, Sq, Dv) and logsumexp (B, Hq, 1, Sq), in full blocks."""
    batch, heads, num_q, head_dim = q.shape
    scores = batch * heads * num_q * keys.k.shape[2]
    return pl.pallas_call(
        functools.partial(
            _kernel,
            tile=tiles.kv_tile,
            value_dim=value_dim,
            scale=problem.scale * math.log2(math.e),
        ),
        grid_spec=_grid(tiles, q, keys, value_dim),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, num_q, value_dim), q.dtype),
            jax.ShapeDtypeStruct((batch, heads, 1, num_q), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * (head_dim + value_dim),
            transcendentals=scores,
            bytes_accessed=q.nbytes + (keys.k.nbytes + keys.v.nbytes) * (num_q // tiles.q),
        ),
        interpret=problem.interpret,
        name=NAME,
    )(keys.visits, keys.blocks.reshape(-1), q, keys.k, keys.v)


def _kernel(
    count_ref: Any,
    blocks_ref: Any,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    query_ref: Any,
    max_ref: Any,
    sum_ref: Any,
    score_ref: Any,
    weight_ref: Any,
    *,
    tile: int,
    value_dim: int,
    scale: float,
) -> None:
    """Process one block of keys for one block of queries; `sum_ref` is (Dv + ones, queries)."""
    del blocks_ref
    step, count = pl.program_id(3), count_ref[pl.program_id(0)]

    @pl.when(step == 0)
    def _start() -> None:
        exact = q_ref[...].astype(jnp.float32).T * scale
        rounded = exact.astype(query_ref.dtype)
        rest = (exact - rounded.astype(jnp.float32)).astype(query_ref.dtype)
        query_ref[...] = jnp.concatenate([rounded, rest], 0)
        max_ref[...] = jnp.full_like(max_ref, _LOWEST)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(step < count)
    def _add_block() -> None:
        add_block(query_ref, k_ref, v_ref, max_ref, sum_ref, score_ref, weight_ref, tile)

    @pl.when(step == pl.num_programs(3) - 1)
    def _end() -> None:
        weight = sum_ref[value_dim : value_dim + 1, :]
        empty = weight == 0
        out = sum_ref[:value_dim, :] / jnp.where(empty, 1, weight)
        out_ref[...] = out.T.astype(out_ref.dtype)
        lse = (max_ref[:1] + jnp.log2(jnp.where(empty, 1, weight))) * math.log(2)
        lse_ref[...] = jnp.where(empty, -jnp.inf, lse)


def add_block(
    query_ref: Any,
    k_ref: Any,
    v_ref: Any,
    max_ref: Any,
    sum_ref: Any,
    score_ref: Any,
    weight_ref: Any,
    tile: int,
) -> None:
    """Add a block of keys to the sums, tile by tile in a pipeline.

    While one tile's scores are computed, the tile before becomes weights, and the weights of the
    tile before that are multiplied with their values.
    """
    num_tiles = k_ref.shape[0] // tile
    # For each tile: the running maximum (8, queries), and the factor for sums made before it.
    maxima: list[Any] = [max_ref[...]]
    scales: list[Any] = []
    for now in range(num_tiles + 2):
        if now >= 2:
            place = slice((now - 2) * tile, (now - 1) * tile)
            weights = weight_ref[now % 2]
            found = jnp.dot(v_ref[:, place], weights, preferred_element_type=jnp.float32)
            sum_ref[...] = scales[now - 2][:1] * sum_ref[...] + found
        highest = None
        if now < num_tiles:
            k = k_ref[now * tile : (now + 1) * tile, :]
            twice = jnp.concatenate([k, k], 1)
            scores = jnp.dot(twice, query_ref[...], preferred_element_type=jnp.float32)
            score_ref[now % 2] = scores
            highest = jnp.max(scores.reshape(tile // 8, 8, -1), axis=0)
        if 1 <= now <= num_tiles:
            weights = jnp.exp2(score_ref[(now - 1) % 2] - maxima[now][:1])
            weight_ref[(now - 1) % 2] = weights.astype(weight_ref.dtype)
        if highest is not None:
            maxima.append(jnp.maximum(maxima[-1], jnp.max(highest, axis=0, keepdims=True)))
            scales.append(jnp.exp2(maxima[-2] - maxima[-1]))
    max_ref[...] = maxima[-1]
