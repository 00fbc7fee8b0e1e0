"""Weights in files: torch checkpoints, safetensors and Hugging Face directories, in and out.

Names are loaded when they are first used, since they need torch and jax.
"""

from typing import TYPE_CHECKING

from tpuport.foundation.imports import imported

if TYPE_CHECKING:
    from tpuport.weights.checkpoint import open_checkpoint
    from tpuport.weights.load import load_checkpoint
    from tpuport.weights.save import save_checkpoint

__all__ = ["load_checkpoint", "open_checkpoint", "save_checkpoint"]

_MODULES = {
    "load_checkpoint": "tpuport.weights.load",
    "open_checkpoint": "tpuport.weights.checkpoint",
    "save_checkpoint": "tpuport.weights.save",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(imported(_MODULES[name]), name)
    return value
