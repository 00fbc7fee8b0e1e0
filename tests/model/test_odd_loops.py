"""Loops of blocks where something is read, or converted, that stands between them."""

from typing import Any

import torch
from torch import nn

from tests.model.repeated import Block, Stack, check, x_of


def test_what_reads_an_early_value_of_the_loop_comes_after_it():
    class Reads(Stack):
        def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            first = seen = x
            for i, block in enumerate(self.blocks):
                h = x * 2
                first = h if i == 0 else first
                x = block(h)
                seen = first.sin() if i == 1 else seen
            return self.head(x) + seen.sum()

    assert sum(check(Reads(Block), x_of())[1]) >= 3


def test_skips_that_are_converted_are_read_by_the_way_back():
    class Skips(Stack):
        def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            kept = []
            for block in self.blocks[:4]:
                x = block(x)
                kept.append(x.half())
            for block in self.blocks[4:]:
                x = block(x + kept.pop())
            return self.head(x)

    check(Skips(Block, 8), x_of())


def test_a_parameter_among_the_arguments_stays_one():
    class Asks(Block):
        def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            return super().forward(x) * (2 if isinstance(rest[0], nn.Parameter) else 1)

    class Gives(Stack):
        def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, self.head.weight)
            return self.head(x)

    check(Gives(Asks), x_of())
