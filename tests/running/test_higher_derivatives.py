"""Derivatives of any order through ported calls, as losses of differential equations take them."""

import jax
import pytest
import torch
from torch import nn

import tpuport

ORDER = 3


class Solution(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(2, 8), nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, t):
        self.calls += 1
        return self.outer(torch.tanh(self.inner(torch.cat([x, t], 1))))


def slope(y, x):
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)[0]


def points(device):
    x = torch.linspace(-1, 1, 6, device=device).view(-1, 1).requires_grad_()
    return x, torch.linspace(0, 1, 6, device=device).view(-1, 1).requires_grad_()


def residual(net, x, t):
    u = net(x, t)
    u_x = slope(u, x)
    higher = [u_x]
    for _ in range(ORDER - 1):
        higher.append(slope(higher[-1], x))
    mixed = slope(u_x, t)
    return slope(u, t) + u * u_x - sum(0.1**k * one for k, one in enumerate(higher)) + mixed


def trained(device):
    net = Solution().to(device)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2, eps=0.1)
    x, t = points(device)
    seen = []
    for _ in range(3):
        loss = residual(net, x, t).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), x.grad.clone(), t.grad.clone(), net.calls.clone()]
        seen += [p.grad.clone() for p in net.parameters()]
    return [one.cpu() for one in seen]


def test_a_loss_of_higher_derivatives_trains_as_in_eager_pytorch():
    wanted = trained("cpu")
    with tpuport.porting():
        found = trained("cuda")
    for want, have in zip(wanted, found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


def with_respect_to_some(device):
    net = Solution().to(device)
    x, t = points(device)
    second = slope(slope(net(x, t), x), x)
    return torch.autograd.grad(second.sum(), [net.outer.bias, net.inner.bias], allow_unused=True)


def test_a_parameter_that_a_derivative_does_not_depend_on_has_no_gradient():
    none, some = with_respect_to_some("cpu")
    with tpuport.porting():
        found = with_respect_to_some("cuda")
    assert none is None
    assert found[0] is None
    torch.testing.assert_close(found[1].cpu(), some, rtol=1e-4, atol=1e-6)


def through_two(device):
    """Differentiate a gradient penalty of one call through another call, and what it was given."""
    first, second = Solution().to(device), Solution().to(device)
    x, t = points(device)
    inner = slope(first(x, t), x)
    outer = slope(second(inner, t), t)
    wanted = [x, *first.parameters()]
    found = torch.autograd.grad(slope(outer, x).square().sum(), wanted, allow_unused=True)
    return [None if one is None else one.cpu() for one in found]


def test_derivatives_of_one_call_flow_through_another():
    wanted = through_two("cpu")
    with tpuport.porting():
        found = through_two("cuda")
    assert [one is None for one in wanted] == [False] * 4 + [True]
    for want, have in zip(wanted, found, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_derivatives_have_the_dtype_of_their_inputs(dtype):
    with tpuport.porting():
        net = Solution().to("cuda", dtype)
        x, t = (point.detach().to(dtype).requires_grad_() for point in points("cuda"))
        third = slope(slope(slope(net(x, t), x), x), t)
        third.sum().backward()
    assert third.dtype == x.grad.dtype == net.inner.weight.grad.dtype == dtype


def test_a_loss_that_was_differentiated_keeps_no_arrays_alive():
    alive = []
    with tpuport.porting():
        net = Solution().to("cuda")
        x, t = points("cuda")
        for _ in range(5):
            residual(net, x, t).square().mean().backward()
            alive.append(len(jax.live_arrays()))
    assert len(set(alive[2:])) == 1
