"""A `try` inside a repeated block: its values stay its own, and its error is eager PyTorch's."""

import copy

import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import normal


class _NoSuchRow(Exception):
    """What the block makes of an index that the table does not have."""


def _rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    try:
        return table.reshape(-1)[(rows * 16)[..., None] + torch.arange(16)]
    except IndexError as error:
        raise _NoSuchRow("no such row") from error


class _Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.reshape(2, -1, 16)
        found = _rows(self.table.weight, (x[..., 0] * 2).abs().long())
        return found.reshape(2, 16, 16, 16), (x - found.detach()).square().mean()


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Looks() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, losses = torch.zeros_like(x), []
        for layer in self.layers:
            found, loss = layer(x)
            x, out = x - found.detach(), out + found
            losses.append(loss)
        return out, torch.stack(losses)


def test_values_of_the_path_that_raises_do_not_leave_a_block():
    torch.manual_seed(0)
    model = _Stack()
    ported = tpuport.convert(copy.deepcopy(model))
    x = normal(2, 16, 16, 16)
    for factor in (1.0, 0.5):
        want, have = model(factor * x), tpuport.to_torch(ported(factor * x))
        torch.testing.assert_close(have, want)
    with pytest.raises(_NoSuchRow, match="no such row"):
        model(100 * x)
    with pytest.raises(_NoSuchRow, match="no such row"):
        ported(100 * x)
    ported.verify(x)  # gradients
