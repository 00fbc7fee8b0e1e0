"""Attention whose blocks are data: for each block of queries a list of the blocks of keys it sees.

The lists are arguments of the program. A step of the grid handles one block of queries: it reads
its list from scalar memory and fetches the blocks that the list names, the next ones while it
computes. A short list therefore costs little time, whatever the longest one is.

Scores are transposed, keys by queries, as in `dense.py`, whose pipeline this kernel uses. Lists
with masks, of blocks in which not every score counts, have a loop of their own; the others compare
nothing. The backward pass has a kernel for the gradient of queries, over the same lists, and one
for those of keys and values, over the transposed lists.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpuport.kernels.attention import dense
from tpuport.kernels.attention.block_fetch import (
    LANES,
    MASKED_KEYS,
    PARALLEL,
    Fetched,
    Lists,
    SparseProblem,
    blocks_at_once,
    copy_in,
    cost,
    list_inputs,
    mask_scratch,
    pad_dim,
    rows_spec,
    tile_of,
    visit,
)

FORWARD = "block_sparse_forward"
# A maximum that no score is below, finite: -inf - -inf is NaN.
_LOWEST = -1e30
# Keys that are fetched at a time, at most.
_KEYS = 1536
# Rows of ones below the values: one tile of bfloat16.
_ONES = 16


def forward(
    problem: SparseProblem, q: jax.Array, k: jax.Array, v: jax.Array, lists: Lists
) -> tuple[jax.Array, jax.Array]:
    """Return output (B, Hq, Sq, Dv) and logsumexp (B, Hq, Sq) of one chip's arrays."""
    num_q, value_dim = q.shape[2], v.shape[3]
    q, k = (pad_dim(x, 3, LANES) for x in (q, k))
    q = pad_dim(q, 2, problem.q_block)
    more = -k.shape[2] % problem.kv_block
    # A key that is padding repeats one that is seen where it is: it changes no maximum.
    k = jnp.pad(k, [(0, 0), (0, 0), (0, more), (0, 0)], mode="edge") if more else k
    dim = value_dim + -value_dim % LANES
    ones = jnp.ones((*v.shape[:3], _ONES), v.dtype)
    v = jnp.concatenate([pad_dim(v, 3, LANES), ones], 3)
    v = pad_dim(v, 2, problem.kv_block).swapaxes(2, 3).astype(k.dtype)
    out, lse = _call_forward(problem, lists, q, k, v, dim)
    return out[:, :, :num_q, :value_dim], lse.reshape(*lse.shape[:2], -1)[:, :, :num_q]


def _call_forward(
    problem: SparseProblem, lists: Lists, q: jax.Array, k: jax.Array, v: jax.Array, dim: int
) -> tuple[jax.Array, jax.Array]:
    """Run the kernel on padded arrays; logsumexp is (B, Hq, query blocks, 1, queries)."""
    batch, heads, num_q, head_dim = q.shape
    size, block, dtype = problem.q_block, problem.kv_block, q.dtype
    arrays, specs = list_inputs(lists)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    groups = [blocks_at_once(_KEYS if x.masks is None else MASKED_KEYS, block) for x in lists]
    # bfloat16 queries have a second number each, in the half of the matrix unit that is free.
    times = 2 if dtype == jnp.bfloat16 else 1
    most = max(groups) * block
    scratch = [
        pltpu.VMEM((times * head_dim, size), dtype),
        pltpu.VMEM((8, size), jnp.float32),
        pltpu.VMEM((v.shape[2], size), jnp.float32),
        pltpu.VMEM((2, tile_of(block), size), jnp.float32),
        pltpu.VMEM((2, tile_of(block), size), v.dtype),
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
    query_ref, max_ref, sum_ref, score_ref, weight_ref, k_buffer, v_buffer, done, *mask_buffer = (
        scratch
    )
    at = pl.program_id(0), lax.div(pl.program_id(1), share)
    exact = q_ref[...].astype(jnp.float32).T * (problem.scale * math.log2(math.e))
    rounded = exact.astype(query_ref.dtype)
    if query_ref.shape[0] > rounded.shape[0]:
        rest = (exact - rounded.astype(jnp.float32)).astype(query_ref.dtype)
        rounded = jnp.concatenate([rounded, rest], 0)
    query_ref[...] = rounded
    max_ref[...] = jnp.full_like(max_ref, _LOWEST)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    tile = score_ref.shape[1]
    left_masks = iter(masks)
    for entry, group, has_mask in zip(entries, groups, masked, strict=True):
        mask_hbm = next(left_masks) if has_mask else None

        def copies(slot: Any, g: int, index: Any, mask: Any, mask_hbm: Any = mask_hbm) -> Any:
            keys = pl.ds(g * block, block)
            place = pl.ds(pl.multiple_of(index * block, block), block)
            found = [
                copy_in(k_hbm, (*at, place), k_buffer.at[slot, keys], done.at[slot]),
                copy_in(
                    *(v_hbm, (*at, slice(None), place), v_buffer.at[slot, :, keys]), done.at[slot]
                ),
            ]
            if mask_hbm is not None:
                buffer = mask_buffer[0].at[slot, keys]
                found.append(copy_in(mask_hbm, (mask,), buffer, done.at[slot]))
            return found

        def compute(found: Fetched, group: int = group, has_mask: bool = has_mask) -> None:
            keys = pl.ds(0, group * block)
            dense.add_block(
                *(query_ref, k_buffer.at[found.slot, keys], v_buffer.at[found.slot, :, keys]),
                *(max_ref, sum_ref, score_ref, weight_ref, tile),
                count=found.left * (block // tile),
                mask_ref=mask_buffer[0].at[found.slot, keys] if has_mask else None,
            )

        visit(entry, group, copies, compute)
    dim = out_ref.shape[1]
    weight = sum_ref[dim : dim + 1, :]
    empty = weight == 0
    out = sum_ref[:dim, :] / jnp.where(empty, 1, weight)
    out_ref[...] = out.T.astype(out_ref.dtype)
    lse = (max_ref[:1] + jnp.log2(jnp.where(empty, 1, weight))) * math.log(2)
    lse_ref[...] = jnp.where(empty, -jnp.inf, lse)
