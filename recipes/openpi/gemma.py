"""Gemma as π0 uses it: a norm that the time of the flow may scale, and keys that are handed on."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GemmaConfig
from transformers.models.gemma.modeling_gemma import (
    GemmaAttention,
    GemmaMLP,
    GemmaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from recipes.openpi.config import Transformer

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


class Layer(nn.Module):
    """A layer of Gemma that attends to its own tokens, and to those of `past` if there are some."""

    def __init__(self, config: GemmaConfig, index: int, *, adaptive: bool) -> None:
        super().__init__()
        self.self_attn = GemmaAttention(config, index)
        self.mlp = GemmaMLP(config)
        width: int = config.hidden_size
        self.input_layernorm = AdaptiveNorm(width, adaptive=adaptive)
        self.post_attention_layernorm = AdaptiveNorm(width, adaptive=adaptive)

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
        attention: Any = self.self_attn
        normed, gate = self.input_layernorm(x, condition)
        heads = (*normed.shape[:2], -1, attention.head_dim)
        query, key, value = (
            projection(normed).view(heads).transpose(1, 2)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        keys, values = key, value
        if past is not None:
            keys, values = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        found = F.scaled_dot_product_attention(
            query, keys, values, mask, scale=attention.scaling, enable_gqa=True
        )
        x = _added(x, attention.o_proj(found.transpose(1, 2).flatten(2)), gate)
        normed, gate = self.post_attention_layernorm(x, condition)
        return _added(x, self.mlp(normed), gate), (key, value)


class Gemma(nn.Module):
    """Layers of Gemma, with an embedding of tokens for the language model."""

    def __init__(self, sizes: Transformer, *, vocab_size: int | None, adaptive: bool) -> None:
        super().__init__()
        config = GemmaConfig(
            hidden_size=sizes.width,
            intermediate_size=sizes.mlp,
            num_hidden_layers=sizes.depth,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            hidden_act="gelu_pytorch_tanh",
            vocab_size=vocab_size or 1,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        )
        if vocab_size is not None:
            self.embed_tokens = nn.Embedding(vocab_size, sizes.width)
        self.layers = nn.ModuleList(
            Layer(config, index, adaptive=adaptive) for index in range(sizes.depth)
        )
        self.norm = AdaptiveNorm(sizes.width, adaptive=adaptive)
        self.rotary_emb = GemmaRotaryEmbedding(config)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        mask: Tensor,
        condition: Tensor | None = None,
        past: list[Keys] | None = None,
    ) -> tuple[Tensor, list[Keys]]:
        """Return the last layer's values before the norm, and each layer's keys and values."""
        rotary = self.rotary_emb(x, positions)
        kept: list[Keys] = []
        for index, layer in enumerate(self.layers):
            x, keys = layer(x, condition, rotary, mask, None if past is None else past[index])
            kept.append(keys)
        return x, kept
