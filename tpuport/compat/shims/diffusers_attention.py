"""diffusers' attention backends, answered by the provided packages."""

import importlib
import sys
import types
from typing import Any

from tpuport.compat.packages import flash_attn, flash_attn_interface, sageattention, xformers
from tpuport.foundation.patching.shim import Replacement, Shim


def _xformers() -> types.ModuleType:
    """Return `xformers` with `ops`: the module imported in the block if any, else a new one."""
    known = sys.modules.get("xformers")
    if known is not None and hasattr(known, "ops"):
        return known
    package, ops = types.ModuleType("xformers"), types.ModuleType("xformers.ops")
    vars(ops).update(xformers.Xformers().modules()["xformers.ops"])
    vars(package).update(ops=ops, __version__=xformers.Xformers.version())
    return package


def _flash_3(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
    """Run flash-attn 3 as diffusers' wrapped operator does: the denominators are [B, L, H]."""
    out, lse = flash_attn_interface.flash_attn_3_func(
        q, k, v, *args, return_attn_probs=True, **kwargs
    )
    return out, lse.transpose(1, 2)


class DiffusersAttention(Shim):
    """`set_attention_backend("flash")`, "sage", "xformers" and their variants: diffusers looks for
    the packages when it is imported, which may be before the block.
    """

    TARGET = "diffusers.models.attention_dispatch"
    REASON = "it looks once for packages that build for CUDA only"
    REFERENCE = 'the same model with set_attention_backend("native")'
    MODULE = "diffusers.models.attention_dispatch"

    def replacements(self) -> list[Replacement]:
        home = importlib.import_module(self.MODULE)
        flash = flash_attn.FlashAttn().modules()["flash_attn"]
        below = flash_attn.operators()
        sage = sageattention.SageAttention().modules()["sageattention"]
        names: dict[str, Any] = {
            "flash_attn_func": flash["flash_attn_func"],
            "flash_attn_varlen_func": flash["flash_attn_varlen_func"],
            "flash_attn_3_func": flash_attn_interface.flash_attn_3_func,
            "flash_attn_3_varlen_func": flash_attn_interface.flash_attn_3_varlen_func,
            **{name: call for name, call in sage.items() if name.startswith("sageattn")},
            "xops": _xformers().ops,
            "_wrapped_flash_attn_3": _flash_3,
            "_wrapped_flash_attn_forward": below["_wrapped_flash_attn_forward"],
            "_wrapped_flash_attn_backward": below["_wrapped_flash_attn_backward"],
            "_CAN_USE_FLASH_ATTN": True,
            "_CAN_USE_FLASH_ATTN_3": True,
            "_CAN_USE_SAGE_ATTN": True,
            "_CAN_USE_XFORMERS_ATTN": True,
        }
        return [Replacement(home, n, value) for n, value in names.items() if hasattr(home, n)]


class DiffusersXformers(Shim):
    """`enable_xformers_memory_efficient_attention()` of the older attention processors."""

    TARGET = "diffusers.models.attention_processor"
    REASON = "it looks once for xformers, which builds for CUDA only"
    REFERENCE = "the same model with its default attention processor"
    MODULE = "diffusers.models.attention_processor"

    def replacements(self) -> list[Replacement]:
        home = importlib.import_module(self.MODULE)
        names = {"xformers": _xformers(), "is_xformers_available": lambda: True}
        return [Replacement(home, n, value) for n, value in names.items() if hasattr(home, n)]
