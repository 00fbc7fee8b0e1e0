"""Python numbers that are made of draws: their bounds choose an item of a list."""

import math
import random
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


class DropsColumns(torch.nn.Module):
    """Drop columns as SpecAugment does: how many is drawn, and then where they begin."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = int((x[:, 0] > 0).sum())
        kept = x.clone()
        width = torch.randint(low=1, high=4, size=(1,))[0]
        first = torch.randint(low=0, high=x.shape[1] - width, size=(1,))[0]
        kept[:, first : first + width] = 0
        second = random.randint(2, 3)
        kept[:, second : second + random.randrange(1, second)] = -1
        # As in a choice of negatives among what there is.
        some = torch.randint(count, count + 2, (40,))
        like = torch.randint_like(x, -count, count)
        # As many as data decides, for the rows that it selects.
        like[x[:, 0] > 0] = torch.randint(5, 7, size=(count, 6)).float()
        return kept, some, like, x[torch.randint(0, count, ())]


def test_bounds_of_whole_numbers_may_be_drawn_or_depend_on_data():
    """The comparison of each first call has eager PyTorch draw the same numbers."""
    port = tpuport.convert(DropsColumns())
    seen: set[tuple[int, ...]] = set()
    for count in (1, 3):
        x = torch.ones(4, 6)
        x[count:, 0] = -1
        for _ in range(12):
            kept, some, like, row = map(tpuport.to_torch, port(x))
            seen.add(tuple(int((kept == value).sum()) for value in (0, -1)))
            assert set(some.tolist()) == {count, count + 1}
            assert set(like[:count].flatten().tolist()) <= {5.0, 6.0}
            assert -count <= int(like[count:].min()) <= int(like[count:].max()) < count
            assert torch.equal(row, torch.ones(6))
    assert len(seen) > 4
    assert port.report.retraces == []
    with pytest.raises(RuntimeError, match="'from' to be less than 'to'"):
        port(-torch.ones(4, 6))


def test_an_empty_range_of_pythons_random_is_its_error():
    def draw(x: torch.Tensor) -> torch.Tensor:
        return x + random.randint(2, int(x.sum()))

    port = tpuport.convert(draw)
    assert 4 <= float(tpuport.to_torch(port(torch.full((1,), 4.0)))) - 2 <= 8
    with pytest.raises(ValueError, match="empty range"):
        port(torch.ones(1))
