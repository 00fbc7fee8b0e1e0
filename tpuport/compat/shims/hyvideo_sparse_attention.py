"""HunyuanVideo-1.5's question whether the device has its sparse attention."""

import importlib
from typing import Any

from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim


class HunyuanSparseAttention(Shim):
    """`is_sparse_attn_supported`, which asks whether the name of the device is a Hopper GPU's.

    The kernels are those of `flex_block_attn`, which is provided.
    """

    TARGET = "hyvideo.commons.is_sparse_attn_supported"
    REASON = "attn_mode='flex-block-attn' is refused unless the device's name begins 'NVIDIA H'"
    REFERENCE = "True, as on the GPUs for which flex_block_attn is built"
    MODULE = "hyvideo.commons"

    def replacements(self) -> list[Replacement]:
        commons: Any = importlib.import_module(self.MODULE)
        original = commons.is_sparse_attn_supported

        def is_sparse_attn_supported() -> bool:
            return True if active() is not None else original()

        return [Replacement(commons, "is_sparse_attn_supported", is_sparse_attn_supported)]
