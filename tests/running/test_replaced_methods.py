"""Methods that a derived class or an attribute has replaced, called by the code of a script."""

from typing import Any

import pytest
import torch
from torch import nn

import tpuport


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def roll(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.cat([x, self(x[-1:])])
        return x


class Derived(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2

    def roll(self, x: torch.Tensor) -> torch.Tensor:
        return super().roll(x) * 2


def results(calls: Any, device: str) -> list[torch.Tensor]:
    """Return the results of calls, and the gradient of the sum of their squares."""
    torch.manual_seed(0)
    net, x = Derived().to(device), torch.ones(2, 3, device=device)
    found = calls(net, x)
    sum(one.square().sum() for one in found).backward()
    weight = net.layer.weight.grad
    assert weight is not None
    return [one.detach().cpu() for one in (*found, weight)]


def of_base(net: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [net(x), Base.forward(net, x), super(Derived, net).forward(x)]


def with_loops_of_base(net: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [net.roll(x), Base.roll(net, x), super(Derived, net).roll(x)]


def kept(net: Any, x: torch.Tensor) -> list[torch.Tensor]:
    old, roll = net.forward, net.roll
    first = [old(x), net(x)]
    net.forward = lambda x: old(x) * 3
    net.roll = lambda x: roll(x) + 1
    return [*first, old(x), net(x), net.forward(x), net.roll(x), roll(x)]


@pytest.mark.parametrize("calls", [of_base, with_loops_of_base, kept])
def test_a_method_that_is_replaced_is_still_what_it_was(calls: Any) -> None:
    want = results(calls, "cpu")
    with tpuport.porting():
        have = results(calls, "cuda")
    for one, other in zip(want, have, strict=True):
        # The gradient adds up the rounding of up to ten calls.
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
