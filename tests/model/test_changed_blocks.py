"""Blocks that the model changes while it runs: each is what it is when it is called."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.model.repeated import Block, Stack, check, records, x_of


class Config:
    """What a block is told in an object."""

    def __init__(self) -> None:
        self.scale = 1.0


class Told(Block):
    """A block that reads what its model tells it before each call."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.scale = 1.0
        self.options: dict[str, Any] = {"scales": [1.0]}
        self.config = Config()
        self.table = np.ones(2)
        self.host = [torch.ones(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scale * self.options["scales"][0] * self.config.scale * float(self.table[1])
        return super().forward(x) * scale * self.host[0][0].item()


def tell(block: Any, i: int, kind: str) -> None:
    value = 1.0 + i / 8
    match kind:
        case "attribute":
            block.scale = value
        case "container":
            block.options["scales"][0] = value
        case "array":
            block.table[1] = value
        case "module":
            block.drop = nn.Tanh() if i % 2 else nn.Identity()


class Telling(Stack):
    def __init__(self, kind: str) -> None:
        super().__init__(Told)
        self.kind = kind

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for i, block in enumerate(self.blocks):
            tell(block, i, self.kind)
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("kind", ["attribute", "container", "array", "module"])
def test_a_block_that_was_changed_is_not_taken_for_another(kind: str):
    ported, found = check(Telling(kind), x_of())
    assert found == []
    (record,) = records(ported)
    assert record.programs == (2 if kind == "module" else 5)


def test_a_block_that_is_told_what_it_is_already_stays_one_of_many():
    class Again(Stack):
        def forward(self, x: torch.Tensor, *rest: Any) -> Any:
            block: Any
            for block in self.blocks:
                block.scale = float("1.0")
                block.options = {"scales": [1.0]}
                x = block(x)
            return self.head(x)

    assert check(Again(Told), x_of())[1] == [5]


def test_what_blocks_share_is_seen_to_change_for_all_of_them():
    shared = Config()

    class Sharing(Block):
        def __init__(self, index: int = 0) -> None:
            super().__init__()
            self.config = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.config.scale

    class Changing(Stack):
        def forward(self, x: torch.Tensor, *rest: Any) -> Any:
            for i, block in enumerate(self.blocks):
                shared_by: Any = self.blocks[0]
                shared_by.config.scale = 1.0 if i < 3 else 0.5
                x = block(x)
            return self.head(x)

    ported, _ = check(Changing(Sharing), x_of())
    (record,) = records(ported)
    assert (record.programs, record.shared) == (2, 3)
