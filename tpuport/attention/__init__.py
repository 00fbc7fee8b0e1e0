"""Attention on jax arrays: JAX's splash kernel where it can serve, a blockwise softmax elsewhere.

Nothing here knows torch. `attend` chooses the kernel, `Mask` says who attends to whom,
`AttentionOptions` what the user asked for, and `Shards` over which axes of a mesh the arrays lie.
"""

from tpuport.attention.dispatch import attend
from tpuport.attention.mask import Mask
from tpuport.attention.options import AttentionOptions, BlockSizes, Shards

__all__ = ["AttentionOptions", "BlockSizes", "Mask", "Shards", "attend"]
