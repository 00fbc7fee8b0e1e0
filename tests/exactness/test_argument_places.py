"""Where an argument begins in memory: equal to eager, or refused where the code asks for it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tpuport
from tpuport.foundation.errors import PortError

ASKS: list[Callable[[Any], Any]] = [
    lambda x: x * x.storage_offset(),
    lambda x: x * x[1:].storage_offset(),
    lambda x: x.as_strided((2,), (1,), 2),
    lambda x: torch.as_strided(x.view(2, 2), (2,), (1,), 0),
]


@pytest.mark.parametrize("function", ASKS)
def test_a_place_in_memory_is_that_of_eager_or_refused(function: Callable[..., torch.Tensor]):
    ported = tpuport.convert(function, (torch.arange(4.0),))
    for begin in (0, 2, 0, 1):
        x = torch.arange(8.0)[begin : begin + 4]
        if begin:
            with pytest.raises(PortError, match="begins inside of its storage"):
                ported(x)
            assert torch.equal(tpuport.to_torch(ported(x.clone())), function(x.clone()))
        else:
            assert torch.equal(tpuport.to_torch(ported(x)), function(x))


def test_windows_without_a_place_take_any_argument():
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        inner = y.as_strided((2,), (1,), y[1:].storage_offset())
        return x.as_strided((2,), (1,)) + inner + x[1:3].view(2)

    ported = tpuport.convert(function, (torch.arange(4.0),))
    for begin in (0, 2, 1):
        x = torch.arange(8.0)[begin : begin + 4]
        assert torch.equal(tpuport.to_torch(ported(x)), function(x))
