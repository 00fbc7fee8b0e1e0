"""A condition that is asked again, in a later round or line, has the outcome it had."""

from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients

ROUNDS = 6  # 2 ** 18 paths, if each condition were a branch of its own


class Asked(nn.Module):
    """A network that asks the same of its input, and of a number of its own, in each round."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.teacher = 0.9

    def forward(self, x: torch.Tensor) -> Any:
        level, rows = x.mean().item(), []
        for _ in range(ROUNDS):
            x = self.linear(x).tanh()
            try:
                if level > 0:
                    x = x + 1
                    rows.append(x)
                if not level > 0 or self.teacher < 0.8:
                    rows.append(x * self.teacher)
            finally:
                x = x * 0.5
        self.teacher -= 0.04
        return torch.stack(rows[:ROUNDS])


def test_one_condition_of_many_rounds_is_one_branch():
    torch.manual_seed(0)
    calls = tuple((torch.randn(2, 3) + shift,) for shift in (1, -1, 1, -1, 1, 1))
    scenario = Scenario("asked", Asked, calls)
    check_calls(scenario, by_tpuport)
    check_gradients(scenario, by_tpuport)


ALIKE = {
    "greater or equal": lambda x, y: (x > 0, x >= 0),
    "the opposite": lambda x, y: (x > 0, ~(x > 0)),
    "the opposite but for NaN": lambda x, y: (x > 0, x <= 0),
    "another element": lambda x, y: (x > 0, y > 0),
    "zeros of two signs": lambda x, y: (1 / (x * 0.0) > 0, 1 / (x * -0.0) > 0),
    "rounded": lambda x, y: (x > 0, x + 1 > 1),
    "integers": lambda x, y: (x > 0, x.long() > 0),
    "itself": lambda x, y: (x > 0, x > 0),
}


@pytest.mark.parametrize("conditions", ALIKE.values(), ids=ALIKE)
def test_conditions_that_differ_are_apart(conditions: Any):
    def forward(x: torch.Tensor) -> torch.Tensor:
        out = x * 0
        for factor, condition in zip((1, 10), conditions(x[0], x[1]), strict=True):
            try:
                if condition:
                    out = out + factor
            finally:
                out = out + 100
        return out

    values = (0.0, -0.0, 1e-9, -1e-9, float("nan"), 3.0, 0.5)
    calls = tuple((torch.tensor([value, 1.0]),) for value in values)
    check_calls(Scenario("alike", lambda: forward, calls), by_tpuport)


class Drawn(nn.Module):
    """A condition on what is drawn, which is new in each round."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads = torch.zeros(())
        for _ in range(5):
            try:
                if torch.rand((), device=x.device) < 0.5:
                    heads = heads + 1
                else:
                    x = x + 1
            finally:
                x = x * 2
        return x, heads


def test_draws_are_apart():
    ported = tpuport.convert(Drawn(), verify=False)
    found = {int(tpuport.to_torch(ported(torch.zeros(2)))[1]) for _ in range(12)}
    assert len(found) > 2  # and not only none or all


class Counted(nn.Module):
    """A condition on a buffer that the rounds write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            try:
                if self.steps < 3:
                    x = x + 1
                else:
                    x = x * 2
            finally:
                self.steps += 1
        return x


def test_a_buffer_that_was_written_is_asked_again():
    calls = tuple((torch.ones(2) * n,) for n in range(3))
    check_calls(Scenario("counted", Counted, calls), by_tpuport)
