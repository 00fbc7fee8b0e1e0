"""Branches on traced values between `torch.set_grad_enabled(False)` and `(True)`."""

from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError


class Scales(nn.Module):
    """Takes a factor without a gradient, by a branch that no rule can rewrite."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 1)

    def factor(self, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        try:
            if x.sum() > 0:
                return h.mean()
            return h.sum() + self.a.weight.sum()
        finally:
            self.last = "factor"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        torch.set_grad_enabled(False)
        factor = self.factor(h, x)
        torch.set_grad_enabled(True)
        return self.b(h) * factor


class Inline(Scales):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        torch.set_grad_enabled(False)
        factor = h.mean() if x.sum() > 0 else h.sum()
        torch.set_grad_enabled(True)
        return self.b(h) * factor


@pytest.mark.parametrize("kind", [Scales, Inline])
def test_what_comes_before_keeps_its_gradient(kind: type[nn.Module]):
    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        net, found = kind().to(device), []
        for sign in (1, -1):
            net.zero_grad()
            out = net(sign * torch.linspace(0.1, 1, 6, device=device).view(2, 3))
            out.sum().backward()
            found += [out.detach().cpu(), *(p.grad for p in net.parameters())]
            assert torch.is_grad_enabled()
        return found

    expected = run("cpu")
    with tpuport.porting() as block:
        torch.testing.assert_close([one.cpu() for one in run("cuda")], expected)
    assert [program.model for program in block.report.programs] == [kind.__name__]
    module, x = kind(), torch.ones(2, 3)
    assert tpuport.convert(module).verify(x).verified


def test_a_branch_that_leaves_another_mode_is_refused():
    class Leaves(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            torch.set_grad_enabled(bool(input.sum() > 0))
            return super().forward(input)

    with pytest.raises(PortError) as raised:
        tpuport.convert(Leaves(2, 2))(torch.ones(1, 2))
    assert raised.value.code == "TPU101"
    assert torch.is_grad_enabled()


class Chooses(nn.Module):
    """Keeps two tensors with graphs, of which a branch under no_grad leaves one."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.kept = [torch.ones(3), torch.ones(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.kept = [x * self.w, x + self.w]
        elif x.sum() > 0:
            self.kept.append(self.kept.pop(0))
        return x * 1


def test_a_branch_under_no_grad_between_tensors_with_graphs_is_refused():
    def run(device: str) -> Chooses:
        net, x = Chooses().to(device), torch.ones(3, device=device)
        net(x)
        with torch.no_grad():
            net(x)
        return net

    assert [one.requires_grad for one in run("cpu").kept] == [True, True]
    with tpuport.porting(), pytest.raises(PortError, match=r"under no_grad leaves in 'kept\["):
        run("cuda")
