"""SigLIP's image encoder, under the names that it has in openpi's files.

It is that of transformers without its import, which takes longer than the rest of a server's start.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.openpi.config import Vision

_EPS = 1e-6


def embedding(count: int, width: int, std: float = 1.0) -> nn.Embedding:
    """Return an embedding with normal weights.

    On the meta device nothing is drawn: PyTorch would import its compiler for that.
    """
    weight = torch.empty(count, width)
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)
    return nn.Embedding(count, width, _weight=weight)


class _Embeddings(nn.Module):
    """Patches of an image as tokens, each with a trained vector of its place."""

    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        patch = sizes.patch_size
        self.patch_embedding = nn.Conv2d(3, sizes.width, patch, stride=patch)
        self.position_embedding = embedding(sizes.num_tokens, sizes.width, sizes.width**-0.5)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return tokens (N, tokens, width) of images (N, 3, height, width)."""
        patches = self.patch_embedding(pixels.to(self.patch_embedding.weight.dtype))
        return patches.flatten(2).transpose(1, 2) + self.position_embedding.weight


class _Attention(nn.Module):
    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.heads = sizes.heads
        for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
            setattr(self, name, nn.Linear(sizes.width, sizes.width))

    def forward(self, x: Tensor) -> Tensor:
        """Let all tokens (N, tokens, width) of an image attend to each other."""
        query, key, value = (
            self.get_submodule(name)(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        found = F.scaled_dot_product_attention(query, key, value)
        return self.get_submodule("out_proj")(found.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.fc1 = nn.Linear(sizes.width, sizes.mlp)
        self.fc2 = nn.Linear(sizes.mlp, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return values of the same shape."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class _Layer(nn.Module):
    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(sizes.width, eps=_EPS)
        self.self_attn = _Attention(sizes)
        self.layer_norm2 = nn.LayerNorm(sizes.width, eps=_EPS)
        self.mlp = _MLP(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """Return values of the same shape."""
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class _Encoder(nn.Module):
    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.depth))

    def forward(self, x: Tensor) -> Tensor:
        """Return values of the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


class Siglip(nn.Module):
    """The encoder: `embeddings`, `encoder` and `post_layernorm`, without a head."""

    def __init__(self, sizes: Vision) -> None:
        super().__init__()
        self.embeddings = _Embeddings(sizes)
        self.encoder = _Encoder(sizes)
        self.post_layernorm = nn.LayerNorm(sizes.width, eps=_EPS)
