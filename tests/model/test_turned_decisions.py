"""Gradients beside eager PyTorch that takes the decisions of the port which rounding has turned.

A number is planted on either side of a kink, where code sees that it is traced: that is rounding. A
fault of the same size or less, planted beside it, is none.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tests.planted_kinks import KINKS, is_traced, two_layers, with_fault
from tpuport.foundation.errors import ParityError
from tpuport.model.parity import turned
from tpuport.training import make_train_step


class Net(nn.Module):
    """Two layers, numbers between them of which one is near a kink, and a fault if asked for."""

    def __init__(self, function, point, fault="", margin=None):
        super().__init__()
        self.first, self.second = two_layers()
        self.function, self.point, self.fault = function, point, fault
        self.rounded_away = False
        # The nearest numbers on both sides.
        self.margin = max(1e-8, abs(point) * 2**-23) if margin is None else margin

    def forward(self, x):
        h = self.first(x)
        near = torch.zeros_like(h)
        near[3, 2] = self.point + (-self.margin if is_traced(x) else self.margin)
        if self.rounded_away:
            near[3, 2] = 1e-8 if is_traced(x) else (near[0, 0] + 1e-9 + 1) - 1
        moved = torch.zeros_like(h)
        moved[3, 2] = 1.0
        moved[5, 4] = 1.0  # which is zero exactly
        h = h - moved * h.detach() + near
        fault = self.fault if is_traced(x) else ""
        y = with_fault(self.function, h, fault)
        if fault == "wrong sign":
            y = y + (2 * (y.detach() - y))[:, :1] * torch.ones(1, 32).cumsum(1).eq(1)
        return self.second(y)


def gradients_compared(net, shape=(16, 12)):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    with tpuport.porting() as scope:
        net = net.cuda()
        net(x.cuda()).square().mean().backward()
    return [record for program in scope.report.programs for record in program.parity]


@pytest.mark.parametrize("name", KINKS)
def test_a_decision_that_rounding_turned_is_taken_as_the_port_did(name):
    records = gradients_compared(Net(*KINKS[name]))
    taken = {record.path: record for record in records if record.turned}
    assert "grad.first.weight" in taken
    assert all(record.max_rel <= record.tolerance for record in taken.values())


def compared_by_convert(net, blocks="auto"):
    x = torch.randn(16, 12, generator=torch.Generator().manual_seed(1))
    return tpuport.convert(net, verify=False, blocks=blocks).verify(x).parity


def compared_by_step(net):
    class Trained(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x).square().mean()

    ported = tpuport.convert(Trained())
    step = make_train_step(ported, optimizer="sgd")
    step(step.init(), torch.randn(16, 12, generator=torch.Generator().manual_seed(1)))
    return ported.report.parity


def test_a_number_that_rounding_takes_to_the_kink_exactly_is_open():
    """Eager PyTorch has zero there; it is none in float64."""
    net = Net(*KINKS["relu"], margin=0.0)
    net.rounded_away = True
    taken = {record.path for record in gradients_compared(net) if record.turned}
    assert "grad.first.weight" in taken


@pytest.mark.parametrize("compare", [compared_by_convert, compared_by_step])
def test_other_comparisons_take_the_decisions_of_the_port(compare):
    taken = [record for record in compare(Net(*KINKS["relu"])) if record.turned]
    assert any(record.path.endswith("first.weight") for record in taken)
    assert all(record.ok for record in taken)


class Pooled(nn.Module):
    """A window of two numbers that are largest but for rounding, of which either may be."""

    def __init__(self, pool):
        super().__init__()
        self.conv, self.pool = nn.Conv2d(2, 3, 3, padding=1), pool
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                parameter.copy_(values / 2)

    def forward(self, x):
        h = self.conv(x)
        moved = torch.zeros_like(h)
        moved[1, 2, 2, 2:4] = 1.0
        near = torch.zeros_like(h)
        near[1, 2, 2, 2], near[1, 2, 2, 3] = 4.0, 4.0 + (-4e-7 if is_traced(x) else 4e-7) * 2
        return self.pool(h - moved * h.detach() + near)


@pytest.mark.parametrize(
    "pool",
    [
        lambda h: F.max_pool2d(h, 2),
        lambda h: F.max_pool2d(h, 3, 2, 1),
        lambda h: h.amax((2, 3)),
        lambda h: -(-h).amin((2, 3)),
    ],
)
def test_a_window_has_the_largest_number_that_the_port_has(pool):
    records = gradients_compared(Pooled(pool), (2, 2, 8, 8))
    assert [record.path for record in records if record.turned] == ["grad.conv.weight"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(12, 12)

    def forward(self, h):
        h = self.line(h)
        moved, near = torch.zeros_like(h), torch.zeros_like(h)
        moved[3, 2], near[3, 2] = 1.0, -1e-8 if is_traced(h) else 1e-8
        return F.relu(h - moved * h.detach() + near) + h.sin()


def test_blocks_in_a_loop_keep_one_array_for_all():
    torch.manual_seed(0)
    records = compared_by_convert(nn.Sequential(*(Block() for _ in range(6))), "scan")
    assert {record.turned for record in records if record.path.startswith("grad")} >= {6}


# What a port may do wrong, by the function that it does it in.
FAULTS = {
    "relu": ["scaled gradient", "mask of the next row", "wrong sign", "gradient at zero"],
    "leaky_relu": ["wrong slope"],
    "relu6": ["no upper bound"],
}


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults]
)
def test_a_fault_beside_a_turned_decision_is_found(name, fault):
    with pytest.raises(ParityError, match="differs from eager PyTorch"):
        gradients_compared(Net(*KINKS[name], fault=fault))


@pytest.mark.parametrize("margin", [1e-5, 1e-4])
def test_a_number_further_from_a_kink_than_rounding_reaches_is_on_its_side(margin):
    with pytest.raises(ParityError, match="differs from eager PyTorch"):
        gradients_compared(Net(*KINKS["relu"], margin=margin))


def test_what_cannot_be_looked_at_is_said_and_judged_in_float64(monkeypatch):
    def broken(*args):
        raise ValueError("no decisions")

    monkeypatch.setattr(turned, "decisions", broken)
    ported = tpuport.convert(Net(*KINKS["relu"], fault="scaled gradient"), verify=False)
    with pytest.raises(ParityError, match="from its result in float64"):
        ported.verify(torch.randn(16, 12, generator=torch.Generator().manual_seed(1)))
    assert any("not looked at (ValueError: no decisions)" in n for n in ported.report.notes)
