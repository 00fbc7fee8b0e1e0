"""Modules that register parameters while they are called, as code does that learns its sizes."""

import pytest
import torch
from torch import nn

import tpuport
from tpuport.compat.emulated.programs import programs
from tpuport.foundation.errors import PortError


class Lazy(nn.Module):
    """Makes a parameter, a layer or a buffer in its first call."""

    def __init__(self, how):
        super().__init__()
        self.how, self.inner, self.layer, self.scale = how, nn.Linear(3, 3), None, None

    def forward(self, x):
        if self.how == "attribute" and not hasattr(self, "shift"):
            self.shift = nn.Parameter(torch.full((3,), 0.1).to(x))
        if self.how == "register" and not hasattr(self, "shift"):
            self.register_parameter("shift", nn.Parameter(x[0].detach() * 0.5))
        if self.how == "instead of None" and self.scale is None:
            self.scale = nn.Parameter(torch.ones(3, device=x.device))
        if self.how == "layer" and self.layer is None:
            self.layer = nn.Linear(x.shape[-1], 3).to(x.device)
        x = self.inner(x)
        x = x + self.shift if hasattr(self, "shift") else x
        x = x if self.scale is None else x * self.scale
        return x if self.layer is None else self.layer(x)


def trained(device, how):
    """What a script sees of three steps after a call that makes parameters."""
    torch.manual_seed(0)
    net, x = Lazy(how).to(device), torch.rand(4, 3).to(device)
    net(x)
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), []
    for _ in range(3):
        loss = (net(x) ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return net, losses


@pytest.mark.filterwarnings("ignore:Lazy is not one program")  # in the call that makes a layer
@pytest.mark.parametrize("how", ["attribute", "register", "instead of None", "layer"])
def test_a_parameter_that_a_first_call_makes_is_trained(how):
    net, losses = trained("cpu", how)
    names = [name for name, _ in net.named_parameters()]
    with tpuport.porting():
        net, our_losses = trained("cuda", how)
        reports = [program.report.model for program in programs()]
    assert [name for name, _ in net.named_parameters()] == names
    assert len(names) == (4 if how == "layer" else 3)
    assert our_losses == pytest.approx(losses, rel=1e-5)  # three steps on sums in another order
    assert "Lazy" in reports  # later calls are one program


class Renews(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.weight = nn.Parameter(torch.softmax(self.weight, 0))
        return x * self.weight


def stepped(net, device):
    """The weight and its gradient after a call and its backward pass."""
    net(torch.ones(3, device=device)).sum().backward()
    assert net.weight.grad is not None
    return net.weight.tolist(), net.weight.grad.tolist()


def test_a_parameter_that_each_call_makes_is_eager_pytorchs_or_refused():
    eager = Renews()
    found = [stepped(eager, "cpu") for _ in range(2)]
    with tpuport.porting():
        net = Renews().cuda()
        assert [stepped(net, "cuda") for _ in range(2)] == found
        with pytest.raises(PortError, match=r"registers the parameter 'weight'") as raised:
            net(torch.ones(3).cuda())
    assert "register it in __init__" in str(raised.value)
    assert "--eager Renews" in str(raised.value)


@pytest.mark.parametrize("how", ["attribute", "register", "instead of None", "layer"])
def test_convert_refuses_a_call_that_registers_a_parameter(how):
    torch.manual_seed(0)
    net, x = Lazy(how), torch.rand(4, 3)
    with pytest.raises(PortError, match=r"registers the parameter .*(?s:.*)call the module once"):
        tpuport.convert(net)(x)
    expected = net(x)  # and then it is there
    ported = tpuport.convert(net)
    torch.testing.assert_close(torch.from_numpy(ported(x).numpy()), expected)
    assert len(ported.params) == (4 if how == "layer" else 3)
