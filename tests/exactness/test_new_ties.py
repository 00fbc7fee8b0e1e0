"""Calls that make two names of the state one tensor: equal to eager on later calls, or refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError


class Pair(nn.Module):
    """Two layers and two plain attributes; `change` is what the forward pass does to them."""

    def __init__(self, change: Any, first: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.w = nn.Parameter(torch.ones(3))
        self.p, self.q = first, copy.copy(first)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.embed(x))
        if self.p is not None:
            y = y + self.p + 2 * self.q
        self.change(self, y.detach().mean(0))
        return y


def _weights(m: Any, y: torch.Tensor) -> None:
    m.head.weight = m.embed.weight


def _bias(m: Any, y: torch.Tensor) -> None:
    m.head.bias = m.w


def _both(m: Any, y: torch.Tensor) -> None:
    m.p = m.q = y


@pytest.mark.parametrize("change", [_weights, _bias, _both])
def test_new_ties_are_refused(change: Any) -> None:
    with pytest.raises(PortError, match="one tensor"):
        tpuport.convert(Pair(change, torch.zeros(3)))(torch.ones(2, 3))


def test_attributes_that_are_made_as_one_tensor_stay_one() -> None:
    eager = Pair(_both, None)
    ported = tpuport.convert(copy.deepcopy(eager))
    for seed in range(3):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(tpuport.to_torch(ported(x)), eager(x))
