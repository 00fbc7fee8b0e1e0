"""transformers' `attn_implementation="flash_attention_2"`, answered by the provided flash_attn."""

import functools
import importlib
from typing import Any

from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import Replacement, Shim

# Globals of transformers that it fills once it has loaded an implementation.
_KEPT = (
    *("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn"),
    *("_pad_fn", "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"),
)


class TransformersFlashAttention(Shim):
    """The functions that transformers loads for flash attention 2 and 3."""

    TARGET = "transformers.modeling_flash_attention_utils._lazy_imports"
    REASON = "it loads kernels for CUDA, and remembers in globals that it did"
    REFERENCE = 'the same model with attn_implementation="sdpa"'
    MODULE = "transformers.modeling_flash_attention_utils"

    def replacements(self) -> list[Replacement]:
        from tpuport.compat.packages import _flash_attn_parts as parts
        from tpuport.compat.packages import flash_attn as ours
        from tpuport.compat.packages import flash_attn_interface as third

        home = importlib.import_module(self.MODULE)
        if not hasattr(home, "_lazy_imports"):
            return []
        original = home._lazy_imports

        @functools.wraps(original)
        def lazy_imports(implementation: Any, *args: Any, **kwargs: Any) -> Any:
            if active() is None or implementation not in ("flash_attention_2", "flash_attention_3"):
                return original(implementation, *args, **kwargs)
            three = implementation == "flash_attention_3"
            return (
                third.flash_attn_3_func if three else ours.flash_attn_func,
                third.flash_attn_3_varlen_func if three else ours.flash_attn_varlen_func,
                ours.flash_attn_with_kvcache,
                parts.pad_input,
                parts.unpad,
            )

        # Empty, so that transformers loads again; the old values come back afterwards.
        kept = [Replacement(home, name, None) for name in _KEPT if hasattr(home, name)]
        return [Replacement(home, "_lazy_imports", lazy_imports), *kept]


class TransformersFlashCheck(Shim):
    """The check that flash attention 2 or 3 can be used: a model that supports it may."""

    TARGET = "transformers.PreTrainedModel._flash_attn_can_dispatch"
    REASON = "it asks for the CUDA package and device, and caches the answers permanently"
    REFERENCE = 'the same model with attn_implementation="sdpa"'
    MODULE = "transformers.modeling_utils"

    def replacements(self) -> list[Replacement]:
        model = importlib.import_module(self.MODULE).PreTrainedModel
        name = "_flash_attn_can_dispatch"
        original = vars(model).get(name)
        if original is None:
            return []

        @functools.wraps(original)
        def can_dispatch(self: Any, flash_attn_version: int, *args: Any, **kwargs: Any) -> bool:
            if active() is None or flash_attn_version == 4 or not self._supports_flash_attn:
                return original(self, flash_attn_version, *args, **kwargs)
            return True

        return [Replacement(model, name, can_dispatch)]
