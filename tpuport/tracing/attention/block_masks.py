"""FlexAttention's BlockMask: whether its lists of blocks say more than its `mask_mod`.

Compiled, as code for CUDA runs it, `flex_attention` computes the blocks that a BlockMask lists, and
asks `mask_mod` only within those that are not listed as full. Lists that `create_block_mask` makes
from the same `mask_mod` say nothing more than it. Others do, such as those that a program chooses
by itself and gives to `BlockMask.from_kv_blocks`. PyTorch's own eager `flex_attention`, which is
not compiled, ignores all lists.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch

from tpuport.kernels.attention import BlockLists
from tpuport.tracing.attention.block_sparse import attend_lists, has_kernel, masked_lists
from tpuport.tracing.attention.lower import AttentionOperands, serving_kernel
from tpuport.tracing.attention.masks.graph import Graph
from tpuport.tracing.attention.masks.structure import Structure, with_conditions
from tpuport.tracing.attention.torch_entry import kernel_options, places
from tpuport.tracing.core.context import current
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import value_of

MaskMod = Callable[..., torch.Tensor]

# Holds the `mask_mod` that a BlockMask's lists were made from.
_MADE_FROM = "_tpuport_made_from"
# Up to so many pairs of query and key, known lists are compared with their `mask_mod`.
_MOST_COMPARED = 1 << 26
# Bytes of the masks of blocks, one a pair of query and key, up to which the kernel has them.
_MOST_MASKS = 256 << 20


def note_made_from(block_mask: Any, mask_mod: MaskMod) -> None:
    """Note that the lists of a BlockMask are those of this `mask_mod`."""
    setattr(block_mask, _MADE_FROM, mask_mod)


def says_more(block_mask: Any) -> bool:
    """Return whether the lists of a BlockMask may show other pairs than its `mask_mod`."""
    if block_mask is None or block_mask.kv_num_blocks is None:
        return False
    made_from = getattr(block_mask, _MADE_FROM, None)
    if made_from is not None and made_from is block_mask.mask_mod:
        return False
    if any(isinstance(x, TracedTensor) for x in _lists(block_mask)):
        return True
    return not _is_of_its_mask(block_mask)


def _lists(block_mask: Any) -> list[torch.Tensor]:
    found = [block_mask.kv_num_blocks, block_mask.kv_indices]
    full = [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
    return found + [x for x in full if x is not None]


def _is_of_its_mask(block_mask: Any) -> bool:
    """Return whether known lists are those of their `mask_mod`; False if it is too long to find."""
    listed = listed_blocks(block_mask)
    lead, (queries, keys) = listed[0].shape[:2], block_mask.seq_lengths
    if math.prod(lead) * queries * keys > _MOST_COMPARED:
        return False
    device = block_mask.kv_num_blocks.device
    at = [
        torch.arange(n, device=device).view([-1 if d == axis else 1 for d in range(4)])
        for axis, n in enumerate((*lead, queries, keys))
    ]
    with torch.no_grad():
        shown = block_mask.mask_mod(*at)
    if not isinstance(shown, torch.Tensor) or isinstance(shown, TracedTensor):
        return False
    allowed = _within(listed, shown, block_mask.BLOCK_SIZE, at)
    return bool((allowed == shown).all())


def listed_blocks(block_mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return which blocks are listed as partial and as full, [B, H, query blocks, key blocks]."""
    width = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    partial = _matrix(block_mask.kv_num_blocks, block_mask.kv_indices, width)
    if block_mask.full_kv_num_blocks is None:
        return partial, None
    return partial, _matrix(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, width)


def _matrix(counts: torch.Tensor, indices: torch.Tensor, width: int) -> torch.Tensor:
    counted = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    # What is not counted is written to a column of its own.
    columns = torch.where(counted, indices, width).long()
    found = torch.zeros(*columns.shape[:-1], width + 1, dtype=torch.int32, device=indices.device)
    return found.scatter(-1, columns, 1)[..., :width] > 0


def _within(listed: Any, shown: torch.Tensor, sizes: tuple[int, int], at: Any) -> torch.Tensor:
    """Return which pairs are seen: listed as full, or as partial and shown by the `mask_mod`."""
    partial, full = listed
    b, h, q, k = at
    q, k = q // sizes[0], k // sizes[1]

    def of(blocks: torch.Tensor) -> torch.Tensor:
        example = b if blocks.shape[0] > 1 else torch.zeros_like(b)
        head = h if blocks.shape[1] > 1 else torch.zeros_like(h)
        return blocks[example, head, q, k]

    seen = of(partial) & shown
    return seen if full is None else seen | of(full)


def whole_mask_mod(block_mask: Any) -> MaskMod:
    """Return a function of four indices that shows what both lists and `mask_mod` show."""
    listed, mask_mod = listed_blocks(block_mask), block_mask.mask_mod

    def shown(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
        own = mask_mod(b, h, q_idx, kv_idx)
        return _within(listed, own, block_mask.BLOCK_SIZE, (b, h, q_idx, kv_idx))

    return shown


def with_lists_in_mask(block_mask: Any) -> Any:
    """Return a BlockMask whose `mask_mod` shows what its lists do, for eager PyTorch."""
    if not says_more(block_mask):
        return block_mask
    found = copy.copy(block_mask)
    found.mask_mod = whole_mask_mod(block_mask)
    note_made_from(found, found.mask_mod)
    return found


def attend_block_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: Any,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute FlexAttention without a `score_mod` by the block-sparse kernel.

    Returns:
        The output and the logsumexp; None where the kernel does not serve, or another one is
        better: splash, if it knows the structure of a `mask_mod` from which the lists were made.
    """
    sizes = tuple(block_mask.BLOCK_SIZE)
    lengths = query.shape[2], key.shape[2]
    fits = tuple(block_mask.seq_lengths) == lengths
    if not fits or not has_kernel(query, key, value, sizes):
        return None
    extra = says_more(block_mask)
    shape = (*query.shape[:3], key.shape[2])
    shown = _shown(block_mask, shape)
    if not extra and shown is not None and _is_for_splash(query, shape, shown):
        return None
    lists = []
    if block_mask.full_kv_num_blocks is not None:
        full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        lists.append(BlockLists(*(value_of(x) for x in full)))
    counts, indices = (value_of(x) for x in (block_mask.kv_num_blocks, block_mask.kv_indices))
    if shown is None:
        lists.append(BlockLists(counts, indices))
    elif math.prod(shown.shape[:-2]) * math.prod(lengths) > _MOST_MASKS:
        return None
    else:
        lists.append(masked_lists(counts, indices, shown, lengths, sizes))
    words = "listed blocks" if shown is None else "listed blocks, and a mask within some"
    return attend_lists((query, key, value), lists, blocks=sizes, scale=scale, mask=words)


def _shown(block_mask: Any, shape: tuple[int, ...]) -> Any:
    """Return the value of the `mask_mod` on all indices; None for the one that shows everything."""
    from torch.nn.attention.flex_attention import noop_mask

    if block_mask.mask_mod is noop_mask:
        return None
    at = [
        places(n).view([-1 if d == axis else 1 for d in range(4)]) for axis, n in enumerate(shape)
    ]
    return value_of(block_mask.mask_mod(*at))


def _is_for_splash(query: torch.Tensor, shape: tuple[int, ...], shown: Any) -> bool:
    trace = current()
    options = kernel_options()
    assert trace is not None, "attention by a kernel outside of a trace"
    if options is None:
        return False
    found = with_conditions(Structure(shape), Graph(frozen=True).of(shown))
    return serving_kernel(trace, value_of(query), found, AttentionOperands(), options) == "splash"
