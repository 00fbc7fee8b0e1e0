"""What code reads outside of a module, where it is behind a decorator that others share."""

import functools

import pytest
import torch
from torch import nn

import tpuport
from tpuport.tracing.guards.code_reads import CodeReads

FACTORS = {"first": 2.0, "second": 3.0}


def logged(forward):
    @functools.wraps(forward)
    def call(self, x):
        return forward(self, x)

    return call


class First(nn.Module):
    @logged
    def forward(self, x):
        return x * FACTORS["first"]


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = First(), None

    @logged
    def forward(self, x):
        y = self.inner(x) * SECOND
        if self.last is not None:
            y = y + self.last
        self.last = x
        return y


SECOND = 5.0


def test_each_function_that_one_decorator_makes_is_followed():
    reads = CodeReads([Second()])
    names = {name for _, name in reads.places.values()}
    assert {"SECOND", "FACTORS"} <= names
    assert reads.reads("last")


def test_equal_code_of_two_files_reads_the_globals_of_both():
    text = "def f():\n    return NAME\n"
    spaces = [{"NAME": number} for number in range(2)]
    for space in spaces:
        exec(compile(text, "one.py", "exec"), space)
    reads = CodeReads([space["f"] for space in spaces])
    assert [space["NAME"] for space, _ in reads.places.values()] == [0, 1]


def counted(function):
    @functools.wraps(function)
    def call(x):
        call.count += 1
        return function(x) * COUNTED

    call.count = 0
    return call


COUNTED = 1.0


def test_a_function_that_its_own_closure_holds_is_followed_once():
    reads = CodeReads([counted(lambda x: x)])
    assert [name for _, name in reads.places.values()] == ["COUNTED"]


def states(device):
    net, found = Second().to(device), []
    for number in range(3):
        found.append(net(torch.full((2,), 1.0 + number, device=device)).tolist())
        found.append(net.last.tolist())
    return found


class MakesUp:
    """Raises at what it does not have, as `pytest.mark` does."""

    def __getattr__(self, name):
        raise ValueError(name)


ANSWERS = MakesUp()
PARTIAL = functools.partial(logged(lambda self, x: x * SECOND), None)


def test_objects_are_not_asked_for_what_they_do_not_have():
    reads = CodeReads([lambda x: PARTIAL(x) if ANSWERS else x])
    assert {"ANSWERS", "SECOND"} <= {name for _, name in reads.places.values()}


def test_state_that_only_decorated_code_reads_is_given_back():
    expected = states("cpu")
    with tpuport.porting():
        assert states("cuda") == expected


@pytest.mark.parametrize("name", ["SECOND", "FACTORS"])
def test_a_global_that_decorated_code_reads_may_change(name, monkeypatch):
    net = Second()
    ported = tpuport.convert(Second())
    x = torch.ones(2)
    for _ in range(2):
        assert torch.equal(ported(x), net(x))
    changed = {"SECOND": 7.0, "FACTORS": {"first": 9.0}}
    monkeypatch.setitem(globals(), name, changed[name])
    assert torch.equal(ported(x), net(x))


def calls(x):
    calls.count += 1
    return x * calls.count


calls.count = 0


def first(x):
    if not hasattr(first, "seen"):
        first.seen = 3.0
    return x * first.seen


class Counts(nn.Module):
    def forward(self, x):
        return calls(x) + first(x)


def test_attributes_of_functions_are_as_eager_pytorch_leaves_them():
    def seen(device):
        calls.count = 0
        vars(first).pop("seen", None)
        net, found = Counts().to(device), []
        for _ in range(4):
            found.append((net(torch.ones(2, device=device)).tolist(), calls.count, first.seen))
        first.seen = 7.0
        found.append(net(torch.ones(2, device=device)).tolist())
        return found

    expected = seen("cpu")
    with tpuport.porting():
        assert seen("cuda") == expected
