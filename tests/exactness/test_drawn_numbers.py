"""Python numbers that are made of draws: their bounds choose an item of a list."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tpuport


def by_uniform(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Choose as torchvision's detection models choose the size of an image."""
    index = int(torch.empty(1).uniform_(0.0, float(len(sizes))).item())
    return x * sizes[index]


def by_rand(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    return x * sizes[math.floor(torch.rand(1).item() * len(sizes))]


def by_whole_numbers(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    place = torch.empty(2, 2).uniform_(0, len(sizes))[1, 0].long()
    return x * sizes[int(place)]


@pytest.mark.parametrize("choose", [by_uniform, by_rand, by_whole_numbers])
@pytest.mark.parametrize("sizes", [[3], [2, 5, 7]])
def test_an_item_is_chosen(choose: Callable[..., Any], sizes: list[int]) -> None:
    ported = tpuport.convert(choose)
    x = torch.ones(2)
    found = [tpuport.to_torch(ported(x, sizes)).tolist() for _ in range(12)]
    assert {tuple(one) for one in found} <= {(float(s), float(s)) for s in sizes}
    assert len({tuple(one) for one in found}) > (len(sizes) > 1)


def written_since(x: torch.Tensor) -> torch.Tensor:
    index = torch.empty(1).uniform_(0.0, 1.0)
    index += x[:1]
    return x * int(index.item())


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    index = torch.empty(2).uniform_(0.0, 1.0)
    index[0] = x[0]
    return x * int(index[0].item())


def from_below_zero(x: torch.Tensor) -> torch.Tensor:
    index = torch.empty(1).uniform_(-4.0, -2.0)
    return x * (3 if index.item() > 0 else int(index.item()))


@pytest.mark.parametrize("function", [written_since, written_through_a_view])
def test_bounds_end_with_a_write(function: Callable[..., Any]) -> None:
    ported = tpuport.convert(function)
    for first in (2.0, 5.0):
        x = torch.tensor([first, 1.0])
        torch.testing.assert_close(tpuport.to_torch(ported(x)), function(x))


def test_bounds_below_zero() -> None:
    ported = tpuport.convert(from_below_zero)
    found = {float(tpuport.to_torch(ported(torch.ones(1)))) for _ in range(12)}
    assert found <= {-4.0, -3.0, -2.0}
