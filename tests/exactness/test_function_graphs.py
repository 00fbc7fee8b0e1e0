"""Custom functions that keep in their context what derivatives can be taken of."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError


class Again(torch.autograd.Function):
    """Keeps a leaf that forward made, and computes the graph again."""

    @staticmethod
    def forward(ctx: Any, net: nn.Module, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.net, ctx.x = net, x.detach().requires_grad_()
        ctx.save_for_backward(*weights)
        return net(ctx.x).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.enable_grad():
            out = ctx.net(ctx.x)
            found = torch.autograd.grad(out, [ctx.x, *ctx.saved_tensors], grads)
        return None, *found


class Kept(torch.autograd.Function):
    """Keeps the graph that forward made, as residual flows do."""

    @staticmethod
    def forward(ctx: Any, net: nn.Module, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.out = net(ctx.x)
        ctx.save_for_backward(*weights)
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        found = torch.autograd.grad(ctx.out, [ctx.x, *ctx.saved_tensors], grads)
        return None, *found


class Net(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(self.inner, x * 2, *self.inner.parameters())


def trained(function: Any, device: str) -> list[torch.Tensor]:
    """Return losses, gradients of the argument, and the weights after three steps."""
    net = Net(function).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found = []
    for seed in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)).to(device)
        x.requires_grad_()
        loss = net(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [loss.detach().cpu(), x.grad.cpu()]  # pyright: ignore[reportOptionalMemberAccess]
    return [*found, *(p.detach().cpu() for p in net.parameters())]


@pytest.mark.parametrize(("function", "by_parts"), [(Again, False), (Kept, True)])
def test_training_is_eagers(function: Any, by_parts: bool) -> None:
    with warnings.catch_warnings(record=True) as seen, tpuport.porting():
        warnings.simplefilter("always")
        found = trained(function, "cuda")
    # XLA sums in another order, in three steps.
    torch.testing.assert_close(found, trained(function, "cpu"), rtol=1e-5, atol=1e-6)
    refused = [str(w.message) for w in seen if w.category.__name__ == "PortWarning"]
    assert len(refused) == by_parts, refused


def test_a_graph_that_forward_keeps_is_refused_at_its_line() -> None:
    with pytest.raises(
        PortError, match=r"(?s)return ctx.out.detach\(\).*again in backward"
    ) as error:
        tpuport.convert(Net(Kept))(torch.ones(4, 3))
    assert "Kept.forward keeps a graph in its context" in str(error.value)
