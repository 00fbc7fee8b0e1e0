"""Loops over a range or rows that traced values end anywhere in their body are one program."""

import warnings

import pytest
import torch
from torch import nn

from tests.exactness.scenario import Scenario, by_tpuport, check_calls, normal


class Loops(nn.Module):
    """Iterates a map until something holds; each method is a way to write that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.tensor([[0.5, 0.2, 0.0], [0.1, 0.4, -0.3], [0.2, 0.0, 0.6]])
        )

    def step(self, x):
        return (x @ self.weight).tanh()

    def at_the_end(self, x):
        for _ in range(40):
            x = self.step(x)
            if x.norm() < 0.1:
                break
        return x

    def in_the_middle(self, x):
        for _ in range(40):
            y = self.step(x)
            if (y - x).abs().max() < 0.02:
                break
            x = y
        return x

    def in_two_places(self, x):
        rounds = 0
        for _ in range(40):
            before, rounds = x, rounds + 1
            x = self.step(x)
            if torch.any(torch.isnan(x)) or torch.any(x.abs() > 5):
                x = before
                break
            if x.norm() < 0.1:
                break
        return x, rounds

    def now_and_then(self, x):
        error = 1
        for i in range(80):
            x = self.step(x)
            if i % 5 == 0:
                error = x.norm()
                if error < 0.1:
                    break
        return x

    def with_an_else(self, x):
        for _ in range(40):
            x = self.step(x)
            if x.norm() < 0.1:
                break
        else:
            x = x + 7
        return x

    def number_read_later(self, x):
        for i in range(40):  # noqa: B007
            x = self.step(x)
            if x.norm() < 0.1:
                break
        return x * i, i  # pyright: ignore[reportPossiblyUnboundVariable]

    def skips(self, x):
        for _ in range(40):
            x = self.step(x)
            if x.sum() > 0:
                continue
            x = x * 0.9
            if x.norm() < 0.1:
                break
        return x

    def only_branches(self, x):
        for _ in range(24):
            x = self.step(x)
            if x.sum() > 0:
                x = x * 0.9
        return x

    def without_a_common_result(self, x):
        found = []
        for i in range(5):
            x = self.step(x)
            if x.sum() > 0:
                found.append(i)
        return x * len(found)

    def over_rows(self, x):
        h = x[0]
        for row in x.repeat(10, 1):
            if h.norm() < 0.1:
                break
            h = self.step(h) + 0.01 * row
        return h

    def written_later(self, x):
        y = x * 1
        for _ in range(3):
            before = y
            y = self.step(y)
            if y.norm() < 0.1:
                y = before
                break
        y += 1
        return x, y


ways = [name for name in vars(Loops) if name not in ("__module__", "__doc__", "__init__", "step")]
ways = [name for name in ways if not name.startswith("_")]


@pytest.mark.parametrize("name", ways)
def test_a_traced_value_ends_a_loop(name: str):
    """Each round was another path of the program, of which there may be twelve."""

    class One(Loops):
        forward = vars(Loops)[name]

    calls = tuple((normal(4, 3, seed=seed) * scale,) for seed, scale in enumerate((1, 3, 0.01)))
    check_calls(Scenario(name, One, calls), by_tpuport)


class Warns(Loops):
    def forward(self, x):
        for _ in range(40):
            x = self.step(x)
            if torch.any(torch.isnan(x)):
                warnings.warn("not a number", stacklevel=2)
                break
            if x.norm() < 0.1:
                break
        return x


def test_a_loop_that_warns_before_it_ends():
    calls = ((normal(4, 3),), (normal(4, 3, seed=1),))
    check_calls(Scenario("warns", Warns, calls), by_tpuport)
