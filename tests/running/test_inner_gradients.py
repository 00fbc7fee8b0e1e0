"""Modules under porting() whose forward takes gradients of their own parameters."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport.compat.emulated.inner_outputs import graph_reaches
from tpuport.compat.emulated.programs import PortWarning


class Adapting(nn.Module):
    """Takes one step on a loss of its own before it answers, as meta-learning does."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.rate = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.net(x) - x.detach()).pow(2).mean()
        parameters = tuple(self.net.parameters())
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        steps = zip(parameters, gradients, strict=True)
        weight, bias = (p - self.rate * gradient for p, gradient in steps)
        return nn.functional.linear(x, weight, bias)


def outcome(device: str, how: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net, x = Adapting().to(device), torch.linspace(-1, 1, 12).view(3, 4).to(device)
    found = []
    for _ in range(2):
        if how == "given":
            weights = {name: value * 1.1 for name, value in net.named_parameters()}
            out = torch.func.functional_call(net, weights, (x,))
        elif how == "twice":
            return [net(net(x)).detach().cpu()]
        else:
            out = net(net(x).detach())
        out.square().sum().backward()
        found += [out.detach().cpu(), *(p.grad.cpu().clone() for p in net.parameters())]
    return found


@pytest.mark.parametrize("how", ["given", "twice", "detached"])
def test_a_gradient_inside_is_eagers(how: str):
    """Through an argument that is computed from the same weights it flows on, out of the call."""
    with warnings.catch_warnings(record=True) as seen, tpuport.porting():
        warnings.simplefilter("always")
        ours = outcome("cuda", how)
    torch.testing.assert_close(ours, outcome("cpu", how), rtol=1e-4, atol=1e-5)
    messages = [str(one.message) for one in seen if issubclass(one.category, PortWarning)]
    assert len(messages) == (how == "twice")
    for message in messages:
        assert f"{__file__}:25: TPU403 a gradient of 'net." in message
        assert "x.detach()" in message


def test_the_graph_is_followed_to_leaves_and_to_what_was_made():
    leaf, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    made = leaf * 2
    cases: list[tuple[Any, Any, Any]] = [
        ([made.exp()], [other, leaf], leaf),
        ([made.exp()], [made], made),
        ([other.exp()], [leaf, made], None),
        ([made.detach()], [leaf], None),
    ]
    for tensors, ends, expected in cases:
        assert graph_reaches(tensors, ends) is expected
