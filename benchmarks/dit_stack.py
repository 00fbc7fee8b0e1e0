"""A stack of diffusion-transformer blocks, as a PyTorch module and as hand-written JAX.

Shapes: x [B, N, width] are tokens, condition [B, width] is the time embedding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Attention and an MLP, both shifted, scaled and gated by the condition (adaLN-zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Map [B, N, width] to [B, N, width]."""
        steps = self.modulation(F.silu(condition))[:, None].chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = steps
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.proj(h)
        h = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.down(F.gelu(self.up(h)))


class DiTStack(nn.Module):
    """`layers` blocks one after the other."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Map [B, N, width] to [B, N, width]."""
        for block in self.blocks:
            x = block(x, condition)
        return x


def hand_written(model: DiTStack) -> tuple[Any, Any]:
    """Return the same function in JAX, written as one would who starts from JAX.

    Returns:
        Its parameters, a list with a dict for each block, matrices as [in, out]; and `f(params, x,
        condition)`.
    """
    import jax
    import jax.numpy as jnp

    heads = model.blocks[0].heads
    params = [
        {
            name: {
                "kernel": jnp.array(layer.weight.detach().numpy().T),
                "bias": jnp.array(layer.bias.detach().numpy()),
            }
            for name, layer in block.named_children()
            if isinstance(layer, nn.Linear)
        }
        for block in model.blocks
    ]

    def dense(layer: Any, x: jax.Array) -> jax.Array:
        return x @ layer["kernel"] + layer["bias"]

    def norm(x: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)

    def block(layers: Any, x: jax.Array, condition: jax.Array) -> jax.Array:
        steps = dense(layers["modulation"], jax.nn.silu(condition))[:, None]
        shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(steps, 6, axis=-1)
        h = norm(x) * (1 + scale1) + shift1
        qkv = dense(layers["qkv"], h)
        q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:2], 3, heads, -1), 2, 0)
        scores = jnp.einsum("bnhd,bmhd->bhnm", q, k) / q.shape[-1] ** 0.5
        h = jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(scores, axis=-1), v)
        x = x + gate1 * dense(layers["proj"], h.reshape(x.shape))
        h = norm(x) * (1 + scale2) + shift2
        h = jax.nn.gelu(dense(layers["up"], h), approximate=False)
        return x + gate2 * dense(layers["down"], h)

    def stack(params: Any, x: jax.Array, condition: jax.Array) -> jax.Array:
        for layers in params:
            x = block(layers, x, condition)
        return x

    return params, stack
