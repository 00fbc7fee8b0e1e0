"""Sums that begin as a Python number and to which data decides whether to add a tensor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError


class Sums(nn.Module):
    """Losses over a loop of sixteen rounds, over rows and in one branch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)

    def rounds(self, x: torch.Tensor) -> torch.Tensor:
        total = 0
        for i in range(16):
            y = self.layer(x) + 0.1 * i
            if y.sum() > 3:
                total = total + y.square().sum()
        return total * 0.5 + x.mean()

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        total, count = 0, 0
        for row in x:
            y = self.layer(row)
            if y.sum() > 0.5:
                total += y.square().sum()
                count += 1
        return x - total / max(count, 1)

    def halves(self, x: torch.Tensor) -> torch.Tensor:
        total = 0.0
        for i in range(16):
            if x.sum() > i:
                total = total + x.to(torch.bfloat16).sum()
        return x * total

    def once(self, x: torch.Tensor) -> torch.Tensor:
        total, numbers = 0, torch.arange(3, device=x.device)
        if x.sum() > 0:
            total = x.sum()
        # Integers where nothing was added: each outcome goes on by itself.
        return total * numbers + x

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.rounds(x), self.rows(x), self.halves(x), self.once(x)]


class Loss(Sums):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rounds(x) + self.rows(x).square().sum()


def _inputs() -> list[torch.Tensor]:
    x = torch.linspace(-1, 2, 42).reshape(14, 3)
    return [x, x - 6, -x]


def test_they_are_as_in_eager_pytorch() -> None:
    ported = tpuport.convert(Sums(), verify=False)
    for x in _inputs():
        wanted, found = Sums()(x), [tpuport.to_torch(one) for one in ported(x)]
        rounds, rows, halves, once = (one.detach() for one in wanted)
        torch.testing.assert_close([found[0], found[1], found[3]], [rounds, rows, once])
        # Sixteen sums in bfloat16, of eight bits, in another order.
        torch.testing.assert_close(found[2], halves, rtol=2**-8, atol=0)


def test_their_gradients_are_as_in_eager_pytorch() -> None:
    def gradients(device: str) -> list[torch.Tensor | None]:
        net, found = Loss().to(device), []
        for x in _inputs():
            net.zero_grad()
            x = x.to(device).requires_grad_()
            net(x).sum().backward()
            assert x.grad is not None
            found += [x.grad.cpu(), *(p.grad for p in net.parameters())]
        return [None if one is None else one.cpu() for one in found]

    with tpuport.porting():
        found = gradients("cuda")
    # Thirty squares are summed up in another order.
    torch.testing.assert_close(found, gradients("cpu"), rtol=1e-5, atol=1e-5)


class DataDecidesTheDtype(nn.Module):
    def __init__(self, use: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = 0
        if x.sum() > 0:
            total = x.sum()
        return self.use(total)


USES = [
    lambda total: total * torch.arange(3),
    lambda total: torch.tensor(total),
    lambda total: torch.full((2,), total),
    lambda total: torch.as_tensor(total) + 1,
]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # torch's own
@pytest.mark.parametrize("use", USES)
def test_a_dtype_that_data_decides_is_refused(use: Callable[[Any], torch.Tensor]) -> None:
    with pytest.raises(PortError, match="differ in structure, shape, dtype"):
        tpuport.convert(DataDecidesTheDtype(use))(torch.ones(3))
