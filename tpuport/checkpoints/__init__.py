"""Weights in files: torch checkpoints, safetensors and Hugging Face directories, in and out."""

from tpuport.checkpoints.checkpoint import open_checkpoint
from tpuport.checkpoints.loading import load_checkpoint
from tpuport.checkpoints.saving import save_checkpoint

__all__ = ["load_checkpoint", "open_checkpoint", "save_checkpoint"]
