"""Attention on jax arrays: JAX's splash kernel where it can serve, a blockwise softmax elsewhere.

Where every query sees the same keys, a kernel of our own is faster than splash on some chips.

Nothing here knows torch. `attend` chooses the kernel, `Mask` says who attends to whom,
`AttentionOptions` what the user asked for, and `Shards` over which axes of a mesh the arrays lie.
"""

from tpuport.attention.dispatch import attend
from tpuport.attention.mask import Mask
from tpuport.attention.options import AttentionOptions, BlockSizes, Shards

__all__ = ["AttentionOptions", "BlockSizes", "Mask", "Shards", "attend"]
