"""Lists, dicts and objects as variables of traced loops: which of them are one after rounds."""

from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients


class Add(nn.Module):
    """Writes to the state that it is given, and returns it."""

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        state["a"] = state["a"] * 1.5
        return state


class Loops(nn.Module):
    """Rounds while `i < n`; `names` are the methods that it calls."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names, self.add = names, Add()
        self.weight = nn.Parameter(torch.tensor([0.5, -2.0]))
        self.state: Any = None

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        """Return what the methods give."""
        return [getattr(self, name)(x * self.weight, n) for name in self.names]

    def that_stay(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        old = st = {"a": x}
        i = torch.zeros(())
        while i < n:
            st = self.add(st)
            i = i + 1
        st["a"] = st["a"] + 1
        return old["a"], st["a"], st is old

    def that_stay_in_others(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        items = [x]
        st = old = {"l": items, "k": x}
        i = torch.zeros(())
        while i < n:
            st = self.keeping(st)
            i = i + 1
        items[0] = items[0] - 1
        return st["l"][0], items[0], old["k"], len(items)

    def keeping(self, st: dict[str, Any]) -> dict[str, Any]:
        st["l"][0] = st["l"][0] * 2
        st["k"] = st["k"] + st["l"][0]
        return st

    def of_a_place(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        p = {"k": x, "l": [x * 2]}
        i = torch.zeros(())
        while i < n:
            p["l"][0] = p["l"][0] * 0.5 + p["k"]
            p["l"] = [p["k"] + p["l"][0]]
            i = i + 1
        return p["l"][0]

    def one_after_the_other(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        before, st = {"a": x}, {"a": x * 2}
        i = torch.zeros(())
        while i < n:
            before = st
            st = {"a": st["a"] * 2}
            i = i + 1
        st["a"] = st["a"] + 1
        before["a"] = before["a"] - 1
        return before["a"], st["a"]

    def that_nobody_else_has(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        st = {"a": x}
        i = torch.zeros(())
        while i < n:
            st = self.some_new(st, i)
            i = i + 1
        st["a"] = st["a"] + 1
        return st["a"]

    def some_new(self, st: dict[str, Any], i: torch.Tensor) -> dict[str, Any]:
        if i > 1:
            return {"a": st["a"] * 2}
        st["a"] = st["a"] + 3
        return st

    def in_a_range(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        a, b = [x], [x * 2]
        c = a
        for i in range(41):
            a, b = b, a
            a[0] = a[0] + i * n
        c[0] = c[0] * 3
        return a[0], b[0], c[0]

    def in_a_range_of_branches(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        old = st = {"a": x}
        for i in range(4):
            if i < n:
                st = {"a": st["a"] * 1.5}
        st["a"] = st["a"] + 1
        return old["a"], st["a"]


class LoopsThatMayShare(Loops):
    """Rounds after which, or in which, a container may be one with another."""

    def replaced(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        old = st = {"a": x}
        i = torch.zeros(())
        while i < n:
            st = {"a": st["a"] * 2}
            i = i + 1
        st["a"] = st["a"] + 1
        return old["a"], st["a"]

    def replaced_in_a_list(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        st = {"l": [x]}
        old = st["l"]
        i = torch.zeros(())
        while i < n:
            st = {"l": [st["l"][0] + 1]}
            i = i + 1
        old[0] = old[0] * 7
        return old[0], st["l"][0]

    def replaced_by_another(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        a, b = {"a": x}, {"a": x * 3}
        i = torch.zeros(())
        while i < n:
            a = b
            i = i + 1
        a["a"] = a["a"] + 10
        return a["a"], b["a"]

    def swapped(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        a, b = {"a": x}, {"a": x * 3}
        c = a
        i = torch.zeros(())
        while i < n:
            a, b = b, a
            i = i + 1
        a["a"] = a["a"] + 10
        return a["a"], b["a"], c["a"]

    def swapped_and_written(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        a, b = {"a": x}, {"a": x * 3}
        c = a
        i = torch.zeros(())
        while i < n:
            a, b = self.turned(a, b)
            i = i + 1
        return a["a"], b["a"], c["a"]

    def turned(self, a: Any, b: Any) -> Any:
        a["a"] = a["a"] + 10
        return b, a

    def of_an_attribute(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        old = self.state = {"a": x}
        i = torch.zeros(())
        while i < n:
            self.state = {"a": self.state["a"] * 2}
            i = i + 1
        self.state["a"] = self.state["a"] + 1
        result = old["a"], self.state["a"]
        self.state = None
        return result

    def written_in_some_rounds(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        st = old = {"a": x}
        i = torch.zeros(())
        while i < n:
            st = self.some_new(st, i)
            i = i + 1
        return st["a"], old["a"]

    def in_two_places(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        p = {"k": x, "l": [x * 2]}
        q = {"l": p["l"]}
        i = torch.zeros(())
        while i < n:
            q["l"][0] = p["l"][0] * 0.5 + p["k"]
            p["l"] = [p["k"]]
            i = i + 1
        return p["l"][0], q["l"][0]

    def one_before_the_loop(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        p = q = {"k": x, "l": [x * 2]}
        i = torch.zeros(())
        while i < n:
            p, q = self.renewed(p, q)
            i = i + 1
        return p["k"], q["l"][0]

    def renewed(self, p: Any, q: Any) -> Any:
        return {"k": p["k"] * 2, "l": p["l"]}, q

    def read_by_a_round(self, x: torch.Tensor, n: torch.Tensor) -> Any:
        st = old = {"a": x}
        i = torch.zeros(())
        while i < n:
            st = self.adding(st, old)
            i = i + 1
        return st["a"]

    def adding(self, st: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
        st["a"] = st["a"] * 1.5
        st["a"] = st["a"] + old["a"]
        return st


CALLS = tuple((torch.tensor([1.0, 2.0]) + i, torch.tensor(float(i))) for i in (2, 0, 1, 3))


@pytest.mark.parametrize(
    "names",
    [
        (
            *("that_stay", "that_stay_in_others", "one_after_the_other", "that_nobody_else_has"),
            *("in_a_range", "of_a_place"),
        ),
        ("in_a_range_of_branches",),
    ],
)
def test_what_is_written_to_one_that_is_known(names: tuple[str, ...]) -> None:
    check_calls(Scenario("containers", lambda: Loops(names), CALLS), by_tpuport)
    check_gradients(Scenario("containers", lambda: Loops(names), CALLS[:1]), by_tpuport)


@pytest.mark.parametrize(
    "name",
    [
        *("replaced", "replaced_in_a_list", "replaced_by_another", "swapped"),
        *("swapped_and_written", "of_an_attribute", "written_in_some_rounds", "read_by_a_round"),
        *("in_two_places", "one_before_the_loop"),
    ],
)
def test_what_is_written_to_one_that_others_may_be(name: str) -> None:
    """Each gave wrong numbers without an error."""
    ported = tpuport.convert(LoopsThatMayShare((name,)), verify=False)
    with pytest.raises(
        tpuport.PortError, match=f"TPU10[14] .*{__file__}|other names|does not carry"
    ):
        ported(*CALLS[0])
