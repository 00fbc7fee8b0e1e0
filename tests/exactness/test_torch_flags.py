"""Flags of torch that code reads: a call after a change of one gives what eager gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tpuport

_FLAGS = {
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
        True,
    ),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "threads": (torch.get_num_threads, torch.set_num_threads, 3),
    "cudnn": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        True,
    ),
}


@pytest.mark.parametrize("name", _FLAGS)
def test_a_changed_flag_is_seen(name: str) -> None:
    read: Callable[[], Any]
    read, write, other = _FLAGS[name]
    before = read()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if read() == before else x * 3

    ported, x = tpuport.convert(function), torch.ones(2)
    try:
        for value in (before, other, before):
            write(value)
            assert torch.equal(tpuport.to_torch(ported(x)), function(x)), value
    finally:
        write(before)
