"""HunyuanVideo-1.5's sparse attention: whether the device has it, and how chips share it."""

import functools
import importlib
from typing import Any

from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim, everywhere
from tpuport.tracing.attention.block_sparse import by_heads
from tpuport.tracing.core.context import current


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


class HunyuanReorderedTokens(Shim):
    """`ssta_3d_attention`, which sorts tokens into tiles before its kernel, and back after it."""

    TARGET = "hyvideo.models.transformers.modules.ssta_attention.ssta_3d_attention"
    REASON = "chips that hold parts of the sequence would send most tokens to sort them"
    REFERENCE = "the same function, called with other shardings of the same arrays"
    MODULE = "hyvideo.models.transformers.modules.ssta_attention"

    def copied(self) -> list[Any]:
        return [importlib.import_module(self.MODULE).ssta_3d_attention]

    def replacements(self) -> list[Replacement]:
        module: Any = importlib.import_module(self.MODULE)

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def ssta_3d_attention(
                all_q: Any, all_k: Any, all_v: Any, *args: Any, **kwargs: Any
            ) -> Any:
                if current() is None:
                    return original(all_q, all_k, all_v, *args, **kwargs)
                ratio: list[Any] = []

                def attend(*operands: Any) -> Any:
                    out, found = original(*operands, *args, **kwargs)
                    ratio.append(found)
                    return out

                return by_heads((all_q, all_k, all_v), attend), ratio[0]

            return ssta_3d_attention

        return everywhere([(module, "ssta_3d_attention", make)])
