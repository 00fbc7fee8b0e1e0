"""In-place writes to tensors that have a graph: state and arguments that others computed."""

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError


class Keeps(nn.Module):
    """Keeps what it computed with its graph, which the next call writes to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0).reshape(3, 3) / 9)
        self.hidden, self.items = None, []

    def forward(self, x):
        if self.hidden is None:
            self.hidden = x @ self.weight
        return self.step(x)


class Adds(Keeps):
    def step(self, x):
        self.hidden.mul_(0.5).add_(x @ self.weight)
        return self.hidden * 2


class BindsAfterwards(Keeps):
    def step(self, x):
        self.hidden += x
        out = self.hidden * 2
        self.hidden = x @ self.weight
        return out


class WritesToARow(Keeps):
    def step(self, x):
        self.hidden[0].mul_(0.5).add_((x @ self.weight)[1])
        return self.hidden * 3


class WritesUnderNoGrad(Keeps):
    def step(self, x):
        with torch.no_grad():
            self.hidden.mul_(0.5)
        return self.hidden * 2


class WritesToData(Keeps):
    def step(self, x):
        self.hidden.data.mul_(0.5)
        return self.hidden * 3


class Returns(Keeps):
    def step(self, x):
        return self.hidden.mul_(0.5).add_(x @ self.weight)


class ReturnsARow(Keeps):
    def step(self, x):
        self.hidden.mul_(0.5).add_(x @ self.weight)
        return self.hidden[0]


class InAList(Keeps):
    def step(self, x):
        if self.items:
            self.items[0].mul_(x).add_(x @ self.weight)
        else:
            self.items.append(self.hidden * 2)
        return self.items[0] * 2


def gradient_of(net, value):
    net.weight.grad = None
    try:
        value.sum().backward(retain_graph=True)
    except RuntimeError as error:
        return str(error)[:60]
    return net.weight.grad.tolist()


def seen(make, device):
    """What a script sees of four calls, and what gradients it gets through them."""
    torch.manual_seed(0)
    net, found, results = make().to(device), [], []
    for value in (1.0, 2.0, 3.0, 4.0):
        out = net(torch.full((2, 3), value, device=device))
        results.append(out)
        found += [out.detach().tolist(), net.hidden.tolist()]
        found.append([net.hidden.requires_grad, net.hidden.is_leaf, out is net.hidden])
    found += [gradient_of(net, out * out) for out in (results[-1], results[1], net.hidden)]
    with torch.no_grad():
        results[-1].zero_()
    return [*found, net.hidden.tolist()]


@pytest.mark.parametrize("make", Keeps.__subclasses__())
def test_state_with_a_graph_is_written_in_place_as_in_eager(make):
    expected = seen(make, "cpu")
    with tpuport.porting():
        ours = seen(make, "cuda")
    assert len(ours) == len(expected) == 16
    for one, other in zip(ours, expected, strict=True):
        if isinstance(other, list):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
        else:
            assert one == other


@pytest.mark.filterwarnings("ignore:Sequential is not one program")
def test_a_module_that_writes_to_the_result_of_another_one_runs_as_in_eager():
    def gradients(device):
        torch.manual_seed(0)
        body, head = nn.Linear(3, 3), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
        body.to(device), head.to(device)
        hidden = body(torch.ones(2, 3, device=device))
        (head(hidden).sum() + hidden.sum() * 2).backward()
        return [hidden.detach().cpu(), body.weight.grad.cpu(), head[1].weight.grad.cpu()]

    expected = gradients("cpu")
    with tpuport.porting():
        for one, other in zip(gradients("cuda"), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_a_gradient_that_would_end_in_a_written_argument_is_refused():
    class Doubles(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            x.mul_(2)
            return x * self.weight

    with tpuport.porting():
        body, head = nn.Linear(3, 3).cuda(), Doubles().cuda()
        with pytest.raises(PortError, match=r"args\[0\] is given a tensor with a gradient"):
            head(body(torch.ones(2, 3, device="cuda")))
