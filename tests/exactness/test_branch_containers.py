"""Containers that a branch gives on some paths only: what is written to one of them later."""

from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import (
    Scenario,
    assert_outputs_same,
    by_tpuport,
    check_calls,
    check_gradients,
)


class Step(nn.Module):
    """Writes to the state that it is given, or to one that it makes."""

    def forward(self, state: dict[str, Any], fresh: torch.Tensor) -> dict[str, Any]:
        """Return the state."""
        if fresh:
            state = {"a": state["a"] * 2}
        state["a"] = state["a"] + 1
        return state


class Pick(nn.Module):
    """Returns one of two containers."""

    def forward(self, a: Any, b: Any, c: torch.Tensor) -> Any:
        """Return `a` or `b`."""
        if c:
            return a
        return b


class Containers(nn.Module):
    """Writes to containers that are one with others on some paths.

    Args:
        names: The methods that it calls.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.step, self.pick = Step(), Pick()
        self.weight = nn.Parameter(torch.tensor([0.5, -2.0]))

    def a_new_one_or_the_old(self, x: torch.Tensor, m: torch.Tensor) -> Any:
        old = st = {"a": x}
        if m[0]:
            st = {"a": x * 5}
        st["a"] = st["a"] + 1
        return old["a"], st["a"]

    def one_of_two_lists(self, x: torch.Tensor, m: torch.Tensor) -> Any:
        a, b = [x], [x * 2]
        one = a if m[0] else b
        one.append(x * 7)
        a[0] = x * 9
        return one[0], sum(a), sum(b), len(a), len(b)

    def an_empty_one(self, x: torch.Tensor, m: torch.Tensor) -> Any:
        a: list[Any] = []
        one = a if m[1] else []
        one.append(x)
        return len(a), len(one)

    def the_same_on_both_sides(self, x: torch.Tensor, m: torch.Tensor) -> Any:
        a, b = {"a": x}, [x]
        if m[0]:
            c, d, y = a, b, x * 2
        else:
            c, d, y = a, b, x * 3
        c["a"] = y + 1
        d.append(y)
        return a["a"], sum(b), len(b)

    def twice(self, x: torch.Tensor, m: torch.Tensor) -> Any:
        q, r = {"a": x}, {"a": x * 3}
        if m[0]:
            r = q
        if m[1]:
            r, q = q, {"a": x * 2}
        r["a"] = r["a"] * 2
        return q["a"], r["a"]

    def in_a_module(self, x: torch.Tensor, m: torch.Tensor) -> Any:
        a, b = {"a": x}, {"a": x * 2}
        new = self.step(a, m[0])
        one = self.pick(a, b, m[1])
        one["a"] = one["a"] - 3
        return a["a"], b["a"], new["a"]

    def of_a_branch_in_a_branch(self, x: torch.Tensor, m: torch.Tensor) -> Any:
        a, b = {"a": x}, {"a": x * 3}
        if m[1]:
            b = self.pick(a, {"a": x * 2}, m[0])
        c = b
        if m[0]:
            c["a"] = b["a"] * 0.5 + 1
        return a["a"], b["a"], c["a"]

    def an_attribute(self, x: torch.Tensor, m: torch.Tensor) -> Any:
        self.kept = old = [x]
        if m[0]:
            self.kept = [x * 2]
        self.kept[0] = self.kept[0] + 1
        result = self.kept[0], old[0]
        del self.kept
        return result

    def forward(self, x: torch.Tensor, m: torch.Tensor) -> Any:
        """Return what the methods of `names` give."""
        x = x * self.weight
        return [getattr(self, name)(x, m) for name in self.names]


CALLS = tuple(
    (torch.tensor([1.0, 2.0]) + i, torch.tensor([bool(i & 1), bool(i & 2)])) for i in range(4)
)


# Each branch of those that are explored by themselves doubles the program of those after it.
@pytest.mark.parametrize(
    "names",
    [
        ("a_new_one_or_the_old", "one_of_two_lists", "an_empty_one", "the_same_on_both_sides"),
        ("twice", "of_a_branch_in_a_branch"),
        ("in_a_module", "an_attribute"),
    ],
)
def test_a_write_reaches_every_container_that_it_reaches_in_eager(names: tuple[str, ...]) -> None:
    check_calls(Scenario("containers", lambda: Containers(names), CALLS), by_tpuport)
    check_gradients(Scenario("containers", lambda: Containers(names), CALLS[1:]), by_tpuport)


def test_a_write_to_an_argument_reaches_the_caller_on_some_paths_only() -> None:
    ported = tpuport.convert(Step(), verify=False)
    for fresh in (True, False, True):
        ours, theirs = {"a": torch.ones(2)}, {"a": torch.ones(2)}
        given, wanted = ported(ours, torch.tensor(fresh)), Step()(theirs, torch.tensor(fresh))
        assert_outputs_same([given["a"], ours["a"]], [wanted["a"], theirs["a"]])
