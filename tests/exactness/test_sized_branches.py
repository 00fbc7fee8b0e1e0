"""Branches on traced values that give tensors whose size depends on data."""

from typing import Any

import jax
import pytest
import torch

import tpuport


def written(x: torch.Tensor) -> Any:
    rows = x[x > 0]
    kept = rows if x[0] > 0 else rows[rows > 1]
    kept[0] = 5.0
    return kept, rows


def wide(x: torch.Tensor) -> Any:
    places = torch.where(x > 0)[0] + 2**40
    kept = places * 3 if x[0] > 0 else places[:2]
    return kept, kept + 1


def repeated(x: torch.Tensor) -> Any:
    rows = x[x > 0]
    for _ in range(3):
        if rows.sum() > 2.0:
            rows = rows[rows < rows.max()]
    return rows, rows.numel()


def whole_or_part(x: torch.Tensor) -> Any:
    rows = x * 2 if x[0] > 0 else x[x > 0]
    return rows, rows.sum()


def steep(x: torch.Tensor) -> torch.Tensor:
    """Give rows whose padding has no finite derivative."""
    rows = x[x > 0.5]
    made = rows.log() if x[0] > 0 else (rows[rows > 1] - 1).sqrt() * 2
    return (made * made).sum() + made.max()


@pytest.mark.parametrize("function", [written, wide, repeated, whole_or_part])
def test_equals_eager(function: Any) -> None:
    ported = tpuport.convert(function)
    for seed in range(3):
        x = torch.randn(7, generator=torch.Generator().manual_seed(seed)) * 2
        x[0] = x[0].abs() * (1 if seed % 2 else -1)
        x[3], x[4] = 3.0, 2.5
        torch.testing.assert_close(tpuport.to_torch(ported(x.clone())), function(x.clone()))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_padding_adds_no_gradient(sign: float) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return steep(self.scale * x)

    module, x = Scaled(), torch.tensor([sign, 0.2, 3.0, -2.0, 1.5, 0.6])
    module(x).backward()
    ported = tpuport.convert(module)

    def loss(params: Any) -> Any:
        return ported.apply(params, ported.buffers, jax.random.key(0), x)[0]

    found = tpuport.to_torch(jax.jit(jax.grad(loss))(ported.params))["scale"]
    torch.testing.assert_close(found, module.scale.grad)
