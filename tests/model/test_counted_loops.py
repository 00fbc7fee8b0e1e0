"""Loops over a range whose end depends on data: one scan, equal to eager PyTorch, or refused."""

from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients, normal


def rows(count: int) -> tuple[torch.Tensor]:
    """Return rows of which so many begin with a positive number."""
    made = normal(8, 4, seed=count)
    made[:, 0] = made[:, 0].abs() * torch.where(torch.arange(8) < count, 1, -1)
    return (made.roll(3, 0),)


class Selected(nn.Module):
    """Rows that a mask selects, one after another."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(4, 4), nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        x = x[x[:, 0] > 0]
        h, outs = torch.zeros(1, 4), []
        for i in range(x.shape[0]):
            h = self.cell(x[i : i + 1], h)
            self.seen += 1
            outs.append(self.out(h))
        return torch.stack(outs, 1), h


class Joined(Selected):
    """The states themselves, joined."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x[x[:, 0] > 0]
        h, outs = torch.zeros(1, 4), []
        for i in range(len(x)):
            h = self.cell(x[i][None], h)
            outs.append(h)
        made = torch.cat(outs)
        return made * x, made.sum(0)


class Later(Selected):
    """Without the first rows, and every other one; no list."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x[x[:, 0] > 0]
        total, last = torch.zeros(4), torch.zeros(4)
        for i in range(1, len(x)):
            total = total + x[i] * i
        for i in range(0, len(x), 3):
            last = torch.tanh(last + x[i])
        return total, last


class Written(Selected):
    """Rounds write to a tensor from before the loop."""

    def forward(self, x: torch.Tensor) -> Any:
        rows, out = x[x[:, 0] > 0], torch.zeros_like(x)
        for i in range(len(rows)):
            out[i] = rows[i] * 2
            self.seen.add_(rows[i].sum())
        return out


class Ending(Selected):
    """A traced value ends it before the range does."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x[x[:, 0] > 0]
        total = torch.zeros(4)
        for i in range(len(x)):
            total = total + x[i].abs()
            if total.sum() > 6:
                break
        return total


class Growing(Selected):
    """A tensor that each round makes longer."""

    def forward(self, x: torch.Tensor) -> Any:
        x = x[x[:, 0] > 0]
        made = torch.zeros(1, 4)
        for i in range(len(x)):
            made = torch.cat([made, made.mean(0, keepdim=True) + x[i]])
        return made.cumsum(0)


class Summed(nn.Module):
    """Results of known sizes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        made = self.module(x)
        return [(one * one).sum() for one in (made if isinstance(made, tuple) else (made,))]


KINDS = [Selected, Joined, Later, Written, Ending, Growing]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_of_as_many_rounds_as_data_says(kind: type[nn.Module]) -> None:
    calls = tuple(map(rows, (5, 8, 1, 3)))
    ported = check_calls(Scenario("counted", kind, calls, train=False), by_tpuport)
    assert not ported.report.retraces
    check_gradients(Scenario("counted", lambda: Summed(kind()), calls[:1], train=False), by_tpuport)


def test_no_rounds() -> None:
    check_calls(Scenario("none", Later, (rows(0),), train=False), by_tpuport)
    ported = tpuport.convert(Selected().eval(), verify=False)
    ported(*rows(2))
    with pytest.raises(RuntimeError, match="non-empty"):
        ported(*rows(0))


class Read(Selected):
    """The list is read after the loop."""

    def forward(self, x: torch.Tensor) -> Any:
        x, outs = x[x[:, 0] > 0], []
        for i in range(len(x)):
            outs.append(x[i] * 2)
        return self.use(outs)

    def use(self, outs: list[torch.Tensor]) -> Any:
        return outs[-1], outs[0] * len(outs), torch.stack(outs) * len(outs)


def test_a_list_that_is_read() -> None:
    check_calls(Scenario("read", Read, tuple(map(rows, (5, 8, 1))), train=False), by_tpuport)
    ported = tpuport.convert(Read().eval(), verify=False)
    ported(*rows(2))
    with pytest.raises(IndexError, match="out of range"):
        ported(*rows(0))


class Stacked(Read):
    def use(self, outs: list[torch.Tensor]) -> Any:
        return torch.vstack(outs)


class Unpacked(Read):
    def use(self, outs: list[torch.Tensor]) -> Any:
        return torch.stack([*outs])


class Returned(Read):
    def use(self, outs: list[torch.Tensor]) -> Any:
        return outs


class Tupled(Read):
    def use(self, outs: list[torch.Tensor]) -> Any:
        return torch.stack(tuple(outs))


class Another(Selected):
    """The caller has the list by another name."""

    def forward(self, x: torch.Tensor) -> Any:
        outs: list[torch.Tensor] = []
        self.fill(x[x[:, 0] > 0], outs)
        return x.sum() * len(outs)

    def fill(self, x: torch.Tensor, outs: list[torch.Tensor]) -> None:
        for i in range(len(x)):
            outs.append(x[i] * 2)


class WrittenLater(Selected):
    """The last row of the list is the state, which is written before the list is joined."""

    def forward(self, x: torch.Tensor) -> Any:
        x, h, outs = x[x[:, 0] > 0], torch.zeros(4), []
        for i in range(len(x)):
            h = torch.tanh(h + x[i])
            outs.append(h)
        h.mul_(3)
        return torch.stack(outs)


@pytest.mark.parametrize("kind", [Stacked, Unpacked, Returned, Tupled, Another, WrittenLater])
def test_what_reads_the_list_is_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(tpuport.PortError):
        tpuport.convert(kind().eval())(*rows(5))
