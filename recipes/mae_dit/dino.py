"""Heads on a frozen DINO as a discriminator (Sauer et al. 2023, arXiv:2301.09515)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from recipes.mae_dit.evaluation.published import load_exactly, randomise, read_published
from recipes.mae_dit.spectral import SpectralConv1d
from recipes.mae_dit.stage2.transformer import Attention, Layers, Patches
from tpuport.foundation.errors import UsageError

_SIDE = 224  # pixels that the transformer was trained on
_DEPTH = 12
_READ_AFTER = (2, 5, 8, 11)  # blocks whose results have a head, beside the embedding of patches
_GROUP = 8  # images whose statistics a norm of heads takes together
_EPSILON = 1e-6
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_KEY = "gan.disc.arch"


@dataclass(frozen=True)
class Size:
    """The size of a DINO.

    Attributes:
        patch: Pixels of a patch's side.
        width: Channels.
        heads: Heads of attention.
        depth: Blocks.
    """

    patch: int
    width: int
    heads: int
    depth: int = _DEPTH


# By upstream's names.
SIZES = {"S_16": Size(16, 384, 6), "S_8": Size(8, 384, 6), "B_16": Size(16, 768, 12)}


class DinoDiscriminator(nn.Module):
    """Convolutional heads on what a frozen DINO reads of images, with upstream's names of heads.

    The heads have spectral norms, whose vectors a call in training mode moves by one iteration.

    Args:
        size: The size of the DINO, which has random weights until a state dict is loaded.
        kernel: Tokens that the second convolution of a head sees.
        norm: "bn" takes statistics of eight images at a time, "gn" of groups of channels.
        seed: Seed of the DINO's random weights.
    """

    def __init__(self, size: Size, kernel: int = 9, norm: str = "bn", seed: int = 0) -> None:
        super().__init__()
        if norm not in ("bn", "gn"):
            raise UsageError(f"{_KEY}.norm_type={norm!r}: expected bn or gn")
        self.dino = FrozenDino(size)
        randomise(self.dino, seed)
        read = 1 + sum(block < size.depth for block in _READ_AFTER)
        self.heads = nn.ModuleList(_head(size.width, kernel, norm) for _ in range(read))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, heads x patches) of images in [-1, 1]."""
        found = zip(self.heads, self.dino(images), strict=True)
        return torch.cat([head(features).flatten(1) for head, features in found], 1)


class FrozenDino(nn.Module):
    """A vision transformer with the names of DINO's state dict, without its last norm's use."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        mean, std = (torch.tensor(v)[None, :, None, None] for v in (_MEAN, _STD))
        self.register_buffer("scale", 0.5 / std, persistent=False)
        self.register_buffer("shift", (0.5 - mean) / std, persistent=False)
        self.patch_embed = Patches(3, size.width, size.patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, size.width))
        count = (_SIDE // size.patch) ** 2
        self.pos_embed = nn.Parameter(torch.zeros(1, count + 1, size.width))
        self.blocks = nn.ModuleList(_FrozenBlock(size.width, size.heads) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width, eps=_EPSILON)  # the state dict has it
        self.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """Return the patches (B, width, patches) of images, after each block that has a head."""
        x = self.patch_embed(_resized(images * self.scale + self.shift))
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        found = [_read(x)]
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in _READ_AFTER:
                found.append(_read(x))
        return found


def _resized(images: torch.Tensor) -> torch.Tensor:
    """Return images of the size that DINO has: larger ones by means, others by cubics."""
    size = (_SIDE, _SIDE)
    if images.shape[-2] > _SIDE:
        return F.interpolate(images, size, mode="area")
    return F.interpolate(images, size, mode="bicubic")


def _read(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 1:] + x[:, :1]).transpose(1, 2)


class _FrozenBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=_EPSILON) for _ in range(2))
        self.attn, self.mlp = Attention(width, heads), Layers(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def _head(width: int, kernel: int, norm: str) -> nn.Sequential:
    return nn.Sequential(
        _convolution(width, 1, norm),
        _Residual(_convolution(width, kernel, norm)),
        SpectralConv1d(width, 1, 1),
    )


def _convolution(width: int, kernel: int, norm: str) -> nn.Sequential:
    own = SpectralConv1d(width, width, kernel, padding=kernel // 2, padding_mode="circular")
    norms = _GroupedBatchNorm(width) if norm == "bn" else nn.GroupNorm(32, width, _EPSILON)
    return nn.Sequential(own, norms, nn.LeakyReLU(0.2))


class _Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.fn(x) + x) * 0.5**0.5


class _GroupedBatchNorm(nn.Module):
    """A batch norm of the statistics of eight images at a time, in evaluation mode too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = -(-len(x) // _GROUP)
        if len(x) % groups:
            raise UsageError(
                f"the heads of DINO take statistics of {_GROUP} images at a time, and {len(x)}"
                f" images do not divide into {groups} groups. What to do: give a multiple of"
                f" {_GROUP} images, or --set {_KEY}.norm_type=gn"
            )
        parts = x.unflatten(0, (groups, -1))
        mean = parts.mean((1, 3), keepdim=True)
        variance = (parts - mean).square().mean((1, 3), keepdim=True)
        x = ((parts - mean) / (variance + _EPSILON).sqrt()).flatten(0, 1)
        return x * self.weight[:, None] + self.bias[:, None]


def load_dino(dino: FrozenDino, path: str | Path) -> None:
    """Load the published weights of a DINO.

    Raises:
        UsageError: The file is not there.
        CheckpointError: It is damaged or holds something else.
    """
    what = f"DINO's backbone ({_KEY}.recipe says which)"
    try:
        weights: dict[str, Any] = dict(read_published(path, what))
    except UsageError as error:
        raise UsageError(
            f"{_KEY}.dino_ckpt_path: {error}, or --set {_KEY}.dino_ckpt_path=null for random"
            " weights"
        ) from error
    for name, value in weights.items():
        if name.endswith(".attn.qkv.bias"):  # a bias of keys changes no attention
            value[len(value) // 3 : 2 * len(value) // 3] = 0
    load_exactly(dino, weights, str(path), what)
