"""Every kind of call has its last one traced too, which shows what nothing can watch."""

import sys
from typing import Any

import pytest
import torch

from tests.model.repeated import Block, Stack, port
from tpuport.tracing.scan_layers.call_order import LastCalls


class Spies(Block):
    """Reads a local variable of whoever calls it, which nothing could watch."""

    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        frame: Any = sys._getframe()
        while "seen_by_blocks" not in frame.f_locals:
            frame = frame.f_back
        return super().forward(x) * frame.f_locals["seen_by_blocks"]


class Turns(Stack):
    """Calls every other block with an argument; those without it see another number at the end."""

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for i, block in enumerate(self.blocks):
            seen_by_blocks = 2 if i == len(self.blocks) - 2 else 1  # noqa: F841
            x = block(x, "other") if i % 2 else block(x)
        return self.head(x)


class Reversed(Stack):
    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for i, block in enumerate(reversed(self.blocks)):
            seen_by_blocks = 1 if i < len(self.blocks) - 1 else 2  # noqa: F841
            x = block(x)
        return self.head(x)


class Rounds(Stack):
    """Calls all of its blocks twice; those of the second round see another number."""

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for seen_by_blocks in (1, 2):  # noqa: B007
            for block in self.blocks:
                x = block(x)
        return self.head(x)


@pytest.mark.parametrize("kind", [Turns, Reversed, Rounds])
def test_the_last_call_of_each_kind_is_compared(kind: Any):
    record = port(kind(Spies, 6))
    assert "it differs from blocks.0, for no recorded reason" in record.reason


@pytest.mark.parametrize(
    ("order", "compared"),
    [
        ([0, 1, 2, 3, 4, 5], [5]),
        ([5, 4, 3, 2, 1, 0], [5]),
        ([0, 2, 4], [2]),
        ([1, 3, 5], [2]),
        ([0, 1, 2, 4, 5], [3, 4]),
        ([0, 1, 2, 3, 4, 5] * 5, [5, 11, 23]),
        ([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], [5, 10, 11]),
        ([3, 0, 5, 1, 4, 2], [1, 3, 5]),
        ([0, 1], []),
    ],
)
def test_which_call_may_be_the_last_one(order: list[int], compared: list[int]):
    first, *rest = order
    calls = LastCalls({str(place): place for place in range(6)}, first)
    assert [i for i, p in enumerate(rest, 1) if calls.is_to_compare(str(p))] == compared
