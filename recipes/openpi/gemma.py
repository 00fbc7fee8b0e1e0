"""Gemma as π0 uses it: a norm that the time of the flow may scale, and keys that are handed on.

Other parts are those of transformers without its import, which takes longer than the rest of a
server's start.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.openpi.config import Transformer
from recipes.openpi.siglip import embedding

# Of the periods of rotary positions the longest, over 2 pi.
LONGEST = 10_000.0
Keys = tuple[Tensor, Tensor]  # keys and values of a layer, (B, heads, tokens, head dim) each


class AdaptiveNorm(nn.Module):
    """A norm by root mean square whose scale, shift and gate may come from a condition.

    Attributes:
        weight: Added to 1 as the scale, without a condition.
        dense: Linear layer from the condition to scale, shift and gate.
    """

    def __init__(self, width: int, *, adaptive: bool, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        if adaptive:
            self.dense = nn.Linear(width, 3 * width)
            nn.init.zeros_(self.dense.weight)
            nn.init.zeros_(self.dense.bias)
        else:
            self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the normalised values, and the gate of the residual branch if it is adaptive.

        Args:
            x: Values (B, tokens, width), whose dtype both results have.
            condition: Embedding of the time (B, width), None without one.
        """
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if condition is None:
            return (normed * (1 + self.weight.float())).to(x.dtype), None
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, dim=-1)
        return (normed * (1 + scale) + shift).to(x.dtype), gate.to(x.dtype)


def _added(x: Tensor, change: Tensor, gate: Tensor | None) -> Tensor:
    return x + change if gate is None else x + change * gate


def rotary_of(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (B, 1, tokens, head dim) of positions (B, tokens)."""
    rates = 1.0 / LONGEST ** (torch.arange(0, head_dim, 2).float() / head_dim)
    angles = (positions[..., None].float() * rates.to(positions.device)).repeat(1, 1, 2)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs of a head's first and second half by their angles."""
    first, second = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat([-second, first], dim=-1) * rotary[1]


class Attention(nn.Module):
    """The projections of a layer's attention."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        inner, shared = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, inner, bias=False)
        self.k_proj = nn.Linear(sizes.width, shared, bias=False)
        self.v_proj = nn.Linear(sizes.width, shared, bias=False)
        self.o_proj = nn.Linear(inner, sizes.width, bias=False)


class MLP(nn.Module):
    """The gated product of a layer."""

    def __init__(self, sizes: Transformer) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.mlp, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.mlp, bias=False)
        self.down_proj = nn.Linear(sizes.mlp, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return values of the same shape."""
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    """A layer of Gemma that attends to its own tokens, and to those of `past` if there are some."""

    def __init__(self, sizes: Transformer, *, adaptive: bool) -> None:
        super().__init__()
        self.self_attn = Attention(sizes)
        self.mlp = MLP(sizes)
        self.input_layernorm = AdaptiveNorm(sizes.width, adaptive=adaptive)
        self.post_attention_layernorm = AdaptiveNorm(sizes.width, adaptive=adaptive)

    def forward(
        self,
        x: Tensor,
        condition: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor,
        past: Keys | None = None,
    ) -> tuple[Tensor, Keys]:
        """Return the layer's values, and its own keys and values.

        Args:
            x: Values (B, tokens, width).
            condition: Embedding of the time for adaptive norms.
            rotary: Cosine and sine of the positions.
            mask: Who attends to whom, (B, 1, tokens or 1, past tokens + tokens).
            past: Keys and values of the tokens in front.
        """
        attention = self.self_attn
        normed, gate = self.input_layernorm(x, condition)
        heads = (*normed.shape[:2], -1, attention.head_dim)
        query, key, value = (
            projection(normed).view(heads).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = rotated(query, rotary), rotated(key, rotary)
        keys, values = key, value
        if past is not None:
            keys, values = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        found = F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
        x = _added(x, attention.o_proj(found.transpose(1, 2).flatten(2)), gate)
        normed, gate = self.post_attention_layernorm(x, condition)
        return _added(x, self.mlp(normed), gate), (key, value)


class Gemma(nn.Module):
    """Layers of Gemma, with an embedding of tokens for the language model."""

    def __init__(self, sizes: Transformer, *, vocab_size: int | None, adaptive: bool) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        if vocab_size is not None:
            self.embed_tokens = embedding(vocab_size, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes, adaptive=adaptive) for _ in range(sizes.depth))
        self.norm = AdaptiveNorm(sizes.width, adaptive=adaptive)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        condition: Tensor | None = None,
        past: list[Keys] | None = None,
    ) -> tuple[Tensor, list[Keys]]:
        """Return the last layer's values before the norm, and each layer's keys and values."""
        rotary = rotary_of(positions, self.head_dim, x.dtype)
        kept: list[Keys] = []
        for index, layer in enumerate(self.layers):
            x, keys = layer(x, condition, rotary, mask, None if past is None else past[index])
            kept.append(keys)
        return x, kept
