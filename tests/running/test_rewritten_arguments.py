"""Writes past torch's version counter, between a ported call and its backward pass."""

from collections.abc import Callable

import pytest
import torch

import tpuport
from tpuport.foundation.errors import PortError


class Saves(torch.nn.Module):
    """Eager PyTorch keeps the input for the gradient of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class KeepsNothing(Saves):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear.bias


def by_data(x: torch.Tensor) -> None:
    x.data.masked_fill_(x.data < 0, 0.0)


def step(module: torch.nn.Module, change: Callable[[torch.Tensor], None]) -> torch.Tensor:
    x = torch.randn(3, 4, device="cuda")
    y = module(x)
    change(x)
    (y * x).sum().backward()
    return x


def test_a_write_to_what_eager_keeps_is_refused_in_each_step():
    torch.manual_seed(0)
    with tpuport.porting():
        module = Saves().cuda()
        for _ in range(2):
            with pytest.raises(PortError, match="was written to by") as raised:
                step(module, by_data)
            assert "TPU406 args[0] of a call of Saves was written to by .data" in str(raised.value)
            assert "tpuport run --eager Saves" in str(raised.value)
        step(module, lambda x: None)


@pytest.mark.parametrize("length", [3, 5])
def test_a_write_to_what_eager_does_not_keep_and_values_written_back_are_no_matter(length: int):
    def and_back(x: torch.Tensor) -> None:
        before = x.clone()
        by_data(x)
        x.data.copy_(before)

    with tpuport.porting():
        step(KeepsNothing().cuda(), by_data)
        module = Saves().cuda()
        for rows in (2, length, 4):
            module(torch.randn(rows, 4, device="cuda")).sum().backward()
        step(module, and_back)


def test_the_remedy_gives_eagers_gradient():
    found = []
    for eager in ([], ["Saves", "Linear"]):
        torch.manual_seed(0)
        if not eager:
            module = Saves()
            x = torch.randn(3, 4)
            y = module(x)
            by_data(x)
            (y * x).sum().backward()
        else:
            with tpuport.porting(eager=eager):
                module = Saves().cuda()
                step(module, by_data)
        found.append(module.linear.weight.grad)
    assert torch.equal(*(one.cpu() for one in found))
