"""Attention on jax arrays: JAX's splash kernel where it can serve, a blockwise softmax elsewhere.

Where every query sees the same keys, a kernel of our own is faster than splash on some chips.
Another, `attend_blocks`, takes the blocks that are seen as an argument.

Nothing here imports torch. `attend` chooses the kernel, `Mask` says who attends to whom,
`AttentionOptions` what the user asked for, and `Shards` which mesh axes the arrays are sharded
over.
"""

from tpuport.kernels.attention.attend_blocks import attend_blocks
from tpuport.kernels.attention.block_lists import BlockLists, lists_of
from tpuport.kernels.attention.dispatch import attend
from tpuport.kernels.attention.mask import Mask
from tpuport.kernels.attention.options import AttentionOptions, BlockSizes, Shards

__all__ = [
    "AttentionOptions",
    "BlockLists",
    "BlockSizes",
    "Mask",
    "Shards",
    "attend",
    "attend_blocks",
    "lists_of",
]
