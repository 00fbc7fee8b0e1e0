"""Loops that append to lists which objects hold: one program, equal to eager PyTorch."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients
from tests.model.test_long_loops import rolled

pytestmark = pytest.mark.usefixtures("short")


class Trajectory:
    """A state object, whose method appends."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.more = {"rows": self.rows}

    def push(self, row: torch.Tensor) -> None:
        self.rows.append(row)


class Loops(nn.Module):
    """Loops that become one program."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.rows = nn.Linear(4, 4), []

    def attribute(self, x):
        self.rows = []
        for t in range(6):
            x = x * 0.5 + self.lin.bias
            self.rows.append(x * t)
        return torch.stack(self.rows)

    def state_object(self, x):
        found = Trajectory()
        for _ in range(6):
            x = x * 0.5 + self.lin.bias
            found.push(x)
        x.mul_(2)
        return torch.stack(found.rows), found.rows, found.more["rows"] is found.rows

    def table(self, x):
        table = {"a": [], "b": [x]}
        for t in range(6):
            x = x * 0.5 + self.lin.bias
            table["a"].append(x + 1)
            table["b"].append((t, x.sum()))
        return table

    def layers(self, x):
        found = [[] for _ in range(3)]
        for _ in range(6):
            for one in found:
                x = x * 0.5 + self.lin.bias
                one.append(x + 1)
        return [torch.stack(one) for one in found]


class Left(Loops):
    """Loops whose rounds are compiled one by one."""

    def bound(self, x):
        found = Trajectory()
        found.put = found.rows.append
        for _ in range(6):
            x = x * 0.5 + self.lin.bias
            found.put(x)
        return found.rows

    def in_a_tuple(self, x):
        pair = ([], 3)
        for _ in range(6):
            x = x * 0.5 + self.lin.bias
            pair[0].append(x + 1)
        return pair

    def counted_elsewhere(self, x):
        found, rows = Trajectory(), []
        found.rows, found.count = rows, lambda: len(rows)
        for _ in range(6):
            x = x * 0.5 + found.count()
            found.push(x * 2)
        return found.rows

    def read(self, x):
        found = Trajectory()
        for _ in range(6):
            found.push(x + len(found.rows))
            x = found.rows[-1] * 0.5
        return found.rows


ONE = [n for n, f in vars(Loops).items() if callable(f) and n[0] != "_"]
WAYS = ONE + [n for n, f in vars(Left).items() if callable(f) and n[0] != "_"]


@pytest.mark.parametrize("name", WAYS)
def test_a_list_that_an_object_holds(name: str):
    class One(Left):
        forward = getattr(Left, name)

    calls = ((torch.randn(2, 4),), (torch.randn(2, 4),))
    ported = check_calls(Scenario(name, One, calls), by_tpuport)
    assert bool(rolled(ported)) is (name in ONE), str(ported.report)
    if name != "attribute":  # `apply` takes the state that the calls have left
        check_gradients(Scenario(name, One, calls[:1]), by_tpuport)
