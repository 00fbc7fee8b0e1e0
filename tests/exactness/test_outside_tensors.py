"""Tensors outside of a module that its code writes, binds, or that are its state as well."""

import pytest
import torch
from torch import nn

import tpuport
from tpuport.compat.emulated.programs import PortWarning
from tpuport.foundation.errors import PortError

OUTSIDE = [torch.full((3,), 0.3)]


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("second", torch.full((3,), 5.0))
        self.items = [torch.zeros(3)]


class Writes(Base):
    def forward(self, x):
        OUTSIDE[0].add_(1)
        return x * self.weight + OUTSIDE[0]


class WritesView(Base):
    def forward(self, x):
        OUTSIDE[0][:2].mul_(x[:2].detach())
        return x * self.weight + OUTSIDE[0]


class BindsAndWrites(Base):
    def forward(self, x):
        self.first = OUTSIDE[0]
        self.first.add_(1)
        return x * self.weight + self.first


class KeepsAndWrites(Base):
    def forward(self, x):
        self.items[0] = OUTSIDE[0].detach()
        self.items[0].mul_(x.detach())
        return x * self.weight + self.items[0]


WRITING = [Writes, WritesView, BindsAndWrites, KeepsAndWrites]


@pytest.fixture(autouse=True)
def fresh():
    OUTSIDE[0] = torch.full((3,), 0.3)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", WRITING)
def test_a_write_is_refused_and_not_left_behind(kind, verify):
    with pytest.raises(
        PortError, match=r"neither an argument nor state .*written in place"
    ) as info:
        tpuport.convert(kind(), verify=verify)(torch.ones(3) * 2)
    assert info.value.code == "TPU406"
    assert "test_outside_tensors.py" in str(info.value)
    assert OUTSIDE[0].tolist() == pytest.approx([0.3] * 3)


class GivesMemory(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        x = self.layer(x)
        OUTSIDE[0].data = (OUTSIDE[0] * x * self.weight).detach()
        return x * self.weight + OUTSIDE[0]


def test_memory_of_the_program_is_refused_for_a_tensor_of_elsewhere():
    with pytest.raises(PortError, match=r"`\.data` of a tensor .*neither an argument") as info:
        tpuport.convert(GivesMemory(), verify=False)(torch.ones(3) * 2)
    assert info.value.code == "TPU406"
    assert OUTSIDE[0].tolist() == pytest.approx([0.3] * 3)

    def called(device):
        OUTSIDE[0] = torch.full((3,), 0.3, device=device)
        torch.manual_seed(0)
        net = GivesMemory().to(device).requires_grad_(False)
        found = [net(torch.full((3,), 2.0, device=device)).sum().item() for _ in range(3)]
        return [*found, OUTSIDE[0].sum().item()]

    expected = called("cpu")
    with tpuport.porting(), pytest.warns(PortWarning, match="TPU406"):
        assert called("cuda") == pytest.approx(expected)


def test_memory_of_a_tensor_that_the_call_makes():
    class Layer(Base):
        def forward(self, x):
            layer = nn.Linear(3, 3).to(x.device)
            with torch.no_grad():
                layer.weight.fill_(0.5)
                layer.bias.copy_(x[0])
            return layer.to(x.device)(x) * self.weight

    net, x = Layer(), torch.arange(6.0).view(2, 3)
    assert tpuport.convert(net)(x).tolist() == net(x).tolist()


def test_memory_of_the_program_is_refused_for_a_tensor_with_known_values():
    class Makes(Base):
        def forward(self, x):
            made = torch.zeros(3)
            made.data = x.detach()
            return made * self.weight

    with pytest.raises(PortError, match=r"with known values .*\n?.*") as info:
        tpuport.convert(Makes(), verify=False)(torch.ones(3))
    assert info.value.code == "TPU201"


def test_a_script_goes_on_with_what_eager_would_have_written():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            OUTSIDE[0].add_(1)
            return self.layer(x) + OUTSIDE[0]

    def called(device):
        torch.manual_seed(0)
        OUTSIDE[0] = torch.full((3,), 0.3, device=device)
        net = Counts().to(device)
        found = [net(torch.full((3,), 2.0, device=device)).sum().item() for _ in range(3)]
        return [*found, OUTSIDE[0].sum().item()]

    expected = called("cpu")
    with tpuport.porting(), pytest.warns(PortWarning, match="TPU406"):
        assert called("cuda") == pytest.approx(expected)


class Reads(Base):
    def forward(self, x):
        return x * self.weight * OUTSIDE[0] + self.first * 100


def script(device, change):
    OUTSIDE[0] = torch.full((3,), 0.3, device=device)
    net = Reads().to(device)
    net.first = OUTSIDE[0]
    found = []
    for number in range(5):
        if number == 2:
            change(net)
        found.append(net(torch.ones(3, device=device)).sum().item())
    return found


def exchange(net):
    net.first, net.second = net.second, net.first


def rebind(net):
    net.first = net.first * 2


def write(net):
    net.first.mul_(2)


def take_away(net):
    net.first = torch.ones(3, device=net.first.device)
    net.second = torch.ones(3, device=net.first.device)


@pytest.mark.parametrize("change", [exchange, rebind, write, take_away])
def test_a_tensor_that_is_state_and_global_follows_what_the_script_does(change):
    # A program that read the global as `first` gave 15 times its value after an exchange.
    expected = script("cpu", change)
    with tpuport.porting():
        assert script("cuda", change) == pytest.approx(expected)


def test_what_is_filled_at_its_first_use_stays():
    table = torch.zeros(3)
    filled = []

    class Fills(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            if not filled:
                table.copy_(torch.arange(3.0))
                filled.append(True)
            return x * self.weight + table

    ported = tpuport.convert(Fills())
    for _ in range(2):
        assert ported(torch.ones(3)).tolist() == [1.0, 2.0, 3.0]
    assert table.tolist() == [0.0, 1.0, 2.0]
    assert filled == [True]


class GivesData(Base):
    def forward(self, x):
        x.data = x.data * 2
        return (x * self.weight).sum()


class SetsMemory(Base):
    def forward(self, x):
        x.set_(torch.full((3,), 5.0))
        return (x * self.weight).sum()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", [GivesData, SetsMemory])
def test_other_memory_of_an_argument_is_refused_at_its_line(kind, verify):
    with pytest.raises(PortError, match="gets the memory of another tensor") as info:
        tpuport.convert(kind(), verify=verify)(torch.ones(3))
    assert "test_outside_tensors.py" in str(info.value)
