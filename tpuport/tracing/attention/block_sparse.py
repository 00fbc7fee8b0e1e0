"""Attention over lists of blocks that data decides, on torch tensors, for shims and packages."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.kernels.attention import AttentionOptions, BlockLists, attend_blocks, lists_of
from tpuport.kernels.attention.attend_blocks import serves
from tpuport.tracing.attention.lower import note_call, spread
from tpuport.tracing.attention.options import heads_over, shards_for
from tpuport.tracing.attention.torch_entry import kernel_options
from tpuport.tracing.core.context import current
from tpuport.tracing.core.values import flow_of, value_of, wrap_as

KERNEL = "block-sparse"


def has_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: tuple[int, int]
) -> bool:
    """Return whether the running trace has the kernel for such operands.

    Args:
        query: [B, H, L, D].
        key: [B, G, S, D].
        value: [B, G, S, Dv].
        blocks: Queries of a block, and keys.
    """
    options = kernel_options()
    if options is None or not _runs(options):
        return False
    q, k, v = (value_of(x) for x in (query, key, value))
    return serves(q, k, v, blocks)


def _runs(options: AttentionOptions) -> bool:
    return options.kernel == "auto" and (options.platform == "tpu" or options.interpret)


def attend_lists(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lists: Sequence[BlockLists],
    *,
    blocks: tuple[int, int],
    scale: float | None,
    mask: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention over lists of blocks by the kernel, where `has_kernel` said so.

    Args:
        operands: Queries [B, H, L, D], keys [B, G, S, D] and values [B, G, S, Dv].
        lists: Lists of jax values, as `attend_blocks` takes them.
        blocks: Queries of a block, and keys.
        scale: Factor of the scores; None for 1 / sqrt(D).
        mask: What the report says of the mask.

    Returns:
        [B, H, L, Dv], and the logsumexp [B, H, L] in float32.
    """
    trace, options = current(), kernel_options()
    assert trace is not None, "attention by a kernel outside of a trace"
    assert options is not None, "attention by a kernel, which was not asked for"
    query, _, value = operands
    q, k, v = (value_of(x) for x in operands)
    shards = shards_for(trace.options.mesh, q.shape[:3])
    found = attend_blocks(
        *(q, k, v, lists),
        blocks=blocks,
        scale=scale,
        interpret=options.interpret,
        shards=shards,
        sequence_parallel=options.sequence_parallel,
    )
    note_call(trace, q, k, KERNEL, "blocks are data", mask, spread(shards))
    shapes = (*query.shape[:3], value.shape[-1]), tuple(query.shape[:3])
    metas = [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(shapes, (query.dtype, torch.float32), strict=True)
    ]
    flow = flow_of(list(operands))
    out, lse = (wrap_as(None, x, m, trace, flow) for x, m in zip(found, metas, strict=True))
    return out, lse


def masked_lists(
    counts: Any, indices: Any, mask: jax.Array, lengths: tuple[int, int], blocks: tuple[int, int]
) -> BlockLists:
    """Return lists of blocks in which a mask counts, of which each block is kept.

    Args:
        counts: (B or 1, H or 1, query blocks).
        indices: (B or 1, H or 1, query blocks, width).
        mask: Booleans, broadcastable to (B, H, queries, keys).
        lengths: Queries and keys.
        blocks: Queries of a block, and keys.
    """
    mask = jnp.asarray(mask, bool)
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], *lengths))
    numbers = [-(-n // size) for n, size in zip(lengths, blocks, strict=True)]
    more = [n * b - x for n, b, x in zip(numbers, blocks, lengths, strict=True)]
    mask = jnp.pad(mask, [(0, 0), (0, 0), (0, more[0]), (0, more[1])])
    own = mask.shape[:2]
    tiles = mask.reshape(*own, numbers[0], blocks[0], numbers[1], blocks[1]).swapaxes(3, 4)
    lead = jnp.broadcast_shapes(own, counts.shape[:2])
    counts = jnp.broadcast_to(counts, (*lead, *counts.shape[2:]))
    indices = jnp.broadcast_to(indices, (*lead, *indices.shape[2:]))
    # The number of the mask's example and head, then of the row of blocks, then the block.
    first = jnp.arange(own[0] * own[1]).reshape(own) * numbers[0]
    row = jnp.broadcast_to(first, lead)[..., None] + jnp.arange(numbers[0])
    slots = row[..., None] * numbers[1] + jnp.clip(indices, 0, numbers[1] - 1)
    return BlockLists(
        counts.astype(jnp.int32),
        indices.astype(jnp.int32),
        slots.astype(jnp.int32),
        tiles.reshape(-1, *blocks),
    )


def attend_matrix(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    seen: torch.Tensor,
    *,
    blocks: tuple[int, int],
    scale: float | None = None,
) -> torch.Tensor:
    """Compute attention to the blocks of a matrix by the kernel, where `has_kernel` said so.

    Args:
        operands: As for `attend_lists`.
        seen: Booleans [B or 1, H or 1, query blocks, key blocks].
        blocks: Queries of a block, and keys.
        scale: Factor of the scores; None for 1 / sqrt(D).
    """
    lists = [lists_of(value_of(seen))]
    return attend_lists(operands, lists, blocks=blocks, scale=scale, mask="listed blocks")[0]


def by_heads(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Call attention that reorders tokens before its kernel and after it.

    With `sequence_parallel="ulysses"` tokens are exchanged for heads before the call, and back
    after it, instead of around the kernel: chips that hold parts of the sequence would send most
    tokens several times to reorder them.

    Args:
        operands: Queries [B, H, L, D], keys [B, G, S, D] and values [B, G, S, Dv].
        attend: Returns [B, H, L, Dv].
    """
    trace, options = current(), kernel_options()
    if trace is None or options is None or options.sequence_parallel != "ulysses":
        return attend(*operands)
    shards = shards_for(trace.options.mesh, operands[0].shape[:3])
    if shards is None or not shards.sequence:
        return attend(*operands)
    axes = (*shards.heads, *shards.sequence)
    if operands[1].shape[1] % math.prod(shards.mesh.shape[axis] for axis in axes):
        return attend(*operands)

    def placed(x: torch.Tensor, spec: P) -> torch.Tensor:
        value = jax.lax.with_sharding_constraint(value_of(x), NamedSharding(shards.mesh, spec))
        meta = torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")
        return wrap_as(None, value, meta, trace, flow_of([x]))

    with heads_over(axes):
        result = attend(*(placed(x, P(shards.batch, axes)) for x in operands))
    # A sequence may be one that chips do not divide; it is then left as it is.
    over = math.prod(shards.mesh.shape[axis] for axis in shards.sequence)
    tokens = shards.sequence if result.shape[2] % over == 0 else None
    return placed(result, P(shards.batch, shards.heads, tokens)) if tokens else result
