"""Programs made of pieces, each with a layer that eager PyTorch's autograd reaches or does not."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 3


class Second(torch.autograd.Function):
    """A product whose backward has a gradient for the second argument alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        assert ctx.needs_input_grad[:2] == (x.requires_grad, y.requires_grad)
        ctx.save_for_backward(x)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad * ctx.saved_tensors[0]


def _no_grad(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        z = f(x)
    return y * z


def _view_made_under_no_grad(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = f(x)
    with torch.no_grad():
        z = z.reshape(-1)
    return y * z.reshape(y.shape)


def _branch(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        y = y + f(x)
    return y


def _detached_in_a_branch(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        z = f(x).detach()
    else:
        z = f(x) * 2
    return y + z


def _nested(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        if x.max() > 2:
            y = y * f(x)
        else:
            y = y * 0.5
    return y


def _recomputed(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return checkpoint(_branch, f, x, y, use_reentrant=False)  # type: ignore[return-value]


def _written_over(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = f(x)
    z[:, 1:] = 0
    return y + z


def _asks(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y + (f(x) if x.requires_grad or not f(x).requires_grad else f(x).detach())


def _loop(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for row in range(2):
        if x[0, row] > 0:
            y = y + f(x)
    return y


# What a piece does with a layer, the input and what the pieces before it gave.
PIECES: list[Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda f, x, y: y + f(x),
    lambda f, x, y: y,
    lambda f, x, y: y + 0 * f(x),
    lambda f, x, y: y * f(x).detach(),
    lambda f, x, y: y + (f(x) > 0).float(),
    lambda f, x, y: y + F.linear(x, f.weight),
    lambda f, x, y: torch.where(x.sum() > 0, y, f(x)),
    lambda f, x, y: y + Second.apply(f(x), x),  # type: ignore[operator]
    lambda f, x, y: y + Second.apply(x, f(x)),  # type: ignore[operator]
    lambda f, x, y: y + f(x).round(),
    lambda f, x, y: y + f(x) ** 0,
    lambda f, x, y: y + f(x).fill_(2.0),
    _no_grad,
    _view_made_under_no_grad,
    _branch,
    _detached_in_a_branch,
    _nested,
    _recomputed,
    _written_over,
    _asks,
    _loop,
]


class Program(torch.nn.Module):
    """Some pieces in some order, one layer each; a layer may be frozen."""

    def __init__(self, seed: int, count: int = 8) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.chosen = draw.sample(range(len(PIECES)), count)
        self.layers = torch.nn.ModuleDict(
            {f"piece{i}": torch.nn.Linear(WIDTH, WIDTH) for i in self.chosen}
        )
        self.start = torch.nn.Linear(WIDTH, WIDTH)
        self.layers[f"piece{draw.choice(self.chosen)}"].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.start(x)
        for i in self.chosen:
            y = PIECES[i](self.layers[f"piece{i}"], x, y)
        return y


def program(seed: int) -> Program:
    """The program of a seed, with weights of that seed."""
    torch.manual_seed(seed)
    return Program(seed)


def batches() -> list[torch.Tensor]:
    """Batches whose halves take different branches."""
    up, far, down = torch.rand(2, WIDTH), 3 + torch.rand(2, WIDTH), -torch.rand(2, WIDTH)
    return [torch.cat(pair) for pair in ((up, up), (down, down), (down, far), (down, down))]
