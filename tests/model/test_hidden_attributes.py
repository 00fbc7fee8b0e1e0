"""Attributes in which blocks differ, and tensors and values that only look the same."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.model.repeated import DIM, Block, Stack, port, x_of

# Each reads the attribute `index`, which differs.
READS = {
    "get": lambda self: self.__dict__.get("index"),
    "item": lambda self: vars(self)["index"],
    "in": lambda self: self.index if "index" in self.__dict__ else 0,
    "items": lambda self: dict(self.__dict__.items())["index"],
    "values": lambda self: [v for v in self.__dict__.values() if type(v) is int][0],  # noqa: RUF015
    "copy": lambda self: self.__dict__.copy()["index"],
    "dict": lambda self: dict(vars(self))["index"],
    "unpacked": lambda self: {**vars(self)}["index"],
    "copied": lambda self: copy.copy(self).index,
    "getattr": lambda self: getattr(self, "index"),  # noqa: B009
    "object": lambda self: object.__getattribute__(self, "__dict__")["index"],
}


class Reads(Block):
    def __init__(self, index: int, how: str) -> None:
        super().__init__(index)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + READS[self.how](self) / 8)


@pytest.mark.parametrize("how", READS)
def test_an_attribute_that_is_read_in_some_way_tells_blocks_apart(how: str):
    record = port(Stack(lambda i: Reads(i, how)))
    assert record.shared == 0


class Looks(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(vars(self)) == len(list(self.__dict__)) == len(self.__dict__.keys())
        assert self.__dict__.get("other", 3) == 3
        assert "index" in vars(self)
        return super().forward(x)


def test_a_look_at_the_names_of_attributes_reads_none_of_them():
    record = port(Stack(Looks))
    assert (record.programs, record.shared) == (1, 4)


class Inner(Stack):
    """A block with blocks in it, each of which knows where it stands."""

    def __init__(self, index: int) -> None:
        super().__init__(lambda i: Reads(10 * index * (index % 2) + i, "get"), 3)
        self.head = nn.Linear(DIM, DIM)


def test_attributes_of_blocks_in_blocks_tell_both_apart():
    assert is_eagers(Stack(Inner, 4))


def is_eagers(model: nn.Module) -> bool:
    """Whether a port whose blocks are loops gives what eager PyTorch gives."""
    ported = tpuport.convert(model, blocks="scan", verify=False)
    got = tpuport.to_torch(ported(x_of()))
    return torch.allclose(got, model(x_of()), rtol=1e-4, atol=1e-4)


class Shown(Inner):
    """Sets an attribute of the blocks in it for the time of a call."""

    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for i, block in enumerate(self.blocks):
            block.index = i * 2
            x = block(x)
            block.index = 0
        return self.head(x)


def test_attributes_that_a_block_sets_on_those_in_it():
    assert is_eagers(Stack(Shown, 4))


# -- tensors ---------------------------------------------------------------------------------------


class Tells(Block):
    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if w is self.up.weight else 1)


class Handing(Stack):
    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for block in self.blocks:
            x = block(x, block.up.weight)
        return self.head(x)


def test_a_block_that_is_handed_its_own_weight():
    assert port(Handing(lambda i: Tells())).programs == 1


class AsksWhere(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.storage_offset() else 1)


class Cutting(Stack):
    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for block in self.blocks:
            x = block(torch.cat([x, x], 1)[:, x.shape[1] :])
        return self.head(x)


def test_a_block_that_asks_where_an_argument_lies():
    assert port(Cutting(AsksWhere)).programs == 1
    assert port(Cutting(Block)).programs == 1


class Marked(list[Any]):
    factor = 1.0


class Reading(Block):
    def forward(self, x: torch.Tensor, marked: Any) -> torch.Tensor:
        return super().forward(x) * marked.factor


class Marking(Stack):
    def forward(self, x: torch.Tensor, *rest: Any) -> Any:
        for i, block in enumerate(self.blocks):
            marked = Marked()
            marked.factor = 1 + i / 8
            x = block(x, marked)
        return self.head(x)


def test_a_list_with_attributes_as_an_argument():
    assert port(Marking(Reading)).shared == 0


class Signed(Block):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.zero = -0.0 if index else 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * math.copysign(1, self.zero)


def test_zeros_of_two_signs_tell_blocks_apart():
    assert port(Stack(Signed)).programs == 2
