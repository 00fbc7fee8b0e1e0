"""A language model of one block with tied weights, and a port of it to plain JAX.

`fault` puts one mistake into the port, of the kinds that people and agents make.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, WORDS, LENGTH = 16, 2, 11, 6


class SmallGPT(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 32)
        self.fc2 = nn.Linear(32, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.drop(self.proj(self.attention(self.norm1(x))))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(x)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        out = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        return out.transpose(1, 2).reshape(b, n, -1)


def make(dropout: float = 0.0) -> SmallGPT:
    torch.manual_seed(0)
    model = SmallGPT(dropout)
    return model.train() if dropout else model.eval()


def tokens() -> torch.Tensor:
    return torch.randint(0, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def loss(logits: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), given[:, 1:].flatten())


def params(model: SmallGPT, fault: str = "") -> dict[str, Any]:
    def dense(layer: nn.Linear) -> dict[str, Any]:
        kernel = layer.weight.detach().numpy()
        return {"kernel": kernel.T.copy(), "bias": layer.bias.detach().numpy()}

    def norm(layer: nn.LayerNorm) -> dict[str, Any]:
        return {"scale": layer.weight.detach().numpy(), "bias": layer.bias.detach().numpy()}

    made: dict[str, Any] = {
        "wte": model.embed.weight.detach().numpy(),
        "attn": {
            "qkv": {
                name: {"kernel": w.T.copy(), "bias": b}
                for name, w, b in zip(
                    "qkv",
                    np.split(model.qkv.weight.detach().numpy(), 3),
                    np.split(model.qkv.bias.detach().numpy(), 3),
                    strict=True,
                )
            },
            "proj": dense(model.proj),
        },
        "ln_1": norm(model.norm1),
        "ln_2": norm(model.norm2),
        "mlp": {"up": dense(model.fc1), "down": dense(model.fc2)},
    }
    if fault == "transposed kernel":
        made["attn"]["proj"]["kernel"] = model.proj.weight.detach().numpy()
    if fault == "untied":
        made["head"] = model.embed.weight.detach().numpy().copy()
    return made


def port(fault: str = "") -> Any:
    """Return the port as a function of weights, tokens and a key for dropout."""

    def norm(p: Any, x: Any) -> Any:
        eps = 1e-6 if fault == "epsilon" else 1e-5
        if fault == "bf16 norm":
            x = x.astype(jnp.bfloat16)
        mean = x.mean(-1, keepdims=True)
        var = ((x - mean) ** 2).mean(-1, keepdims=True)
        return ((x - mean) * jax.lax.rsqrt(var + eps)).astype(jnp.float32) * p["scale"] + p["bias"]

    def dense(p: Any, x: Any) -> Any:
        return x @ p["kernel"] + p["bias"]

    def attention(p: Any, x: Any) -> Any:
        b, n, _ = x.shape
        q, k, v = (dense(p["qkv"][name], x).reshape(b, n, HEADS, -1) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q / math.sqrt(WIDTH // HEADS), k)
        seen = jnp.tril(jnp.ones((n, n), bool), 1 if fault == "mask" else 0)
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, -1)
        return dense(p["proj"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, n, -1))

    def drop(x: Any, key: Any) -> Any:
        if key is None:
            return x
        keep = jax.random.bernoulli(key, 0.75, x.shape)
        return jnp.where(keep, x if fault == "dropout scale" else x / 0.75, 0.0)

    def forward(p: Any, tokens: Any, key: Any = None) -> Any:
        x = p["wte"][tokens]
        x = x + drop(attention(p["attn"], norm(p["ln_1"], x)), key)
        h = jax.nn.gelu(dense(p["mlp"]["up"], norm(p["ln_2"], x)), approximate=fault == "gelu")
        x = x + dense(p["mlp"]["down"], h)
        return x @ p.get("head", p["wte"]).T

    return forward


def port_loss(fault: str = "") -> Any:
    def loss(logits: Any, given: Any, **_: Any) -> Any:
        each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], given[:, 1:])
        return each.sum(-1).mean() if fault == "reduction" else each.mean()

    return loss


def training(fault: str = "") -> dict[str, Any]:
    """Return AdamW and an average of the weights for both sides."""
    decay = 0.01 if fault == "decay" else 0.1
    tx = optax.adamw(1e-2, weight_decay=decay)
    value = port_loss()

    def average(mean: nn.Module, model: nn.Module) -> None:
        for a, b in zip(mean.parameters(), model.parameters(), strict=True):
            a.lerp_(b, 0.1)

    def mix(mean: Any, params: Any) -> Any:
        return jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, mean, params)

    def early(params: Any, state: Any, mean: Any, given: Any) -> Any:
        now, grads = jax.value_and_grad(lambda p: value(port()(p, given), given))(params)
        mean = mix(mean, params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, mean, now

    return {
        "optimizers": (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1), tx),
        "steps": 3,
        "ema": (average, mix),
        "train_steps": (None, early if fault == "average" else None),
    }
