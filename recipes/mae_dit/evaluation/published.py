"""Weights of published networks, from the files that their authors distribute."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import CheckpointError, UsageError


def read_published(path: str | Path, what: str) -> dict[str, torch.Tensor]:
    """Read a file of weights into a state dict.

    Args:
        path: A torch file or safetensors.
        what: The content and where it is published, for the message.

    Raises:
        UsageError: There is no such file.
        CheckpointError: It is damaged, or loading it would run code.
    """
    if not Path(path).is_file():
        raise UsageError(f"{path} is not there. What to do: download {what}, and give its path")
    opened = tpuport.open_checkpoint(path)
    return {name: opened.read(name) for name in opened}


def load_exactly(model: nn.Module, weights: dict[str, torch.Tensor], path: str, what: str) -> None:
    """Load a state dict, all of it.

    Raises:
        CheckpointError: A name is missing, unknown, or of another shape.
    """
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} does not fit: {error}. What to do: give {what}, as it was downloaded"
        ) from error


def randomise(model: nn.Module, seed: int) -> None:
    """Fill a network with random weights that keep the scale of what goes through it.

    The same seed gives the same weights. Means of batch norms are 0 and variances 1.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() < 2:  # a norm's scale, or a bias
                value.fill_(1.0 if name.endswith("weight") else 0.0)
                continue
            std = (2.0 / value[0].numel()) ** 0.5
            value.copy_(torch.randn(value.shape, generator=generator) * std)


def say_random(name: str, say: Callable[[str], None]) -> None:
    """Say that a network has random weights, whose numbers compare with nobody else's."""
    say(f"{name} has random weights: its numbers are not comparable with published ones")
