"""Ctrl-C in a call: it is raised, nothing stays patched, and the next call is eager's."""

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch

import tpuport
from tpuport.tracing.session import activate


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Set Python's own handler: a shell ignores Ctrl-C for what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Net(nn.Module):
    """A network with state, which calls a function in the middle of its forward."""

    def __init__(self, between: Callable[[], None]) -> None:
        super().__init__()
        self.norm, self.between = nn.BatchNorm1d(3), between
        self.calls, self.last = 0, torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        out = self.norm(x) + self.last
        self.between()
        self.last = out.detach().mean(0)
        return out * 2


def nothing() -> None:
    pass


def interrupt_once() -> Callable[[], None]:
    left = queue.SimpleQueue[int]()  # a list would be put back with what the call had changed
    left.put(1)

    def interrupt() -> None:
        if not left.empty():
            left.get()
            signal.raise_signal(signal.SIGINT)

    return interrupt


def check_next_calls(ported: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Compare two calls with those of a network that was not called before."""
    eager = Net(nothing)
    for x in torch.arange(24.0).reshape(2, 4, 3):
        torch.testing.assert_close(ported(x), eager(x).detach())


def check_nothing_is_left() -> None:
    assert not _python_dispatch._get_current_dispatch_mode_stack()
    assert not torch.overrides._get_current_function_mode_stack()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def names_of_torch() -> dict[tuple[str, str], int]:
    """Return the identity of what each name of torch is bound to."""
    owners = (torch, torch.Tensor, nn.Module, nn.functional, nn.BatchNorm1d)
    return {(one.__name__, name): id(value) for one in owners for name, value in vars(one).items()}


def called(ported: tpuport.PortedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: tpuport.to_torch(ported(x))


def test_an_interrupt_in_forward_changes_nothing():
    tpuport.convert(Net(nothing), verify=False)(torch.ones(4, 3))  # torch itself loads some late
    ported = tpuport.convert(Net(interrupt_once()), verify=False)
    before = names_of_torch()
    with pytest.raises(KeyboardInterrupt):
        ported(torch.ones(4, 3))
    check_nothing_is_left()
    assert names_of_torch() == before
    check_next_calls(called(ported))


def test_an_interrupt_as_a_trace_ends_leaves_no_mode(monkeypatch: pytest.MonkeyPatch):
    interrupt, mode = interrupt_once(), activate.DispatchMode
    leave = mode.__exit__

    def interrupted(self: activate.DispatchMode, *error: object) -> None:
        interrupt()  # as Python raises it, before the first line of a function
        leave(self, *error)

    monkeypatch.setattr(mode, "__exit__", interrupted)
    ported = tpuport.convert(Net(nothing), verify=False)
    with pytest.raises(KeyboardInterrupt):
        ported(torch.ones(4, 3))
    check_nothing_is_left()
    check_next_calls(called(ported))


def test_an_interrupt_as_the_state_is_given_back_leaves_it_whole(monkeypatch: pytest.MonkeyPatch):
    ported = tpuport.convert(Net(nothing), verify=False)
    interrupt, advance = interrupt_once(), type(ported)._advance

    def interrupted(self: tpuport.PortedModel, *given: Any) -> None:
        interrupt()
        advance(self, *given)

    monkeypatch.setattr(type(ported), "_advance", interrupted)
    x = torch.arange(12.0).reshape(4, 3)
    with pytest.raises(KeyboardInterrupt):
        ported(x)
    after, eager = ported.to_torch(), Net(nothing)
    eager(x)
    assert after.calls == eager.calls
    torch.testing.assert_close(after.last, eager.last.detach())
    torch.testing.assert_close(after.state_dict(), eager.state_dict())


def test_an_interrupt_under_porting_leaves_no_mode():
    with tpuport.porting():
        net = Net(interrupt_once()).to("cuda")
        net.last = net.last.to("cuda")
        with pytest.raises(KeyboardInterrupt):
            net(torch.ones(4, 3, device="cuda"))
    check_nothing_is_left()


def test_a_second_interrupt_is_raised_at_once():
    def both() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        tpuport.convert(Net(both), verify=False)(torch.ones(4, 3))
    check_nothing_is_left()


def test_a_handler_of_the_users_own_is_left_alone():
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        ported = tpuport.convert(Net(interrupt_once()), verify=False)
        check_next_calls(called(ported))
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_other_threads_trace_as_before():
    found: list[Exception | None] = []

    def run() -> None:
        try:
            check_next_calls(called(tpuport.convert(Net(nothing), verify=False)))
            found.append(None)
        except Exception as error:  # shown by the assertion below
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [None]
