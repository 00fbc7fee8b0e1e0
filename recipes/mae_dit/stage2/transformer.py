"""Denoisers: DiT with the names of its published state dict, and diffusers' DiT."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from recipes.packages import needed

_FREQUENCIES = 256


class Transformer(nn.Module):
    """A diffusion transformer (Peebles & Xie 2022, arXiv:2212.09748) with adaptive norms.

    Args:
        input_size: Side of the latents.
        patch_size: Side of a patch of latents.
        in_channels: Channels of the latents.
        out_channels: Channels of the output.
        hidden_size: Width.
        depth: Blocks.
        num_heads: Heads of attention.
        num_classes: Classes; there is one embedding more, of no class.
        mlp_ratio: Width of a block's two layers, relative to `hidden_size`.
        time_scale: What times are multiplied by before they are embedded.
    """

    def __init__(
        self,
        input_size: int,
        patch_size: int,
        in_channels: int,
        out_channels: int,
        hidden_size: int,
        depth: int,
        num_heads: int,
        num_classes: int,
        mlp_ratio: float = 4.0,
        time_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.patch_size, self.out_channels = patch_size, out_channels
        self.x_embedder = Patches(in_channels, hidden_size, patch_size)
        self.t_embedder = _Times(hidden_size, time_scale)
        self.y_embedder = _Labels(num_classes, hidden_size)
        places = _positions(hidden_size, input_size // patch_size)
        self.pos_embed = nn.Parameter(places, requires_grad=False)
        self.blocks = nn.ModuleList(
            _Block(hidden_size, num_heads, int(hidden_size * mlp_ratio)) for _ in range(depth)
        )
        self.final_layer = _Final(hidden_size, patch_size**2 * out_channels)
        self._initialise()

    def _initialise(self) -> None:
        """Set initial weights: each block is the identity, and the output is zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.data.flatten(1))
        nn.init.zeros_(self.x_embedder.proj.bias)  # pyright: ignore[reportArgumentType]
        for part in (
            self.y_embedder.embedding_table,
            self.t_embedder.mlp[0],
            self.t_embedder.mlp[2],
        ):
            nn.init.normal_(part.weight, std=0.02)  # pyright: ignore[reportArgumentType]
        zeros = [self.final_layer.linear, self.final_layer.adaLN_modulation[1]]
        zeros += [block.adaLN_modulation[1] for block in self.blocks]  # pyright: ignore[reportIndexIssue]
        for one in zeros:
            nn.init.zeros_(one.weight)  # pyright: ignore[reportArgumentType]
            nn.init.zeros_(one.bias)  # pyright: ignore[reportArgumentType]

    def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the prediction for noisy latents (B, C, n, n) at times (B,)."""
        side, patch = x.shape[-1] // self.patch_size, self.patch_size
        x = self.x_embedder(x) + self.pos_embed
        condition = self.t_embedder(t) + self.y_embedder(labels)
        for block in self.blocks:
            x = block(x, condition)
        x = self.final_layer(x, condition)
        x = x.reshape(len(x), side, side, patch, patch, self.out_channels)
        return x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


class DiffusersTransformer(nn.Module):
    """diffusers' DiTTransformer2DModel, called as `Transformer` is. It drops no labels itself.

    Args:
        config: Arguments of the class.
        num_classes: Classes.
        out_channels: Channels of the output.
        time_scale: What times are multiplied by.
    """

    def __init__(
        self, config: dict[str, Any], num_classes: int, out_channels: int, time_scale: float = 1.0
    ) -> None:
        super().__init__()
        module = "diffusers.models.transformers.dit_transformer_2d"
        made = needed(module, "diffusers' DiT", "diffusers", "recipes").DiTTransformer2DModel
        given = {**config, "out_channels": out_channels, "num_embeds_ada_norm": num_classes}
        self.dit: Any = made(**given)
        self._time_scale = time_scale
        for part in self.dit.modules():
            # Each block draws its own labels to drop. Here they are dropped once, before all.
            if type(part).__name__ == "LabelEmbedding":
                part.dropout_prob = 0.0

    def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the prediction for noisy latents (B, C, n, n) at times (B,)."""
        return self.dit(x, timestep=t * self._time_scale, class_labels=labels).sample


class Patches(nn.Module):
    """A vector for each patch of images."""

    def __init__(self, channels: int, width: int, size: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the vectors (B, patches, width) of images (B, C, H, W)."""
        return self.proj(x).flatten(2).transpose(1, 2)


class _Times(nn.Module):
    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self._scale = scale
        self.mlp = nn.Sequential(nn.Linear(_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        half = _FREQUENCIES // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half) / half)
        angles = t[:, None].float() * self._scale * frequencies
        return self.mlp(torch.cat([angles.cos(), angles.sin()], 1))


class _Labels(nn.Module):
    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.embedding_table = nn.Embedding(classes + 1, width)

    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return self.embedding_table(labels)


class Attention(nn.Module):
    """Attention of tokens to each other, with the names of timm's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what tokens (B, N, width) take from each other."""
        parts = self.qkv(x).unflatten(2, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*parts.unbind(0))
        return self.proj(found.transpose(1, 2).flatten(2))


class Layers(nn.Module):
    """The two layers of a block, with the names of timm's."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return tokens (B, N, width), each changed by itself."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(width, heads), Layers(width, inner)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        parts = self.adaLN_modulation(condition)[:, None].chunk(6, 2)
        x = x + parts[2] * self.attn(_normed(x, parts[0], parts[1]))
        return x + parts[5] * self.mlp(_normed(x, parts[3], parts[4]))


class _Final(nn.Module):
    def __init__(self, width: int, values: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, values)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        return self.linear(_normed(x, *self.adaLN_modulation(condition)[:, None].chunk(2, 2)))


def _normed(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _positions(width: int, side: int) -> torch.Tensor:
    """Return sines and cosines of columns, then of rows, (1, side², width)."""
    frequencies = 1 / 10000 ** (torch.arange(width // 4, dtype=torch.float64) / (width / 4))
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    parts = []
    for place in (columns, rows):
        angles = torch.outer(place.flatten().double(), frequencies)
        parts += [angles.sin(), angles.cos()]
    return torch.cat(parts, 1).float()[None]
