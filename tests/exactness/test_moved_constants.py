"""Tensors that are no input of the first program, and that a call moves to another name."""

import pytest
import torch
from torch import nn

import tpuport

OUTSIDE = [torch.full((2,), 7.0), torch.full((2,), 9.0)]


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.full((2,), 1.0), torch.full((2,), 2.0)
        self.items = [torch.full((2,), float(i)) for i in range(3)]
        self.table = {"a": torch.full((2,), 1.0), "b": torch.full((2,), 2.0)}
        self.count, self.numbers = 0, [3.0, 4.0]
        self.register_buffer("state", torch.zeros(2))


class Exchanged(Kept):
    def forward(self, x):
        self.a, self.b = self.b, self.a
        return x + self.a


class ExchangedInDict(Kept):
    def forward(self, x):
        self.table["a"], self.table["b"] = self.table["b"], self.table["a"]
        return x + self.table["a"]


class Rotated(Kept):
    def forward(self, x):
        self.items.append(self.items.pop(0))
        return x + self.items[0]


class FromOutside(Kept):
    def forward(self, x):
        out = x + self.state
        self.state = OUTSIDE[0]
        return out


class FromOutsideByTurns(Kept):
    def forward(self, x):
        out = x + self.a
        self.a = OUTSIDE[self.count % 2]
        self.count += 1
        return out


class Cloned(Kept):
    def forward(self, x):
        out = x + self.a
        self.a = self.b.clone()
        return out


class MadeOfNumbers(Kept):
    def forward(self, x):
        out = x + self.state
        self.state = torch.tensor(self.numbers)
        return out


MODULES = [Exchanged, ExchangedInDict, Rotated, FromOutside, FromOutsideByTurns, Cloned]
MODULES += [MadeOfNumbers]


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("way", ["convert", "porting"])
def test_later_calls_see_the_tensor_that_was_moved(make, way):
    x = torch.zeros(2)
    eager = make()
    expected = [eager(x).tolist() for _ in range(6)]
    if way == "convert":
        ported = tpuport.convert(make())
        assert [ported(x).tolist() for _ in range(6)] == expected
        assert ported.buffers.get("state", eager.state).tolist() == eager.state.tolist()
        return
    with tpuport.porting():
        net = make().cuda()
        assert [net(x.cuda()).tolist() for _ in range(6)] == expected
        assert net.state.tolist() == eager.state.tolist()
        assert [item.tolist() for item in net.items] == [item.tolist() for item in eager.items]
        assert {n: v.tolist() for n, v in net.table.items()} == {
            name: value.tolist() for name, value in eager.table.items()
        }


class ReadsItsTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = self.same = None

    def forward(self, x):
        if self.hidden is None:
            self.hidden = self.same = OUTSIDE[1]
        else:
            self.hidden = self.same = (self.hidden * 0.5 + OUTSIDE[1]).tanh()
        return x + self.hidden + self.same


@pytest.mark.parametrize("way", ["convert", "porting"])
def test_a_tensor_that_state_was_is_not_taken_for_it(way):
    x, eager = torch.zeros(2), ReadsItsTable()
    expected = [eager(x) for _ in range(5)]
    if way == "convert":
        ported = tpuport.convert(ReadsItsTable())
        got = [torch.tensor(ported(x).tolist()) for _ in range(5)]
    else:
        with tpuport.porting():
            net = ReadsItsTable().cuda()
            got = [net(x.cuda()).cpu() for _ in range(5)]
    torch.testing.assert_close(got, expected)
