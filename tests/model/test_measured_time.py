"""Times that a forward measures: a program would give those of its trace at every call."""

import gc
import random
import secrets
import time
import uuid
import warnings
from datetime import date, datetime
from time import perf_counter as now
from time import time_ns
from timeit import default_timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpuport
from tpuport.foundation.errors import PortError
from tpuport.model import moments
from tpuport.tracing.core.measured_time import MeasuredSeconds, MeasuredTicks, measured

BORN = time.time()


class Timed(nn.Module):
    """A layer that measures how long it takes, and does with it what `mode` says."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.layer = mode, nn.Linear(3, 3)

    def forward(self, x):
        start, ticks = time.perf_counter(), time.time_ns()
        y = self.layer(x)
        took = round((time.perf_counter() - start) * 1e3, 2)
        if self.mode == "result":
            return {"y": y, "times": (took,)}
        if self.mode == "ticks":
            return y, (time.time_ns() - ticks) // 1000
        if self.mode == "attribute":
            self.took = 0.5 + took
        if self.mode == "inside" and took > 1e9:
            y = y * 2
        self.text = "slow" if took > 1e9 else "fast"
        return y


@pytest.mark.parametrize(
    ("mode", "what"),
    [("result", "the result"), ("ticks", "the result"), ("attribute", "the attribute 'took'")],
)
def test_a_time_that_leaves_the_call_is_refused(mode: str, what: str) -> None:
    with pytest.raises(PortError, match=f"{what} holds a time") as raised:
        tpuport.convert(Timed(mode))(torch.ones(2, 3))
    assert raised.value.code == "TPU402"
    assert "--eager" in (raised.value.remedy or "")
    assert "time." in str(raised.value.source_line)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda x: (x, now()), "the result holds"),
        (lambda x: (x, default_timer()), "the result holds"),
        (lambda x: x * (now() % 1), "an operation of torch gets"),
        (lambda x: torch.full((3,), fill_value=time_ns()) + x, "an operation of torch gets"),
        (lambda x: (torch.manual_seed(time_ns()), torch.rand(3) * x)[1], "an operation of torch"),
    ],
)
def test_clocks_that_code_imported_by_name_are_seen(use, what: str) -> None:
    held = now, time_ns, default_timer
    with pytest.raises(PortError, match=f"{what} .*a time") as raised:
        tpuport.convert(use, verify=False)(torch.ones(3))
    assert raised.value.code == "TPU402"
    assert held == (now, time_ns, default_timer) == (time.perf_counter, time.time_ns, now)


CLOCKS = {"now": time.time}


class Held(nn.Module):
    """Keeps a clock in an attribute, as benchmarks do that replace it in tests."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.clocks = time.time, [time.monotonic]


def by_default(clock=time.time):
    return clock()


@pytest.mark.parametrize(
    "read",
    [
        lambda m: float(time.time()),
        lambda m: int(time.time()) % 1000,
        lambda m: float(f"{time.time():.3f}"),
        lambda m: datetime.now().timestamp(),
        lambda m: (datetime.now() - datetime(2020, 1, 1)).days,
        lambda m: float(datetime.now().strftime("%S")),
        lambda m: date.today().toordinal(),
        lambda m: float(time.strftime("%M")),
        lambda m: time.localtime().tm_min,
        lambda m: time.gmtime().tm_hour,
        lambda m: float(time.ctime()[17:19]),
        lambda m: 2.0 if time.time() > BORN + 3600 else 1.0,
        lambda m: m.clock(),
        lambda m: m.clocks[0](),
        lambda m: CLOCKS["now"](),
        lambda m: by_default(),
        lambda m: uuid.uuid4().int % 1000,
        lambda m: secrets.randbelow(1000),
        lambda m: random.SystemRandom().random(),
    ],
)
def test_a_program_of_one_moment_is_refused(read) -> None:
    class Reads(Held):
        def forward(self, x):
            return x * read(self)

    module = Reads()
    with pytest.raises(PortError, match=r"a time|a random number of the system") as raised:
        tpuport.convert(module, verify=False)(torch.ones(3))
    assert raised.value.code == "TPU402"
    assert __file__ in str(raised.value)
    assert (module.clock, module.clocks) == (time.time, [time.monotonic])
    assert {time.time} == set(CLOCKS.values()) == set(by_default.__defaults__ or ())


def test_a_date_that_leaves_the_call_is_refused() -> None:
    with pytest.raises(PortError, match="depends on a time") as raised:
        tpuport.convert(lambda x: (x + 1, datetime.now()))(torch.ones(3))
    assert raised.value.code == "TPU402"


def test_a_clock_that_is_only_looked_at_is_no_worse() -> None:
    def function(x):
        started = datetime.now()
        warnings.warn(f"{float(time.time()):.1f} {started:%H:%M}", stacklevel=1)
        born = datetime(2020, 1, 2)
        is_known = isinstance(born, datetime) and isinstance(started, date)
        assert isinstance(started, datetime)
        assert type(born + (started - started)) is type(born)
        assert issubclass(datetime, date)
        return x * born.day * is_known

    ported = tpuport.convert(function, verify=False)
    with pytest.warns(UserWarning, match=":"):
        assert ported(torch.ones(2)).tolist() == [2.0, 2.0]
    assert ported(torch.ones(2)).tolist() == [2.0, 2.0]
    assert (type(datetime.now()), date.today().year) == (datetime, time.localtime().tm_year)


def test_a_time_that_stays_inside_is_no_worse() -> None:
    module, x = Timed("inside"), torch.ones(2, 3)
    ported = tpuport.convert(module)
    torch.testing.assert_close(tpuport.to_torch(ported(x)), module(x))
    assert (type(time.time()), type(time.time_ns())) == (float, int)


def test_under_porting_the_layers_inside_are_programs() -> None:
    with tpuport.porting() as run:
        net = Timed("result").cuda()
        with pytest.warns(UserWarning, match="holds a time"):
            first = net(torch.ones(2, 3).cuda())
        second = net(torch.ones(2, 3).cuda())
    assert type(first["times"][0]) is type(second["times"][0]) is float
    assert [program.model for program in run.report.programs] == ["Linear"]


def test_arithmetic_keeps_what_a_number_is() -> None:
    second, tick = measured(2.5, "here:1"), measured(7, "here:2")
    for number in (second + 1, 1 - second, second * tick, -second, tick / 2, abs(second) // 1):
        assert isinstance(number, MeasuredSeconds)
    assert isinstance(tick % 4, MeasuredTicks)
    assert isinstance(round(second), MeasuredTicks)
    assert (tick % 4, (2 * second).place) == (3, "here:1")
    assert not isinstance(second > 1, MeasuredTicks)
    assert measured(True, "here:3") is True


class Doubled(torch.autograd.Function):
    """A function with a derivative of its own, which leaves a tensor in a list."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        del ctx
        seen.append(x.detach().sum())
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:
        del ctx
        return grad * 2, None


class TimedFunction(torch.nn.Module):
    """Code that reads a time, or computes with it, and has a derivative not to be compared."""

    def __init__(self, computes: bool) -> None:
        super().__init__()
        self.computes, self.weight = computes, nn.Parameter(torch.tensor([1.0, -2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        now, seen = float(time.time()), []
        y = checkpoint(Doubled.apply, x * self.weight, seen, use_reentrant=False) + sum(seen)
        return y * (now % 1000) if self.computes else y


def test_derivatives_that_cannot_be_compared_are_no_reason_to_refuse() -> None:
    x = torch.ones(2)
    ported = tpuport.convert(TimedFunction(computes=False))
    torch.testing.assert_close(tpuport.to_torch(ported(x)), ported.module(x))
    with pytest.raises(PortError, match="depends on a time"):
        tpuport.convert(TimedFunction(computes=True), verify=False)(x)


def test_a_collection_of_garbage_reads_no_clock_for_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moments, "at_another_time", None)  # a second trace would call it

    def timed(phase: str, info: Any) -> None:
        del phase, info
        time.perf_counter()

    def function(x: torch.Tensor) -> torch.Tensor:
        gc.collect(0)  # that of all that lives takes seconds in a process of tests
        return x + 1

    gc.callbacks.append(timed)
    try:
        assert tpuport.convert(function)(torch.ones(2)).tolist() == [2.0, 2.0]
    finally:
        gc.callbacks.remove(timed)


class _Program:
    """A program that equals those of the same text, as far as its rules can be compared at all."""

    def __init__(self, text: str, *, compares: bool = True) -> None:
        self.text, self.compares = text, compares
        changes = SimpleNamespace(after={})
        self.outcome = SimpleNamespace(
            out_spec=SimpleNamespace(key=()), state={}, python_changes=changes
        )
        self.run = self

    def same(self, other: "_Program") -> bool:
        return self.compares and other.compares and self.text == other.text

    def reads_like(self, other: "_Program") -> bool:
        return self.text == other.text


@pytest.mark.parametrize(
    ("made", "again", "likewise", "is_same"),
    [
        ("a", "a", "a", True),
        ("first", "b", "b", True),
        ("a", "b", "a", False),
        ("first", "b", "c", False),
    ],
)
@pytest.mark.parametrize("compares", [True, False])
def test_a_first_trace_that_is_unlike_all_later_ones(
    made: str,
    again: str,
    likewise: str,
    is_same: bool,
    compares: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moments, "release", lambda outcome: None)
    first, second, third = (_Program(x, compares=compares) for x in (made, again, likewise))
    found: Any = moments.is_same_program
    assert found(first, second, lambda: third) is is_same
