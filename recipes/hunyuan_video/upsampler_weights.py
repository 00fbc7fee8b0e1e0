"""Tiny upsamplers for super-resolution with random weights, by the names of upstream's classes.

The classes, SRTo720pUpsampler and SRTo1080pUpsampler, are not imported, so that a model can be made
where upstream's code is not installed.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Weights = dict[str, torch.Tensor]
_HIDDEN, _BLOCKS = 12, 2
_LEVELS = (16, 8)  # the second has fewer channels, and with them a shortcut of its own


def tiny_upsampler(resolution: str, channels: int) -> tuple[dict[str, Any], Weights]:
    """Return configuration and weights of an upsampler, drawn from torch's generator.

    Args:
        resolution: "720p" or "1080p", which have different classes.
        channels: Channels of the latents.
    """
    if resolution == "720p":
        config: dict[str, Any] = {
            "in_channels": channels,
            "out_channels": channels,
            "hidden_channels": _HIDDEN,
            "num_blocks": _BLOCKS,
            "global_residual": True,
        }
        return config, dict(_residual_blocks(channels))
    config = {
        "z_channels": channels,
        "out_channels": channels,
        "block_out_channels": list(_LEVELS),
        "num_res_blocks": 1,
    }
    return config, dict(_decoder_blocks(channels))


def _residual_blocks(channels: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield from _conv("in_conv.conv", channels, _HIDDEN)
    for block in range(_BLOCKS):
        for layer in (0, 2, 4):
            yield from _conv(f"blocks.{block}.block.{layer}.conv", _HIDDEN, _HIDDEN)
    yield from _conv("out_conv.conv", _HIDDEN, channels)


def _decoder_blocks(channels: int) -> Iterator[tuple[str, torch.Tensor]]:
    before = _LEVELS[0]
    yield from _conv("conv_in.conv", channels, before)
    for level, after in enumerate(_LEVELS):
        for block in range(2):
            name = f"up.{level}.block.{block}"
            yield f"{name}.norm1.gamma", _scale(before)
            yield from _conv(f"{name}.conv1.conv", before, after)
            yield f"{name}.norm2.gamma", _scale(after)
            yield from _conv(f"{name}.conv2.conv", after, after)
            if before != after:
                yield from _conv(f"{name}.nin_shortcut", before, after, 1)
            before = after
    yield "norm_out.gamma", _scale(before)
    yield from _conv("conv_out.conv", before, channels)


def _conv(name: str, before: int, after: int, size: int = 3) -> Iterator[tuple[str, torch.Tensor]]:
    for leaf, weight in nn.Conv3d(before, after, size).state_dict().items():
        yield f"{name}.{leaf}", weight


def _scale(channels: int) -> torch.Tensor:
    return 1 + 0.1 * torch.randn(channels, 1, 1, 1)
