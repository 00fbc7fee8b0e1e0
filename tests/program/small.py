"""A model small enough to compile in seconds, and what the tests of compiling share."""

import importlib.util
from typing import Any

import jax
import pytest
import torch

import tpuport
from tpuport.training import make_train_step

WIDTH = 128
BATCH = 16

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="waits for libtpu in the test environment"
)


class Block(torch.nn.Module):
    """Two layers with weights large enough to be spread."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, width)
        self.down = torch.nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Small(torch.nn.Module):
    """A block, a head, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = torch.nn.Linear(WIDTH, 8)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x) + self.shift)


def on_meta() -> Any:
    """The model ported without weights."""
    with torch.device("meta"):
        return tpuport.convert(Small())


def batch(size: int = BATCH) -> tuple[Any, ...]:
    """The shape of its argument."""
    return (jax.ShapeDtypeStruct((size, WIDTH), "float32"),)


def squared(out: Any) -> Any:
    """A loss."""
    return (out**2).mean()


def fits() -> Any:
    """A target of `tpuport compile` that fits."""
    with torch.device("meta"):
        return torch.nn.Linear(8, 8), (torch.empty(8, 8, device="meta"),)


def trained() -> Any:
    """A step of training."""
    ported = on_meta()
    step = make_train_step(ported, lambda model, x: squared(model(x)), ema_decay=0.9)
    return {"model": step, "inputs": batch()}


def does_not_fit() -> Any:
    """One whose batch is far too large."""
    with torch.device("meta"):
        model = Small()
    return {"model": model, "inputs": batch(1 << 30), "train": squared}


def says_nothing() -> Any:
    """No target at all."""
    return None
