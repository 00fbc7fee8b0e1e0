"""Calls that switch `requires_grad` of parameters: values, gradients and flags after them."""

import pytest
import torch
from torch import nn

import tpuport


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.linspace(-1, 1, 3))


class OffAndOn(Net):
    def forward(self, x):
        first = torch.tanh(self.layer(x)) * self.scale
        self.scale.requires_grad_(False)
        second = first * self.scale
        self.scale.requires_grad = True
        return second + self.scale.sin() * x


class ViewBefore(Net):
    def forward(self, x):
        row = self.scale[None]
        self.scale.requires_grad_(False)
        self.layer.requires_grad_(False)
        return self.layer(x) * row + self.scale


class WrittenMeanwhile(Net):
    def forward(self, x):
        before = self.layer(x) + self.scale
        self.scale.requires_grad_(False)
        self.scale.mul_(0.5)
        between = self.layer(x) - self.scale
        self.scale.requires_grad_(True)
        return before + between.cos() + self.scale.sin()


class OnAtTheEnd(Net):
    def forward(self, x):
        y = self.layer(x) * self.scale
        self.scale.requires_grad_(True)
        return y + self.scale.sin()


class EachOtherCall(Net):
    def forward(self, x):
        y = self.layer(x) * self.scale
        self.layer.requires_grad_(not self.layer.weight.requires_grad)
        return y


class OnAndOff(Net):
    def forward(self, x):
        self.scale.requires_grad_(True)
        y = torch.tanh(self.layer(x)) * self.scale
        self.scale.requires_grad_(False)
        return y


class HookWithoutGrad(Net):
    def forward(self, x):
        y = torch.tanh(self.layer(x)) * self.scale
        with torch.no_grad():
            y.register_hook(lambda gradient: gradient * 0.5)
            seen = y.mean()
        return y + seen


MODULES = [OffAndOn, ViewBefore, WrittenMeanwhile, OnAtTheEnd, EachOtherCall, OnAndOff]
MODULES += [HookWithoutGrad]


def used(make, device, frozen_first):
    """Return what three calls compute, with an optimizer's step after each."""
    net, seen = make().to(device), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.scale.requires_grad_(not frozen_first)
    for number in range(3):
        if number == 1:
            net.scale.requires_grad_(frozen_first)
        x = torch.linspace(-1, number + 1, 6).reshape(2, 3).to(device).requires_grad_()
        optimizer.zero_grad()
        y = net(x)
        y.square().sum().backward()
        optimizer.step()
        now = [y, x.grad, *(p.grad for p in net.parameters()), *net.parameters()]
        seen += [None if one is None else one.detach().cpu().clone() for one in now]
        seen += [p.requires_grad for p in net.parameters()]
    return seen


@pytest.mark.parametrize("frozen_first", [False, True])
@pytest.mark.parametrize("make", MODULES)
def test_flags_that_a_call_switches(make, frozen_first):
    wanted = used(make, "cpu", frozen_first)
    with tpuport.porting(verify=not frozen_first):
        found = used(make, "cuda", frozen_first)
    torch.testing.assert_close(found, wanted)


class MadeInside(nn.Module):
    """Makes a leaf, ends it and begins it again; what comes before it does not depend on it."""

    def forward(self, x):
        leaf = x.detach() * 1.0
        total = leaf * 7
        leaf.requires_grad_()
        total = total + leaf * 2
        leaf.requires_grad_(False)
        total = total + leaf * 3
        leaf.requires_grad_(True)
        total = total + leaf * 5
        return torch.autograd.grad(total.sum(), leaf)[0]


def test_a_leaf_that_a_call_makes_ends_and_begins_again():
    x = torch.ones(3)
    found = tpuport.to_torch(tpuport.convert(MadeInside())(x))
    torch.testing.assert_close(found, MadeInside()(x))
    assert found.tolist() == [7.0, 7.0, 7.0]
