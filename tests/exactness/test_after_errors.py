"""What a call that raises leaves behind is what eager PyTorch leaves behind."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import assert_same, normal


class _Counts(nn.Module):
    """Writes a buffer, an attribute and its argument, draws a number, and then raises for nan."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        is_bad = x.isnan().any()
        x.nan_to_num_(7.0)
        self.seen = self.seen + (torch.rand(()) < 2)
        if is_bad:
            self.seen *= 2
            raise ValueError("nan")
        self.seen += 5
        return self.linear(x) * self.calls + self.seen


class _TooFew(nn.Module):
    """Raises for a batch of one, whose size the trace knows; batch norm counts it before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


_X = normal(3, 4)
_BAD = _X.clone()
_BAD[1, 2] = torch.nan
_CASES = [(_Counts, _BAD), (_TooFew, _X[:1])]


def _outcome(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    try:
        return tpuport.to_torch(call(x)).detach()
    except ValueError as error:
        return str(error)


@contextmanager
def _ported(module: nn.Module) -> Iterator[tuple[Any, Callable[[], dict[str, Any]]]]:
    ported = tpuport.convert(module, verify=False)
    yield ported, lambda: ported.buffers
    assert not hasattr(module, "calls") or module.calls == 0


@contextmanager
def _emulated(module: nn.Module) -> Iterator[tuple[Any, Callable[[], dict[str, Any]]]]:
    with tpuport.porting():
        module = module.to("cuda")
        yield module, lambda: dict(module.named_buffers())


@pytest.mark.parametrize("way", [_ported, _emulated])
@pytest.mark.parametrize(("made", "bad"), _CASES)
def test_a_call_that_raises_leaves_what_it_wrote(made: Any, bad: torch.Tensor, way: Any):
    eager = made()
    with way(copy.deepcopy(eager)) as (ported, buffers):
        for x in (_X, bad, _X * 2):
            theirs, ours = x.clone(), x.clone().to("cuda" if way is _emulated else "cpu")
            want, got = _outcome(eager, theirs), _outcome(ported, ours)
            assert isinstance(want, str) == isinstance(got, str)
            if isinstance(want, str):
                assert got.startswith(want)
            else:
                assert_same(got, want, "result")
            assert_same(ours, theirs, "argument")
            ours_now = buffers()
            for name, value in eager.named_buffers():
                assert_same(ours_now[name], value, name)
