"""Gradients of attention over lists of blocks: weights are computed again from the logsumexp."""

import functools
from typing import Any

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
    visit,
)
from tpuport.kernels.attention.block_lists import transposed

QUERIES = "block_sparse_backward_queries"
KEYS = "block_sparse_backward_keys"
# A logsumexp that makes every weight zero.
_HIGHEST = 1e30
# Rows that are fetched at a time.
_ROWS = 512
# Rows of an array of numbers, one a query: a tile of float32. The first two are used.
_NUMBERS = 8


def backward(
    problem: SparseProblem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    lists: Lists,
    results: tuple[jax.Array, jax.Array],
    grads: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of q, k and v of one chip's arrays.

    Args:
        problem: the static part.
        q: queries (B, Hq, Sq, D).
        k: keys (B, Hkv, Sk, D).
        v: values (B, Hkv, Sk, Dv).
        lists: as for the forward pass.
        results: output and logsumexp.
        grads: gradients of the output and of the logsumexp.
    """
    (out, lse), (grad, d_lse), num_k = results, grads, k.shape[2]
    inner = jnp.sum(grad.astype(jnp.float32) * out.astype(jnp.float32), -1)
    # A row that saw nothing has no gradient, and its logsumexp must not make NaN of zero.
    empty = jnp.isneginf(lse)
    numbers = jnp.stack([jnp.where(empty, 0, lse), jnp.where(empty, 0, inner - d_lse)], 2)
    numbers = _padded(numbers, 3, problem.q_block, 2, _NUMBERS)
    batch, heads = q.shape[:2]
    numbers = numbers.reshape(batch, heads, _NUMBERS, -1, problem.q_block).swapaxes(2, 3)
    rows = [_padded(x, 2, problem.q_block, 3, LANES) for x in (q, grad.astype(q.dtype))]
    keys = [_padded(x.astype(q.dtype), 2, problem.kv_block, 3, LANES) for x in (k, v)]
    d_q = _queries(problem, lists, rows, numbers, keys, num_k)
    by_key = tuple(transposed(x, keys[0].shape[2] // problem.kv_block) for x in lists)
    d_k, d_v = _keys(problem, by_key, rows, numbers, keys)
    d_k, d_v = (
        d.reshape(batch, x.shape[1], -1, *d.shape[2:]).sum(2)[:, :, :num_k, : x.shape[3]]
        for d, x in ((d_k, k), (d_v, v))
    )
    return d_q[:, :, : q.shape[2], : q.shape[3]], d_k.astype(k.dtype), d_v.astype(v.dtype)


def _padded(x: jax.Array, axis: int, unit: int, other: int, other_unit: int) -> jax.Array:
    return pad_dim(pad_dim(x, axis, unit), other, other_unit)


def _numbers_spec(size: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, None, _NUMBERS, size), lambda b, h, i: (b, h, i, 0, 0))


def _groups(lists: Lists, block: int) -> tuple[int, ...]:
    return tuple(blocks_at_once(_ROWS if x.masks is None else MASKED_KEYS, block) for x in lists)


def _queries(
    problem: SparseProblem,
    lists: Lists,
    rows: list[jax.Array],
    numbers: jax.Array,
    keys: list[jax.Array],
    num_k: int,
) -> jax.Array:
    """Compute the gradient of queries, over the lists of the forward pass."""
    (q, grad), (k, v), size, block = rows, keys, problem.q_block, problem.kv_block
    batch, heads, num_q, head_dim = q.shape
    arrays, specs = list_inputs(lists, k.shape[2] // block)
    groups = _groups(lists, block)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    buffers = [pltpu.VMEM((2, max(groups) * block, x.shape[3]), x.dtype) for x in keys]
    return pl.pallas_call(
        functools.partial(
            _queries_kernel,
            problem=problem,
            groups=groups,
            masked=tuple(x.masks is not None for x in lists),
            share=heads // k.shape[1],
            num_k=num_k,
        ),
        grid=(batch, heads, num_q // size),
        in_specs=[
            *specs,
            *(rows_spec(size, x.shape[3]) for x in rows),
            _numbers_spec(size),
            *(anywhere, anywhere),
        ],
        out_specs=rows_spec(size, head_dim),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_shapes=[
            pltpu.VMEM((head_dim, size), jnp.float32),
            *buffers,
            pltpu.SemaphoreType.DMA((2,)),
            *mask_scratch(lists, max(groups) * block, size),
        ],
        compiler_params=PARALLEL,
        cost_estimate=cost(problem, lists, q, k, 2 * head_dim + v.shape[3]),
        interpret=problem.interpret,
        name=QUERIES,
    )(*arrays, q, grad, numbers, k, v)


def _weights(scores: Any, lse: Any, seen: Any) -> Any:
    weights = jnp.exp(scores - lse)
    return weights if seen is None else jnp.where(seen, weights, 0)


def _product(left: Any, right: Any, contracted: tuple[int, int]) -> Any:
    """Multiply matrices over these dims, in float32."""
    dims = (((contracted[0],), (contracted[1],)), ((), ()))
    return lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _queries_kernel(
    *refs: Any,
    problem: SparseProblem,
    groups: tuple[int, ...],
    masked: tuple[bool, ...],
    share: int,
    num_k: int,
) -> None:
    """Compute the gradient of one block of queries."""
    num, block = len(groups), problem.kv_block
    entries, masks = refs[:num], list(refs[num : num + sum(masked)])
    q_ref, grad_ref, numbers_ref, k_hbm, v_hbm, out_ref, *scratch = refs[num + sum(masked) :]
    sum_ref, k_buffer, v_buffer, done, *mask_buffer = scratch
    at = pl.program_id(0), lax.div(pl.program_id(1), share)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    for entry, group, has_mask in zip(entries, groups, masked, strict=True):
        mask_hbm = masks.pop(0) if has_mask else None

        def copies(fetch: Fetch, mask_hbm: Any = mask_hbm) -> Any:
            slot, keys = fetch.slot, pl.ds(fetch.place * block, block)
            rows = (*at, rows_at(fetch.index, block))
            found = [
                copy_in(x, rows, buffer.at[slot, keys], done, slot)
                for x, buffer in ((k_hbm, k_buffer), (v_hbm, v_buffer))
            ]
            if mask_hbm is not None:
                buffer = mask_buffer[0].at[slot, keys]
                found.append(copy_in(mask_hbm, (fetch.mask,), buffer, done, slot))
            return found

        def compute(found: Fetched, has_mask: bool = has_mask) -> None:
            for g, index in enumerate(found.indices):
                keys = pl.ds(g * block, block)
                k, v = k_buffer[found.slot, keys], v_buffer[found.slot, keys]
                seen = _unpacked(mask_buffer[0][found.slot, keys]) if has_mask else None
                if num_k % block:
                    inside = lax.broadcasted_iota(jnp.int32, (block, q_ref.shape[0]), 0)
                    inside = inside + index * block < num_k
                    seen = inside if seen is None else seen & inside
                lse = jnp.where(g < found.left, numbers_ref[:1], _HIGHEST)
                weights = _weights(_product(k, q_ref[...], (1, 1)) * problem.scale, lse, seen)
                d_weights = _product(v, grad_ref[...], (1, 1))
                d_scores = (weights * (d_weights - numbers_ref[1:2])).astype(k.dtype)
                sum_ref[...] += _product(k, d_scores, (0, 0))

        keys = pl.ds(0, group * block)
        filled = [k_buffer.at[:, keys], v_buffer.at[:, keys]]
        filled += [mask_buffer[0].at[:, keys]] if has_mask else []
        visit(entry, group, copies, (filled, done), compute)
    out_ref[...] = (sum_ref[...].T * problem.scale).astype(out_ref.dtype)


def _unpacked(mask: Any) -> Any:
    return mask.astype(jnp.int32) != 0


def _keys(
    problem: SparseProblem,
    by_key: Lists,
    rows: list[jax.Array],
    numbers: jax.Array,
    keys: list[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Compute the gradients of keys and values for each query head, over the transposed lists."""
    (q, grad), (k, v), size, block = rows, keys, problem.q_block, problem.kv_block
    batch, heads, num_k = *q.shape[:2], k.shape[2]
    arrays, specs = list_inputs(by_key, q.shape[2] // size)
    groups = _groups(by_key, size)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    share, most = heads // k.shape[1], max(groups)
    # What is summed afterwards is not rounded before.
    dtype = q.dtype if share == 1 else jnp.float32
    d_k, d_v = pl.pallas_call(
        functools.partial(
            _keys_kernel,
            problem=problem,
            groups=groups,
            masked=tuple(x.masks is not None for x in by_key),
        ),
        grid=(batch, heads, num_k // block),
        in_specs=[
            *specs,
            *(rows_spec(block, x.shape[3], share) for x in keys),
            *(anywhere, anywhere, anywhere),
        ],
        out_specs=[rows_spec(block, x.shape[3]) for x in keys],
        out_shape=[jax.ShapeDtypeStruct((batch, heads, *x.shape[2:]), dtype) for x in keys],
        scratch_shapes=[
            *(pltpu.VMEM((block, x.shape[3]), jnp.float32) for x in keys),
            *(pltpu.VMEM((2, most * size, x.shape[3]), x.dtype) for x in rows),
            pltpu.VMEM((2, most, _NUMBERS, size), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
            *mask_scratch(by_key, most * block, size),
        ],
        compiler_params=PARALLEL,
        cost_estimate=cost(problem, by_key, q, k, 2 * q.shape[3] + 2 * v.shape[3]),
        interpret=problem.interpret,
        name=KEYS,
    )(*arrays, k, v, q, grad, numbers)
    return d_k, d_v


def _keys_kernel(
    *refs: Any, problem: SparseProblem, groups: tuple[int, ...], masked: tuple[bool, ...]
) -> None:
    """Compute the gradients of one block of keys and values."""
    num, size, block = len(groups), problem.q_block, problem.kv_block
    entries, masks = refs[:num], list(refs[num : num + sum(masked)])
    k_ref, v_ref, q_hbm, grad_hbm, numbers_hbm, dk_out, dv_out, *scratch = refs[num + sum(masked) :]
    dk_ref, dv_ref, q_buffer, grad_buffer, numbers_buffer, done, *mask_buffer = scratch
    at = pl.program_id(0), pl.program_id(1)
    dk_ref[...], dv_ref[...] = jnp.zeros_like(dk_ref), jnp.zeros_like(dv_ref)
    for entry, group, has_mask in zip(entries, groups, masked, strict=True):
        mask_hbm = masks.pop(0) if has_mask else None

        def copies(fetch: Fetch, mask_hbm: Any = mask_hbm) -> Any:
            slot, place = fetch.slot, fetch.place
            rows = (*at, rows_at(fetch.index, size))
            found = [
                copy_in(x, rows, buffer.at[slot, pl.ds(place * size, size)], done, slot)
                for x, buffer in ((q_hbm, q_buffer), (grad_hbm, grad_buffer))
            ]
            found.append(
                copy_in(numbers_hbm, (*at, fetch.index), numbers_buffer.at[slot, place], done, slot)
            )
            if mask_hbm is not None:
                buffer = mask_buffer[0].at[slot, pl.ds(place * block, block)]
                found.append(copy_in(mask_hbm, (fetch.mask,), buffer, done, slot))
            return found

        def compute(found: Fetched, has_mask: bool = has_mask) -> None:
            for g in range(len(found.indices)):
                rows = pl.ds(g * size, size)
                q, grad = q_buffer[found.slot, rows], grad_buffer[found.slot, rows]
                numbers = numbers_buffer[found.slot, g]
                seen = None
                if has_mask:
                    seen = _unpacked(mask_buffer[0][found.slot, pl.ds(g * block, block)])
                lse = jnp.where(g < found.left, numbers[:1], _HIGHEST)
                weights = _weights(_product(k_ref[...], q, (1, 1)) * problem.scale, lse, seen)
                dv_ref[...] += _product(weights.astype(grad.dtype), grad, (1, 0))
                d_weights = _product(v_ref[...], grad, (1, 1))
                d_scores = (weights * (d_weights - numbers[1:2])).astype(q.dtype)
                dk_ref[...] += _product(d_scores, q, (1, 0))

        rows = pl.ds(0, group * size)
        filled = [q_buffer.at[:, rows], grad_buffer.at[:, rows], numbers_buffer.at[:, :group]]
        filled += [mask_buffer[0].at[:, pl.ds(0, group * block)]] if has_mask else []
        visit(entry, group, copies, (filled, done), compute)
    dk_out[...] = (dk_ref[...] * problem.scale).astype(dk_out.dtype)
    dv_out[...] = dv_ref[...].astype(dv_out.dtype)
