"""Random modules on meshes of eight virtual CPU devices, by presets and by random rules.

Modules are stacks of attention, experts, convolutions, pooling, recurrent layers, norms and
operations on tokens; rules shard any dim of parameters, inputs and activations. Values of three
calls, random numbers, buffers and gradients are compared with those of the port on one device.
Prints what differs: `python -m benchmarks.sharded_modules --count 100`.
"""

import copy
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.nn import functional as F

import tpuport
from benchmarks.seeds import Found, run_seeds
from tpuport.foundation.errors import PortError
from tpuport.sharding import Activations, ShardingRules, make_mesh

AXES = ("data", "fsdp", "tensor", "sequence", "expert")
PRESETS = (
    *("replicated", "ddp", "fsdp", "tensor_parallel", "fsdp_tensor_parallel"),
    *("sequence_parallel", "expert_parallel"),
)
SIZES = ((8,), (2, 4), (4, 2), (2, 2, 2))
# Of the largest element: gradients that are zero but for rounding are measured by the others.
_VALUE, _GRADIENT, _SMALL = 2e-4, 5e-3, 1e-4


class Attention(nn.Module):
    """Causal attention, with the projections that presets know."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to the same."""
        heads = [
            layer(x).unflatten(-1, (2, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        ]
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.o_proj(out.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated MLP with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj, self.gate_proj = nn.Linear(width, 24), nn.Linear(width, 24)
        self.down_proj, self.dropout = nn.Linear(24, width), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to the same."""
        return x + self.dropout(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Experts(nn.Module):
    """Two of four experts for each token, and a mean of how often each is taken."""

    load: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.first = nn.Parameter(torch.randn(4, width, width) * 0.2)
        self.second = nn.Parameter(torch.randn(4, width, width) * 0.2)
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to the same."""
        chances = self.router(x).softmax(-1)
        weights, chosen = chances.topk(2, -1)
        taken = torch.zeros_like(chances).scatter(-1, chosen, weights)
        if self.training:
            self.load.mul_(0.9).add_(taken.detach().sum((0, 1)), alpha=0.1)
        hidden = torch.einsum("bsd,edk->bsek", x, self.first).relu()
        return x + torch.einsum("bsek,ekd,bse->bsd", hidden, self.second, taken)


class Windows(nn.Module):
    """A convolution over tokens, a norm and, for some, a pooling."""

    def __init__(self, width: int, chosen: random.Random) -> None:
        super().__init__()
        groups, size = chosen.choice((1, 1, 2, width)), chosen.choice((1, 3, 5))
        self.layer = nn.Conv1d(width, width, size, padding=size // 2, groups=groups)
        self.norm = chosen.choice((nn.BatchNorm1d(width), nn.GroupNorm(2, width)))
        self.pool = chosen.choice((nn.Identity(), nn.MaxPool1d(3, 1, 1), nn.AvgPool1d(3, 1, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to the same."""
        return x + self.pool(self.norm(self.layer(x.transpose(1, 2)))).transpose(1, 2)


class Recurrent(nn.Module):
    """A recurrent layer over tokens."""

    def __init__(self, width: int, chosen: random.Random) -> None:
        super().__init__()
        self.layer = chosen.choice((nn.GRU, nn.LSTM))(width, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to the same."""
        return x + self.layer(x)[0]


def _shifted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + F.pad(y, (0, 0, 1, 0))[:, :-1]


def _written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[:, ::2] = y[:, ::2]
    out[0] *= 2
    return out


def _looped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for _ in range(20):
        x = torch.tanh(x + 0.3 * y)
    return x


def _branched(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.mean() > 0:
        return x + y
    return x - 2 * y


# What a layer does with its input and a projection of it.
OPERATIONS = {
    "cumsum": lambda x, y: x + torch.cumsum(y, 1) / x.shape[1],
    "shuffled": lambda x, y: x + y[:, torch.randperm(x.shape[1], device=x.device)],
    "turned": lambda x, y: torch.cat([x[:, 1:], y[:, :1]], 1),
    "noisy": lambda x, y: x + y * torch.rand_like(x[..., :1]) + torch.randn_like(x) * y,
    "sorted": lambda x, y: x + y.sort(1)[0],
    "gathered": lambda x, y: x + y.gather(1, x.argsort(1)),
    "rolled": lambda x, y: x + torch.roll(y, 1, 1),
    "every other": lambda x, y: torch.stack([-y[..., 1::2], y[..., ::2]], -1).flatten(-2) + x,
    "transformed": lambda x, y: x + torch.fft.irfft(torch.fft.rfft(y, dim=-1) * 0.5, n=x.shape[-1]),
    "shifted": _shifted,
    "written": _written,
    "looped": _looped,
    "branched": _branched,
}


class Operation(nn.Module):
    """One operation on tokens and a projection of them."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__()
        self.norm, self.layer = nn.RMSNorm(width), nn.Linear(width, width)
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, D) to the same."""
        return OPERATIONS[self.name](x, self.layer(self.norm(x)))


class Net(nn.Module):
    """An embedding, some layers and a head, which may share its weight with the embedding."""

    def __init__(self, chosen: random.Random) -> None:
        super().__init__()
        width, self.tokens = chosen.choice((8, 12, 16)), chosen.choice((16, 23, 24))
        self.embed = nn.Embedding(self.tokens, width)
        self.layers = nn.ModuleList(_layer(width, chosen) for _ in range(chosen.randint(1, 4)))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, self.tokens, bias=False)
        if chosen.random() < 0.4:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, S) and (B,) to (B, S, tokens) and (B,)."""
        x = self.embed(ids) * scale[:, None, None]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x)), x.mean((1, 2))


def _layer(width: int, chosen: random.Random) -> nn.Module:
    kind = chosen.randrange(7)
    if kind < 3:
        return (Attention, Gated, Experts)[kind](width)
    if kind < 5:
        return (Windows, Recurrent)[kind - 3](width, chosen)
    return Operation(width, chosen.choice(list(OPERATIONS)))


def _spec(chosen: random.Random, ndim: int, axes: list[str]) -> P:
    left, parts = chosen.sample(axes, len(axes)), []
    for _ in range(ndim):
        count = chosen.choice((0, 0, 1, 1, 2))
        taken = [left.pop() for _ in range(min(count, len(left)))]
        parts.append(tuple(taken) or None)
    return P(*parts)


def rules_of(net: Net, chosen: random.Random, axes: list[str]) -> Any:
    """Return a preset's name, or rules at random, for a module on a mesh with these axes."""
    if chosen.random() < 0.4:
        return chosen.choice(PRESETS)
    state = [*net.named_parameters(), *net.named_buffers()]
    table = {n: _spec(chosen, t.ndim, axes) for n, t in state if chosen.random() < 0.7}
    inputs = {"ids": _spec(chosen, 2, axes), "scale": _spec(chosen, 1, axes)}
    names = [f"layers.{i}" for i in range(len(net.layers)) if chosen.random() < 0.5]
    activations = Activations({name: _spec(chosen, 3, axes) for name in names})
    return ShardingRules(table, inputs=inputs if chosen.random() < 0.6 else {}) + ShardingRules(
        {}, activations=activations
    )


def _seen(ported: tpuport.PortedModel, data: list[tuple[torch.Tensor, ...]]) -> dict[str, Any]:
    """Return what three calls and the gradients of the first one give."""
    seen: dict[str, Any] = {}
    for number, arguments in enumerate(data):
        torch.manual_seed(number)
        outs = ported(*arguments)
        seen |= {f"output {i} of call {number}": out.detach() for i, out in enumerate(outs)}
        seen[f"number after call {number}"] = torch.rand(1)
    seen |= {f"buffer {name}": value for name, value in ported.buffers.items()}

    def loss(params: dict[str, jax.Array], *arguments: jax.Array) -> jax.Array:
        (scores, mean), _ = ported.apply(params, ported.buffers, jax.random.key(7), *arguments)
        return (scores**2).mean() + mean.sum()

    arrays = [jnp.asarray(argument.numpy()) for argument in data[0]]
    seen["loss"], gradients = jax.jit(jax.value_and_grad(loss))(ported.params, *arrays)
    return seen | {f"gradient of {name}": value for name, value in gradients.items()}


def _difference(want: dict[str, Any], have: dict[str, Any]) -> str:
    arrays = {name: np.asarray(value, np.float64) for name, value in want.items()}
    gradients = [abs(v).max() for name, v in arrays.items() if name.startswith("gradient")]
    for name, expected in arrays.items():
        is_gradient = name.startswith("gradient")
        least = _SMALL * max(gradients) if is_gradient else 1e-6
        apart = abs(np.asarray(have[name], np.float64) - expected).max() / (
            abs(expected).max() + least
        )
        if not apart <= (_GRADIENT if is_gradient else _VALUE):
            return f"{name} by {apart:.2g}"
    return ""


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    del folder
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    net = Net(chosen).train(chosen.random() < 0.7)
    batch, length = chosen.choice((8, 4, 6)), chosen.choice((8, 16, 5))
    sizes = chosen.choice(SIZES)
    mesh: dict[str, int] = dict(zip(chosen.sample(AXES, len(sizes)), sizes, strict=True))
    rules = rules_of(net, chosen, list(mesh))
    data = [
        (torch.randint(0, net.tokens, (batch, length)), torch.rand(batch) + 0.5) for _ in range(3)
    ]
    shown = f"{net}\n{batch} x {length}, mesh {mesh}, rules {rules}"
    alone = tpuport.convert(copy.deepcopy(net), verify=False)
    spread = tpuport.convert(copy.deepcopy(net), verify=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tpuport.shard(spread, make_mesh(mesh), rules)
            found = _difference(_seen(alone, data), _seen(spread, data))
        except PortError as error:
            yield Found("refused", str(error).partition("\n")[0], shown)
            return
    yield Found("differs" if found else "passes", found, shown)
    jax.clear_caches()


if __name__ == "__main__":
    # XLA reads it when the first array is made.
    flag = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    run_seeds(__doc__, _judged)
