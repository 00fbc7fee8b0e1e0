"""What a report says of blocks that could not be one: which state it is."""

import contextvars
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.model.repeated import Block, Stack, x_of

HERE = __name__
COUNT = 0
NUMBERS = itertools.count(1)
TABLE: dict[str, Any] = {"count": 0}
CONTEXT: contextvars.ContextVar[int] = contextvars.ContextVar("CONTEXT", default=0)


class Counter:
    """Is asked for numbers."""

    total = 0

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        self.count += 1
        return self.count


COUNTER = Counter()


def of_class() -> int:
    Counter.total += 1
    return Counter.total


def of_global() -> int:
    global COUNT
    COUNT += 1
    return COUNT


def of_table() -> int:
    TABLE["count"] += 1
    return TABLE["count"]


def of_context() -> int:
    CONTEXT.set(CONTEXT.get() + 1)
    return CONTEXT.get()


def of_environment() -> int:
    os.environ["COUNT_OF_BLOCKS"] = str(int(os.environ.get("COUNT_OF_BLOCKS", "0")) + 1)
    return int(os.environ["COUNT_OF_BLOCKS"])


class Asks(Block):
    """Asks for a number at each call."""

    def __init__(self, ask: Callable[[], int]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.ask()


class FromGlobal(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * next(NUMBERS)


def detail(model: nn.Module) -> str:
    """What the report says of a model's blocks, without numbers compared: counts go on."""
    ported = tpuport.convert(model, blocks="once", verify=False)
    ported(x_of())
    (blocks,) = ported.report.blocks
    assert blocks.reused == 0
    return blocks.reason


CHANGES = "blocks.0: it changes Python state outside of its modules: "
REASONS: dict[str, tuple[Callable[[], int], str]] = {
    "object": (lambda: COUNTER.next(), "`count` of a Counter"),
    "method": (COUNTER.next, "`count` of a Counter"),
    "class": (of_class, f"`total` of {HERE}.Counter"),
    "global": (of_global, f"`COUNT` of {HERE}"),
    "table": (of_table, f"'count' in `TABLE` of {HERE}, a dict"),
    "context": (of_context, "`CONTEXT`, a ContextVar"),
    "environment": (of_environment, "a variable of the environment"),
    "partial": (functools.partial(of_global), f"`COUNT` of {HERE}"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_counter_is_named(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COUNT_OF_BLOCKS", "0")
    ask, reason = REASONS[name]
    assert detail(Stack(lambda i: Asks(ask), 3)) == CHANGES + reason


def test_an_iterator_is_named():
    reason = detail(Stack(lambda i: FromGlobal(), 3))
    assert reason == (
        f"blocks.0: it reads `NUMBERS` of {HERE}, a count, whose next value cannot be known"
    )


class Scaled(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * TABLE["count"]


class Scaling(Stack):
    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for number, block in enumerate(self.blocks):
            TABLE["count"] = number // 2
            x = block(x)
        return self.head(x)


def test_what_changes_between_blocks_is_named():
    ported = tpuport.convert(Scaling(lambda i: Scaled(), 4), blocks="once", verify=False)
    ported(x_of())
    (blocks,) = ported.report.blocks
    assert (blocks.traced, blocks.reused, blocks.reason) == (2, 2, "")
    assert blocks.changed == f"'count' in `TABLE` of {HERE}, a dict"
    assert "traced again for a change of" in ported.report.to_html()
