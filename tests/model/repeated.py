"""Models of repeated blocks, and what their programs are made of."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

import tpuport

DIM = 8


class Block(nn.Module):
    def __init__(self, index: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks one after another."""

    def __init__(self, make: Callable[[int], nn.Module], depth: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([make(i) for i in range(depth)])
        self.head = nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for block in self.blocks:
            x = block(x, *rest)
        return self.head(x)


class Beside(Block):
    """It returns something beside the hidden state, too."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), torch.sin(self.up(x))


class KeepsBeside(Stack):
    """Of the last block, only what it returns beside the hidden state is read."""

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        beside = []
        for block in self.blocks:
            x, made = block(x, *rest)
            beside.append(made)
        return torch.stack(beside)


class LastBeside(Stack):
    """What blocks return beside the hidden state is read of the last one alone."""

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        made = x
        for block in self.blocks:
            x, made = block(x, *rest)
        return x, made


def x_of(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 4 * DIM).reshape(2, 4, DIM)


def jaxpr_of(ported: Any, *args: Any, params: Any = None) -> Any:
    """The program of a call under a trace of the user's own."""

    def loss(params: Any) -> Any:
        out = ported.apply(params, ported.buffers, jax.random.key(0), *args)[0]
        return jax.tree.reduce(jnp.add, jax.tree.map(lambda leaf: (leaf**2).sum(), out))

    return jax.make_jaxpr(loss)(ported.params if params is None else params)


def loops(jaxpr: Any) -> list[int]:
    """How often each loop of a program runs."""
    return [e.params["length"] for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]


def check(model: nn.Module, *args: Any) -> tuple[Any, list[int]]:
    """Port with loops, compare with eager (verify does: outputs, state, gradients), and give the
    port and the loops in it.
    """
    ported = tpuport.convert(model, blocks="scan")
    ported(*args)
    ported.verify(*args)
    return ported, loops(jaxpr_of(ported, *args))


def records(ported: Any) -> list[Any]:
    (compiled, *_) = ported._cache.values()
    return list(compiled.outcome.trace.blocks.records.values())


def port(model: nn.Module) -> Any:
    """Port with loops, without the comparison at the first call; compare the outputs.

    Returns:
        What became of the model's blocks.
    """
    ported = tpuport.convert(model, blocks="scan", verify=False)
    got = tpuport.to_torch(ported(x_of()))
    torch.testing.assert_close(got, model(x_of()).detach(), rtol=1e-4, atol=1e-4)
    (record,) = records(ported)
    return record
