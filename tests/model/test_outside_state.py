"""Blocks that read Python state of elsewhere: each sees what it would see in eager PyTorch.

No first comparison with eager could find these: the state is the same for all blocks until a later
call, or the numbers agree by chance.
"""

import contextvars
import itertools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.model import outside_state
from tests.model.repeated import Block, Stack, port
from tpuport.foundation.errors import PortError

COUNT = 0
TABLE: dict[str, Any] = {"scale": 1.0}
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE", default=1.0)
LOCAL = threading.local()


class Options:
    scale = 1.0


OPTIONS = Options()


def scale_of_all() -> float:
    return TABLE["scale"]


class ByGlobal(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * COUNT


class ByTable(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * scale_of_all()


class ByContext(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * SCALE.get()


class ByClass(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * Options.scale


class ByObject(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * getattr(OPTIONS, "scale")  # noqa: B009


class ByThread(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * LOCAL.scale


class ByModule(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * outside_state.scale


class ByImport(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from tests.model import outside_state as state

        return super().forward(x) * state.scale


class ByOwnClass(Block):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * type(self).scale


def set_all(value: float) -> None:
    global COUNT
    COUNT = TABLE["scale"] = Options.scale = OPTIONS.scale = outside_state.scale = value
    LOCAL.scale = ByOwnClass.scale = value
    SCALE.set(value)


class Setting(Stack):
    """Sets everything between its blocks, if it is asked to: else one is like the others."""

    def __init__(self, make: Callable[[int], nn.Module], values: list[float]) -> None:
        super().__init__(make, len(values))
        self.values = values

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for value, block in zip(self.values, self.blocks, strict=True):
            set_all(value)
            x = block(x)
        set_all(1.0)
        return self.head(x)


KINDS = [ByGlobal, ByTable, ByContext, ByClass, ByObject, ByThread, ByModule, ByImport, ByOwnClass]
# The last block sees what the first one saw, and so does the one in the middle.
VALUES = [1.0, 0.5, 1.0, 1.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_the_model_sets_between_blocks(kind: Any):
    record = port(Setting(kind, VALUES))
    assert (record.programs, record.shared) == (3, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_stays_costs_nothing(kind: Any):
    record = port(Setting(kind, [0.5] * 5))
    assert (record.programs, record.shared) == (1, 4)


class ByEnvironment(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(os.environ["SCALE_OF_BLOCKS"])


class Exporting(Stack):
    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for index, block in enumerate(self.blocks):
            os.environ["SCALE_OF_BLOCKS"] = str(1.0 + index // 2)
            x = block(x)
        return self.head(x)


def test_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCALE_OF_BLOCKS", "1")
    assert port(Exporting(lambda i: ByEnvironment())).programs == 3


class Swapped(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


FORWARD = Swapped.forward


def doubled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return FORWARD(self, x) * 2


class Swapping(Stack):
    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        try:
            for index, block in enumerate(self.blocks):
                Swapped.forward = doubled if index == 2 else FORWARD  # pyright: ignore
                x = block(x)
        finally:
            Swapped.forward = FORWARD
        return self.head(x)


def test_a_method_that_is_swapped_on_its_class():
    assert port(Swapping(lambda i: Swapped())).programs == 2


# -- what blocks change ----------------------------------------------------------------------------


def counting() -> Callable[[], int]:
    count = 0

    def number() -> int:
        nonlocal count
        count += 1
        return count

    return number


class Asks(Block):
    """Asks something else for a number at each call."""

    def forward(self, x: torch.Tensor, ask: Any) -> torch.Tensor:
        return super().forward(x) * (ask() if callable(ask) else next(ask))


class Count:
    """A counter, whose method is what blocks are given."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count


class Asked(Stack):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(lambda i: Asks())
        self.make = make

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        ask = self.make()
        for block in self.blocks:
            x = block(x, ask)
        return self.head(x)


MAKERS = {
    "closure": counting,
    "method": lambda: Count().next,
    "iterator": lambda: itertools.count(1),
    "generator": lambda: (i + 1 for i in range(9)),
    "list iterator": lambda: iter([1, 2, 3, 4, 5]),
}


@pytest.mark.parametrize("how", MAKERS)
def test_an_argument_that_counts(how: str):
    record = port(Asked(MAKERS[how]))
    assert record.shared == 0


class Counts(Block):
    """Counts the calls of all blocks, and does something else at one of them."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counts.calls += 1
        return super().forward(x) * (2 if Counts.calls == 3 else 1)


class CountsAnew(Stack):
    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        Counts.calls = 0
        return super().forward(x)


def test_blocks_that_count_their_calls():
    assert port(CountsAnew(Counts)).programs == 2


MEMO: dict[Any, Any] = {}


class Remembers(Block):
    """Keeps what it found out, which changes nothing for the others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape not in MEMO:
            MEMO[x.shape] = x.shape[-1] ** 0.5
        return super().forward(x) * MEMO[x.shape]


def test_blocks_that_remember_what_they_found_out_stay_one():
    MEMO.clear()
    record = port(Stack(Remembers))
    assert (record.programs, record.shared) == (1, 4)


# -- what nothing could watch ----------------------------------------------------------------------


class Spies(Block):
    """Reads a local variable of whoever calls it, which nothing could watch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frame: Any = sys._getframe()
        while "place_of_block" not in frame.f_locals:
            frame = frame.f_back
        return super().forward(x) * frame.f_locals["place_of_block"]


class SpiedOn(Stack):
    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for place_of_block, block in enumerate(self.blocks):  # noqa: B007
            x = block(x)
        return self.head(x)


def test_a_local_variable_of_the_caller():
    assert port(SpiedOn(Spies)).programs == 5


class Anything:
    """Gives something for each name, so that what it has in place of a `__dict__` is no dict."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0

    def __getattr__(self, name: str) -> object:
        return print


ANYTHING = Anything()


class ByAnything(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * ANYTHING.scale


def test_an_object_that_has_an_attribute_of_every_name(monkeypatch: pytest.MonkeyPatch):
    ported = tpuport.convert(ByAnything())
    x = torch.ones(2)
    assert tpuport.to_torch(ported(x)).tolist() == [2.0, 2.0]
    monkeypatch.setattr(ANYTHING, "scale", 3.0)
    assert tpuport.to_torch(ported(x)).tolist() == [3.0, 3.0]


class Registry:
    """A registry that a call replaces by a copy, with more names than are compared one by one."""

    def __init__(self, names: set[str]) -> None:
        self.names = set(names)


REGISTRIES = {"now": Registry({f"module_{i}" for i in range(5000)})}


@pytest.mark.parametrize("grows", [False, True])
def test_a_large_set_that_each_call_copies(grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRIES, "now", Registry(REGISTRIES["now"].names))

    def call(x: torch.Tensor) -> torch.Tensor:
        made = REGISTRIES["now"] = Registry(REGISTRIES["now"].names)
        made.names.add(f"later_{len(made.names)}" if grows else "later")
        return x * 2

    ported = tpuport.convert(call)
    if grows:
        with pytest.raises(PortError, match=r"TPU406 .* writes to what is outside"):
            ported(torch.ones(2))
        return
    for number in range(3):
        x = torch.full((2,), float(number))
        torch.testing.assert_close(ported(x).torch(), x * 2)
    assert not ported.report.retraces
