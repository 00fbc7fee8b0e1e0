"""Results of ReLU that a script writes to before the backward pass, which needs their signs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport import PortError


class Positive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x).relu()


class Squared(Positive):
    """Its backward pass needs the values, too."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.line(x).relu()
        return y, y * y


def gradient(kind: type[Positive], write: Callable[[torch.Tensor], Any], device: str) -> Any:
    torch.manual_seed(0)
    net = kind().to(device)
    out = net(torch.linspace(-1, 1, 6, device=device).view(2, 3))
    first, rest = (out[0], out[1:]) if isinstance(out, tuple) else (out, ())
    write(first.data)
    (first.square().sum() + sum(one.sum() for one in rest)).backward()
    return net.line.weight.grad, first.detach()


def test_a_scale_keeps_the_signs():
    for write in (lambda y: y.mul_(0.5), lambda y: y.add_(y), lambda y: y.clamp_(max=0.25)):
        expected = gradient(Positive, write, "cpu")
        with tpuport.porting() as block:
            found = gradient(Positive, write, "cuda")
        torch.testing.assert_close([one.cpu() for one in found], list(expected))
        assert [program.model for program in block.report.programs] == ["Positive"]


@pytest.mark.parametrize(
    ("kind", "write"), [(Positive, lambda y: y.add_(1)), (Squared, lambda y: y.mul_(0.5))]
)
def test_other_writes_are_refused(kind: type[Positive], write: Any):
    with tpuport.porting(), pytest.raises(PortError, match=r"was written to, by \.data"):
        gradient(kind, write, "cuda")
