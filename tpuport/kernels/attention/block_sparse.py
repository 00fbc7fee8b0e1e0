"""Attention whose blocks are data: for each block of queries a list of the blocks of keys it sees.

The lists are arguments of the program. A step of the grid handles one block of queries: it reads
its list from scalar memory and fetches the blocks that the list names, the next ones while it
computes. A short list therefore costs little time, whatever the longest one is.

Scores are transposed, keys by queries, and each query has a base that its scores are compared with,
as in `dense.py`: the highest score of a few keys of its list, so that no score waits for others.
Blocks whose sums show that it was too low are computed again with a running maximum. Lists with
masks, of blocks in which not every score counts, have a loop of their own and always the maximum.
The backward pass has a kernel for the gradient of queries, over the same lists, and one for those
of keys and values, over the transposed lists.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuport.kernels.attention.block_fetch import (
    LANES,
    MASKED_KEYS,
    PARALLEL,
    Fetch,
    Fetched,
    Lists,
    SparseProblem,
    blocks_at_once,
    copy_in,
    cost,
    list_inputs,
    mask_scratch,
    pad_dim,
    rows_at,
    rows_spec,
    tile_of,
    visit,
)
from tpuport.kernels.attention.dense import MOST

FORWARD = "block_sparse_forward"
# A maximum that no score is below, finite: -inf - -inf is NaN.
_LOWEST = -1e30
# Keys that are fetched at a time, at most.
_KEYS = 3072
# Rows of ones below the values: one tile of bfloat16.
_ONES = 16
# Keys of each block whose scores give a query its base: one tile of bfloat16.
_SAMPLE = 16


def forward(
    problem: SparseProblem, q: jax.Array, k: jax.Array, v: jax.Array, lists: Lists
) -> tuple[jax.Array, jax.Array]:
    """Return output (B, Hq, Sq, Dv) and logsumexp (B, Hq, Sq) of one chip's arrays."""
    num_q, value_dim = q.shape[2], v.shape[3]
    q, k = (pad_dim(x, 3, LANES) for x in (q, k))
    q = pad_dim(q, 2, problem.q_block)
    if problem.scale < 0:
        # The highest product is then that of the highest score.
        problem, q = dataclasses.replace(problem, scale=-problem.scale), -q
    more = -k.shape[2] % problem.kv_block
    # A key that is padding repeats one that is seen where it is: it changes no maximum.
    k = jnp.pad(k, [(0, 0), (0, 0), (0, more), (0, 0)], mode="edge") if more else k
    dim = value_dim + -value_dim % LANES
    ones = jnp.ones((*v.shape[:3], _ONES), v.dtype)
    v = jnp.concatenate([pad_dim(v, 3, LANES), ones], 3)
    # Behind the last block are values of zero, and ones of zero, for keys that do not count.
    v = jnp.pad(v, [(0, 0), (0, 0), (0, more + problem.kv_block), (0, 0)])
    v = v.swapaxes(2, 3).astype(k.dtype)
    out, lse = _call_forward(problem, lists, q, k, v, dim)
    return out[:, :, :num_q, :value_dim], lse.reshape(*lse.shape[:2], -1)[:, :, :num_q]


def _call_forward(
    problem: SparseProblem, lists: Lists, q: jax.Array, k: jax.Array, v: jax.Array, dim: int
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel on padded arrays; logsumexp is (B, Hq, query blocks, 1, queries)."""
    batch, heads, num_q, head_dim = q.shape
    size, block, dtype = problem.q_block, problem.kv_block, q.dtype
    arrays, specs = list_inputs(lists, k.shape[2] // block)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    groups = [blocks_at_once(_KEYS if x.masks is None else MASKED_KEYS, block) for x in lists]
    most, folds = max(groups) * block, folds_keys(q)
    scratch = [
        pltpu.VMEM((size // LANES, 2 * LANES, 2 * LANES) if folds else (head_dim, size), dtype),
        pltpu.VMEM((8, size), jnp.float32),
        pltpu.VMEM((v.shape[2], size), jnp.float32),
        pltpu.VMEM((v.shape[2], size), jnp.float32),
        pltpu.VMEM((2, most, head_dim), k.dtype),
        pltpu.VMEM((2, v.shape[2], most), v.dtype),
        pltpu.SemaphoreType.DMA((2,)),
    ]
    scratch += mask_scratch(lists, most, size)
    return pl.pallas_call(
        functools.partial(
            _forward_kernel,
            problem=problem,
            groups=tuple(groups),
            masked=tuple(x.masks is not None for x in lists),
            share=heads // k.shape[1],
        ),
        grid=(batch, heads, num_q // size),
        in_specs=[*specs, rows_spec(size, head_dim), anywhere, anywhere],
        out_specs=[
            rows_spec(size, dim),
            pl.BlockSpec((None, None, None, 1, size), lambda b, h, i: (b, h, i, 0, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, num_q, dim), dtype),
            jax.ShapeDtypeStruct((batch, heads, num_q // size, 1, size), jnp.float32),
        ],
        scratch_shapes=scratch,
        compiler_params=PARALLEL,
        cost_estimate=cost(problem, lists, q, k, head_dim + dim),
        interpret=problem.interpret,
        name=FORWARD,
    )(*arrays, q, k, v)


def _forward_kernel(
    *refs: Any,
    problem: SparseProblem,
    groups: tuple[int, ...],
    masked: tuple[bool, ...],
    share: int,
) -> None:
    """Attend one block of queries to the blocks of keys of its lists."""
    num, block = len(groups), problem.kv_block
    entries, masks = refs[:num], refs[num : num + sum(masked)]
    q_ref, k_hbm, v_hbm, out_ref, lse_ref, *scratch = refs[num + sum(masked) :]
    *held, k_buffer, v_buffer, done = scratch[:7]
    at, mask_buffer = (pl.program_id(0), lax.div(pl.program_id(1), share)), scratch[7:]
    state = _State(*held, factor=problem.scale * math.log2(math.e))
    _set_queries(state.query_ref, q_ref[...].T)
    state.max_ref[...] = jnp.full_like(state.max_ref, _LOWEST)
    state.sum_ref[...] = jnp.zeros_like(state.sum_ref)
    nothing = v_hbm.shape[3] // block - 1
    left_masks = iter(masks)
    for entry, group, has_mask in zip(entries, groups, masked, strict=True):
        mask_hbm = next(left_masks) if has_mask else None

        def copies(fetch: Fetch, mask_hbm: Any = mask_hbm) -> Any:
            slot, keys = fetch.slot, pl.ds(fetch.place * block, block)
            # In place of a block that does not exist, keys are those of the last one, whose scores
            # change no maximum, and values are zero.
            values = jnp.where(fetch.exists, fetch.index, nothing)
            found = [
                copy_in(
                    k_hbm, (*at, rows_at(fetch.index, block)), k_buffer.at[slot, keys], done, slot
                ),
                copy_in(
                    *(v_hbm, (*at, slice(None), rows_at(values, block))),
                    *(v_buffer.at[slot, :, keys], done, slot),
                ),
            ]
            if mask_hbm is not None:
                buffer = mask_buffer[0].at[slot, keys]
                found.append(copy_in(mask_hbm, (fetch.mask,), buffer, done, slot))
            return found

        def compute(found: Fetched, group: int = group, has_mask: bool = has_mask) -> None:
            keys = pl.ds(0, group * block)
            fetched = k_buffer.at[found.slot, keys], v_buffer.at[found.slot, :, keys]
            if has_mask:
                _add_by_maximum(state, *fetched, mask_buffer[0].at[found.slot, keys])
            else:
                _add(state, *fetched)

        def first(slot: Any, group: int = group) -> None:
            _raise_base(state, k_buffer.at[slot, pl.ds(0, group * block)], group)

        keys = pl.ds(0, group * block)
        filled = [k_buffer.at[:, keys], v_buffer.at[:, :, keys]]
        filled += [mask_buffer[0].at[:, keys]] if has_mask else []
        before = {} if has_mask else {"first": first}
        visit(entry, group, copies, (filled, done), compute, **before)
    dim = out_ref.shape[1]
    weight = state.weights()
    empty = weight == 0
    out = state.sum_ref[:dim, :] / jnp.where(empty, 1, weight)
    out_ref[...] = out.T.astype(out_ref.dtype)
    lse = state.max_ref[:1] * problem.scale + jnp.log(jnp.where(empty, 1, weight))
    lse_ref[...] = jnp.where(empty, -jnp.inf, lse)


class _State(NamedTuple):
    """One block of queries in VMEM, and what has been added up for it.

    Args:
        query_ref: as `_set_queries` leaves it.
        max_ref: (8, queries), in each row the base: the product that the others are compared with.
        sum_ref: (Dv + ones, queries), the sums of values, and of ones, by weights.
        found_ref: the same for the keys that were fetched.
        factor: factor of the products, with log2(e) in it. Queries are not scaled before their
            product, so that they are not rounded.
    """

    query_ref: Any
    max_ref: Any
    sum_ref: Any
    found_ref: Any
    factor: float

    def weights(self, *, found: bool = False) -> Any:
        """Return the sum of weights (1, queries), of all keys or of those that were fetched."""
        ref = self.found_ref if found else self.sum_ref
        return ref[ref.shape[0] - _ONES : ref.shape[0] - _ONES + 1, :]


def folds_keys(q: jax.Array) -> bool:
    """Return whether products take two keys a row: where a head fills half of the matrix unit."""
    return q.dtype == jnp.bfloat16 and q.shape[3] == LANES


def _set_queries(query_ref: Any, q: Any) -> None:
    """Keep queries (D, queries), or each 128 of them twice: for both keys of a row."""
    if query_ref.ndim == 2:
        query_ref[...] = q
        return
    zeros = jnp.zeros((LANES, LANES), q.dtype)
    for unit in range(query_ref.shape[0]):
        own = q[:, unit * LANES : (unit + 1) * LANES]
        first, second = (jnp.concatenate(pair, 1) for pair in ((own, zeros), (zeros, own)))
        query_ref[unit] = jnp.concatenate([first, second], 0)


def _products(query_ref: Any, k: Any) -> Any:
    """Return the products (keys, queries) of keys and queries."""
    if query_ref.ndim == 2:
        return jnp.dot(k, query_ref[...], preferred_element_type=jnp.float32)
    half = k.shape[0] // 2
    pairs = jnp.concatenate([k[:half], k[half:]], 1)
    found = [
        jnp.dot(pairs, query_ref[unit], preferred_element_type=jnp.float32)
        for unit in range(query_ref.shape[0])
    ]
    halves = (jnp.concatenate([x[:, at : at + LANES] for x in found], 1) for at in (0, LANES))
    return jnp.concatenate(list(halves), 0)


def _raise_base(state: _State, k_ref: Any, blocks: int) -> None:
    """Raise the base of each query to the highest product with a few keys of each block."""
    size = k_ref.shape[0] // blocks
    some = [k_ref[n * size : n * size + _SAMPLE, :] for n in range(blocks)]
    found = _products(state.query_ref, jnp.concatenate(some, 0))
    before = state.max_ref[...]
    highest = jnp.maximum(before, jnp.max(found, axis=0, keepdims=True))
    shrink = jnp.exp2((before - highest) * state.factor)
    state.sum_ref[...] = shrink[:1] * state.sum_ref[...]
    state.max_ref[...] = highest


def _add(state: _State, k_ref: Any, v_ref: Any) -> None:
    """Add keys (keys, D) and values (Dv + ones, keys), by their base if it is high enough."""
    _sum(state, k_ref, v_ref)
    # Values up to 2**63 times a weight are still numbers then.
    holds = jnp.sum(state.weights(found=True)) < MOST

    @pl.when(holds)
    def _keep() -> None:
        state.sum_ref[...] += state.found_ref[...]

    # The name is for `tpuport.cost`, which then counts on this branch not being taken.
    with jax.named_scope("seldom"):

        @pl.when(jnp.logical_not(holds))
        def _again() -> None:
            tile = tile_of(k_ref.shape[0])

            def add(number: Any, _: None) -> None:
                keys = pl.ds(pl.multiple_of(number * tile, tile), tile)
                _add_by_maximum(state, k_ref.at[keys], v_ref.at[:, keys])

            lax.fori_loop(0, k_ref.shape[0] // tile, add, None)


def _sum(state: _State, k_ref: Any, v_ref: Any) -> None:
    """Write the sums of fetched keys and values; no weight waits for other scores.

    While the weights of a tile meet their values, the next ones are computed.
    """
    tile, found_ref = tile_of(k_ref.shape[0]), state.found_ref
    places = [slice(at, at + tile) for at in range(0, k_ref.shape[0], tile)]
    weights: list[Any] = []
    for now in range(len(places) + 1):
        if now < len(places):
            scores = _products(state.query_ref, k_ref[places[now], :]) - state.max_ref[:1, :]
            weights.append(jnp.exp2(scores * state.factor).astype(v_ref.dtype))
        if now:
            v = v_ref[:, places[now - 1]]
            found = jnp.dot(v, weights[now - 1], preferred_element_type=jnp.float32)
            found_ref[...] = found if now == 1 else found_ref[...] + found


def _add_by_maximum(state: _State, k_ref: Any, v_ref: Any, mask_ref: Any = None) -> None:
    """Add keys and values tile by tile, and raise bases to the highest products before.

    While one tile's scores are computed, those of the tile before become weights, and the weights
    before them meet their values. Scores and weights have no buffers: the unit that stores is the
    one that limits this kernel.

    Args:
        state: the queries and their sums.
        k_ref: (keys, D).
        v_ref: (Dv + ones, keys).
        mask_ref: (keys, queries), zero where a score does not count; None if all do.
    """
    query_ref, max_ref, sum_ref, _, factor = state
    tile = tile_of(k_ref.shape[0])
    num_tiles = k_ref.shape[0] // tile
    highest, scores, weights, shrinks = max_ref[...], [], [], []
    for now in range(num_tiles + 2):
        if now >= 2:
            v = v_ref[:, (now - 2) * tile : (now - 1) * tile]
            found = jnp.dot(v, weights[now - 2], preferred_element_type=jnp.float32)
            sum_ref[...] = shrinks[now - 2][:1] * sum_ref[...] + found
        if now < num_tiles:
            place = slice(now * tile, (now + 1) * tile)
            found = _products(query_ref, k_ref[place, :])
            if mask_ref is not None:
                # Below the lowest maximum, so that its weight is zero.
                found = jnp.where(mask_ref[place, :].astype(jnp.int32) != 0, found, 2 * _LOWEST)
            rows = jnp.max(found.reshape(tile // 8, 8, -1), axis=0)
            before, highest = highest, jnp.maximum(highest, jnp.max(rows, axis=0, keepdims=True))
            scores.append((found, highest[:1]))
            shrinks.append(jnp.exp2((before - highest) * factor))
        if 1 <= now <= num_tiles:
            found, base = scores[now - 1]
            weights.append(jnp.exp2((found - base) * factor).astype(v_ref.dtype))
    max_ref[...] = highest
