"""Numbers on modules that a script changes between calls, where the code needs their values."""

import warnings

import pytest
import torch
from torch import nn

import tpuport
from tpuport.compat.emulated.programs import PortWarning, programs


class Grows(nn.Module):
    """Uses more layers at each stage, as progressive training does."""

    def __init__(self):
        super().__init__()
        self.stage, self.alpha = 0, 0.0
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        for number in range(4):
            setattr(self, f"head{number}", nn.Linear(2, 2))


class Ranges(Grows):
    def forward(self, x):
        for index in range(self.stage + 1):
            x = self.layers[index](x)
        return x * self.alpha


class Names(Grows):
    def forward(self, x):
        return getattr(self, f"head{self.stage}")(x) * self.alpha


class Indexes(Grows):
    def forward(self, x):
        return self.layers[self.stage](x) * self.alpha


def trained(kind, device):
    torch.manual_seed(0)
    net = kind().to(device)
    optimizer, found = torch.optim.SGD(net.parameters(), 0.1), []
    for stage in (0, 0, 1, 1, 2, 3, 3, 0, 1):
        net.stage = stage
        loss = net(torch.ones(2, device=device)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found, net


@pytest.mark.parametrize("kind", [Ranges, Names, Indexes])
def test_a_stage_that_a_script_raises_is_one_program_for_each(kind):
    expected, _ = trained(kind, "cpu")
    with tpuport.porting(), warnings.catch_warnings():
        warnings.simplefilter("error", PortWarning)
        found, net = trained(kind, "cuda")
        assert found == pytest.approx(expected, rel=1e-5)
        (program,) = programs()
        assert net.stage == 1
        # Three more stages, and the trace that showed that code needs the number.
        assert len(program.report.retraces) == 4


def test_a_number_that_only_values_depend_on_is_an_input():
    net = Indexes()
    with tpuport.porting():
        net.to("cuda")
        for step in range(9):
            net.alpha = step / 10
            net(torch.ones(2, device="cuda"))
        (program,) = programs()
        assert len(program.report.retraces) == 2


class Logged(nn.Module):
    """Holds an object that changes before each call, as Lightning's modules hold their trainer."""

    def __init__(self):
        super().__init__()
        self.trainer, self.linear = {"batch": "0"}, nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x) * len(self.trainer["batch"])


def test_a_module_that_a_script_changes_before_each_call_is_not_compiled_for_each():
    def called(device):
        torch.manual_seed(0)
        net, found = Logged().to(device), []
        for index in range(10):
            net.trainer["batch"] = str(index**4)
            found.append(net(torch.ones(1, 2, device=device)).sum().item())
        return found, net

    expected, _ = called("cpu")
    with tpuport.porting() as settings, pytest.warns(PortWarning, match="'trainer' .*last 6 calls"):
        found, _ = called("cuda")
    assert found == pytest.approx(expected, rel=1e-5)
    assert settings.calls.traces < 8


class TwoMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.mode, self.linear = "0", nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x) * len(self.mode)

    def encode(self, x):
        return self.linear(x) - len(self.mode)


def test_other_methods_follow_the_structure_after_forward_runs_by_parts():
    def called(device):
        torch.manual_seed(0)
        net, x, found = TwoMethods().to(device), torch.ones(1, 2, device=device), []
        for length in range(1, 8):
            net.mode = "m" * length
            found.append(net(x).sum().item())
        for length in (7, 6, 7, 1):
            net.mode = "m" * length
            found += [net.encode(x).sum().item(), net(x).sum().item()]
        return found

    expected = called("cpu")
    with tpuport.porting(methods=("TwoMethods.encode",)), pytest.warns(PortWarning, match="mode"):
        assert called("cuda") == pytest.approx(expected, rel=1e-5)


def test_a_module_without_weights_in_submodules_is_compiled_for_each_change():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.mode, self.weight = "0", nn.Parameter(torch.ones(2))
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(self.weight * x) * len(self.mode)

    with tpuport.porting():
        net = Bare().cuda()
        for index in range(1, 9):
            net.mode = "m" * index
            assert net(torch.ones(2, device="cuda")).sum().item() == 2 * index
