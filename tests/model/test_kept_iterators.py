"""Iterators that a module keeps: a call that advances one has another item at each call."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError
from tpuport.foundation.pytree.kept_iterators import KeptIterator

MAKERS: dict[str, Callable[[], Iterator[float]]] = {
    "count": lambda: itertools.count(1.0),
    "cycle": lambda: itertools.cycle([1.0, 2.0, 3.0]),
    "list": lambda: iter([1.0, 2.0, 3.0]),
    "map": lambda: map(float, range(1, 9)),
    "generator": lambda: (float(number) for number in range(1, 9)),
}


class Steps(nn.Module):
    """Takes a factor at each call, from an iterator in a dict."""

    def __init__(self, made: Iterator[float], *, advances: bool = True) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(3, 3), {"factors": made, "calls": 0}
        self.advances = advances

    def forward(self, x: torch.Tensor) -> Any:
        self.held["calls"] = 1
        return self.linear(x) * (next(self.held["factors"]) if self.advances else 1)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("verify", [True, False])
def test_a_call_that_advances_one_is_refused_and_advances_none(kind: str, verify: bool) -> None:
    module = Steps(MAKERS[kind]())
    with pytest.raises(PortError, match="advances an iterator") as raised:
        tpuport.convert(module, verify=verify)(torch.ones(2, 3))
    assert raised.value.code == "TPU405"
    assert 'next(self.held["factors"])' in str(raised.value.source_line)
    assert next(module.held["factors"]) == 1.0


def test_under_porting_the_layers_inside_are_programs() -> None:
    module, x = Steps(MAKERS["generator"]()), torch.ones(2, 3)
    want = [module.linear(x) * factor for factor in (1.0, 2.0, 3.0)]
    with tpuport.porting() as run:
        module = module.cuda()
        with pytest.warns(UserWarning, match="advances an iterator"):
            found = [module(x.cuda())]
        found += [module(x.cuda()) for _ in range(2)]
    assert [program.model for program in run.report.programs] == ["Linear"]
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_one_that_no_call_advances_stays_the_users() -> None:
    """Also where the call changes what holds it."""
    x = torch.ones(2, 3)
    with tpuport.porting():
        module = Steps(MAKERS["count"](), advances=False).cuda()
        module(x.cuda())
    assert module.held["calls"] == next(module.held["factors"]) == 1
    ported = tpuport.convert(Steps(MAKERS["list"](), advances=False), verify=False)
    ported(x)
    assert not isinstance(ported.module.held["factors"], KeptIterator)
