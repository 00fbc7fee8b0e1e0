"""Checks that only raise are no paths of the program, however many there are in one call."""

from collections.abc import Callable

import pytest
import torch
from torch import distributions, nn

from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients, normal


class Checked(distributions.Normal):
    """One whose `__init__` calls the checks of torch, where no rule sees them."""

    def __init__(self, mean: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__(mean, scale, validate_args=True)


def fail() -> None:
    """Raise where the line that calls this does not show it."""
    raise ValueError("not a number")


# Without source no rule rewrites it.
MADE: dict[str, Callable[[torch.Tensor], None]] = {}
exec("def check(v):\n    if v.isnan().any():\n        return fail()", globals(), MADE)


class Steps(nn.Module):
    """Three checks in each of five steps, and a branch after them that no rule rewrites."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.step(self.step(self.step(self.step(self.step(x)))))
        seen = {"x": x}
        for name in list(seen):
            if x.sum() > 0:
                seen[name] = x * 2
        return seen["x"]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        made = Checked(self.lin(x), torch.sigmoid(x) + 0.5)
        MADE["check"](made.mean)
        return torch.tanh(made.log_prob(x) * 0.1 + x)


def test_each_is_traced_once_and_raises() -> None:
    """Each doubled the runs before, and more than twelve were refused."""
    calls = tuple((normal(2, 3, seed=seed) + shift,) for seed, shift in ((1, 2.0), (2, -2.0)))
    ported = check_calls(Scenario("checks", Steps, calls), by_tpuport)
    with pytest.raises(ValueError, match="Expected parameter loc"):
        ported(torch.full((2, 3), float("nan")))
    check_gradients(Scenario("checks", Steps, calls[:1]), by_tpuport)
