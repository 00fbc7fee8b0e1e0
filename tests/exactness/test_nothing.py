"""Reductions of no elements: the value or the error that eager PyTorch has, by its class.

Contents:
    test_reductions_*   of rows that a mask selects, and of a slice without rows
    test_a_trace_*      a trace that never ends names the line that it tried last
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tpuport
from tpuport import PortError
from tpuport.tracing.session import tracer

REDUCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{name: getattr(torch.Tensor, name) for name in ("argmax", "argmin", "max", "min", "amax")},
    **{name: getattr(torch.Tensor, name) for name in ("amin", "mean", "prod", "median")},
    "amax along": lambda r: r.amax(0),
    "amax along all": lambda r: r.amax((0,)),
    "argmax along": lambda r: r.argmax(0),
    "max along": lambda r: r.max(0)[0],
    "norm": lambda r: torch.linalg.vector_norm(r, float("inf")),
}


def outcome(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    try:
        return repr(tpuport.to_torch(function(x)))
    except (RuntimeError, IndexError) as error:
        return type(error)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_nothing(name: str):
    reduction, x = REDUCTIONS[name], torch.tensor([1.0, 2.0])
    selected: list[Callable[[torch.Tensor], Any]] = [lambda x: reduction(x[:0])]
    if name != "median":  # refused
        selected.append(lambda x: reduction(x[x > 5]))
    for function in selected:
        assert outcome(tpuport.convert(function), x) == outcome(function, x)


def test_a_trace_that_does_not_settle_names_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tracer, "_MAX_ATTEMPTS", 1)

    def function(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = x * 2
        return x

    with pytest.raises(PortError, match="did not settle after 1 attempts") as caught:
        tpuport.convert(function)(torch.ones(2))
    assert caught.value.source_line == "if x.sum() > 0:"
    assert "leave the class to eager" in caught.value.remedy
