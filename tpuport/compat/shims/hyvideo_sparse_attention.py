"""HunyuanVideo-1.5's sparse attention: whether the device has it, its masks, how chips share it."""

import functools
import importlib
import inspect
import math
from typing import Any

import torch

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


class HunyuanTextBlocks(Shim):
    """`create_ssta_3d_mask`, which cuts its mask where the text of an example ends."""

    TARGET = "hyvideo.models.transformers.modules.ssta_attention.create_ssta_3d_mask"
    REASON = "it reads the number of text blocks from the text's mask, as a size"
    REFERENCE = "the same function, given the text's mask"
    MODULE = HunyuanReorderedTokens.MODULE

    def copied(self) -> list[Any]:
        return [importlib.import_module(self.MODULE).create_ssta_3d_mask]

    def replacements(self) -> list[Replacement]:
        module: Any = importlib.import_module(self.MODULE)

        def make(original: Any) -> Any:
            signature = inspect.signature(original)

            @functools.wraps(original)
            def create_ssta_3d_mask(*args: Any, **kwargs: Any) -> Any:
                given = signature.bind(*args, **kwargs).arguments
                text_mask = given.get("text_mask")
                if current() is None or text_mask is None:
                    return original(*args, **kwargs)
                seen = original(**{**given, "text_mask": None})
                return _without_padding(seen, text_mask, given["q"].size(2), given["tile_thw"])

            return create_ssta_3d_mask

        return everywhere([(module, "create_ssta_3d_mask", make)])


def _without_padding(
    seen: torch.Tensor, text_mask: torch.Tensor, tokens: int, tile: tuple[int, int, int]
) -> torch.Tensor:
    """Let blocks of text that are padding see themselves, and be seen by no others.

    Args:
        seen: Booleans [heads, blocks, blocks], those of text last.
        text_mask: [text], zero where text is padding.
        tokens: Number of tokens of the video.
        tile: Sizes of a block.
    """
    size = math.prod(tile)
    used = torch.ceil(text_mask.sum() / size).long().clamp(min=1)
    blocks = torch.arange(seen.shape[-1], device=seen.device)
    is_padding = blocks >= tokens // size + used
    alone = torch.diag(is_padding)
    return seen & ~(is_padding[:, None] | is_padding) | alone
