"""Rewritten code does in eager PyTorch what Python did, and hands traced values on."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tpuport import ops
from tpuport.foundation.errors import PortError


class Value:
    """A value that notes each time its truth is asked for."""

    def __init__(self, truth: bool, log: list[str]) -> None:
        self.truth, self.log = truth, log

    def __bool__(self) -> bool:
        self.log.append("asked")
        return self.truth


def never() -> Any:
    raise AssertionError("this side must not run")


TRUE, FALSE = torch.tensor(True), torch.tensor(0.0)


# Eager.


def test_cond_calls_the_side_that_holds():
    assert ops.cond(TRUE, lambda: 1, never) == 1
    assert ops.cond(FALSE, never, lambda a, b: (b, a), (1, 2)) == (2, 1)
    log: list[str] = []
    ops.cond(Value(True, log), lambda: None, never)
    assert log == ["asked"]


def test_cond_raises_what_the_truth_raises():
    with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
        ops.cond(torch.ones(2), never, never)


def test_while_loop_asks_before_each_round():
    asked: list[int] = []

    def test(i: int) -> Any:
        asked.append(i)
        return torch.tensor(i < 3)

    assert ops.while_loop(test, lambda i: (i + 1,), (0,)) == (3,)
    assert asked == [0, 1, 2, 3]
    assert ops.while_loop(lambda i, j: False, never, (7, 8)) == (7, 8)


def test_for_each_carries_values_from_row_to_row():
    rows = torch.tensor([[1, 2], [3, 4]])
    (total,) = ops.for_each(rows, lambda row, total: (total * 2 + row.sum(),), (torch.tensor(0),))
    assert total == 13
    assert ops.for_each([], never, (7,), (8,)) == (7,)


def test_check_makes_the_error_only_if_it_raises_it():
    ops.check(FALSE, never)
    with pytest.raises(ValueError, match="bad"):
        ops.check(TRUE, lambda: ValueError("bad"))
    with pytest.raises(ValueError, match=r"^$"):
        ops.check(TRUE, lambda: ValueError)
    with pytest.raises(TypeError, match="exceptions must derive from BaseException"):
        ops.check(TRUE, lambda: None)


def test_report_acts_only_if_the_test_holds():
    log: list[int] = []
    ops.report(FALSE, never)
    assert ops.report(TRUE, lambda: log.append(1)) is None
    assert log == [1]


def test_passes_is_what_assert_asks():
    assert ops.passes(TRUE, never) is True
    with pytest.raises(AssertionError) as raised:
        ops.passes(FALSE, lambda: ("a", 1))
    assert raised.value.args == (("a", 1),)
    with pytest.raises(AssertionError) as raised:
        ops.passes(FALSE)
    assert raised.value.args == ()


@pytest.mark.parametrize("function", [ops.both, ops.first_falsy])
def test_both_is_and(function: Callable[..., Any]):
    for first in (0, [], "a", FALSE, TRUE, None):
        for second in (0, "b", TRUE):
            assert function(first, lambda: second) is (first and second)  # noqa: B023
    assert function(0, never) == 0


@pytest.mark.parametrize("function", [ops.either, ops.first_truthy])
def test_either_is_or(function: Callable[..., Any]):
    for first in (0, [], "a", FALSE, TRUE, None):
        for second in (0, "b", TRUE):
            assert function(first, lambda: second) is (first or second)  # noqa: B023
    assert function("a", never) == "a"


def test_negate_and_numbers_are_pythons_own():
    assert ops.negate(FALSE) is True
    assert ops.negate([1]) is False
    assert ops.to_float(torch.tensor([2])) == 2.0
    assert type(ops.to_float(torch.tensor(2))) is float
    assert (ops.to_int("3"), ops.to_int(2.9), ops.to_bool([])) == (3, 2, False)
    assert ops.to_int(torch.tensor(-1.5)) == -1
    with pytest.raises(ValueError, match="could not convert string to float"):
        ops.to_float("x")


def test_the_largest_is_the_first_of_equals():
    a, b = torch.tensor(1.0), torch.tensor(1.0)
    assert ops.largest(a, b) is max(a, b) is a
    assert ops.smallest(b, a, 2) is b
    assert (ops.largest(1, 3, 2), ops.smallest("b", "a")) == (3, "a")
    assert (ops.largest([1, 3, 2]), ops.smallest(n for n in (2, 1))) == (3, 1)
    with pytest.raises(ValueError, match="empty"):
        ops.largest([])
    nan = torch.tensor(float("nan"))
    assert ops.largest(a, nan) is a
    assert ops.largest(nan, a) is nan


def test_reads_are_the_methods_own():
    x = torch.arange(6).reshape(2, 3)
    assert ops.to_list(x) == [[0, 1, 2], [3, 4, 5]]
    assert type(ops.item(x[0, 1])) is int
    assert ops.item(TRUE) is True
    assert ops.to_cpu(x) is x
    with pytest.raises(RuntimeError, match="a Tensor with 6 elements cannot be converted"):
        ops.item(x)
    with pytest.raises(AttributeError):
        ops.item(1.0)


# Traced: what is handed to the tracer, and what comes back.


class Traced:
    """What the tracer's values look like from here."""

    is_traced = True

    def __bool__(self) -> bool:
        raise AssertionError("the truth of a traced value was asked for")

    def __and__(self, other: object) -> str:
        return "and"

    def __or__(self, other: object) -> str:
        return "or"


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What reaches the tracer, whose functions answer with a traced value."""
    calls: list[tuple[Any, ...]] = []
    module = ModuleType("tpuport.tracing.control_flow.cond")

    def stand_in(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append((name, *args, *options.values()))
            return Traced()

        return call

    names = ("cond", "while", "for", "check", "number")
    for name in (*(f"traced_{name}" for name in names), "begun_while"):
        setattr(module, name, stand_in(name))
    vars(module).update(Unasked=SimpleNamespace(FOUND="found"), computed=lambda second: second())
    for name in ("cond", "while_loop", "for_rows"):
        monkeypatch.setitem(sys.modules, f"tpuport.tracing.control_flow.{name}", module)
    return calls


def test_a_traced_test_goes_to_the_tracer(handed: list[tuple[Any, ...]]):
    test = Traced()
    ops.cond(test, never, never, (1,))
    ops.while_loop(lambda i: test, never, (2,))
    ops.for_each(test, never, (3,), (4,))
    assert handed == [
        ("traced_cond", test, never, never, (1,)),
        ("traced_while", handed[1][1], never, (2,)),
        ("traced_for", test, never, (3,), (4,)),
    ]


def test_a_loop_may_become_traced_on_the_way(handed: list[tuple[Any, ...]]):
    def test(i: Any) -> Any:
        return i < 2 or Traced()

    ops.while_loop(test, lambda i: (i + 1,), (0,))
    ((name, _, _, operands, is_known),) = handed
    assert (name, operands, is_known) == ("begun_while", (2,), False)


def test_numbers_go_to_the_tracer(handed: list[tuple[Any, ...]]):
    value = Traced()
    for function in (ops.to_float, ops.to_int, ops.to_bool):
        assert ops.is_traced(function(value))
    kinds = [("traced_number", value, kind) for kind in (float, int, bool)]
    assert handed == kinds


def test_a_traced_number_is_known_by_its_node():
    class Number:
        node = Traced()

    assert ops.is_traced(Number())
    assert not ops.is_traced(torch.ones(1))
    assert not ops.is_traced(1)


@pytest.mark.parametrize(
    ("make", "expected"),
    [(lambda: KeyError("a"), "KeyError('a')"), (lambda: [][0], "IndexError")],
)
def test_an_error_is_made_once_for_the_tracer(handed, make: Callable[[], Any], expected: str):
    ops.check(Traced(), make)
    ((name, _, make_error),) = handed
    assert name == "traced_check"
    assert repr(make_error()).startswith(expected)


def test_our_own_errors_are_not_the_users(handed: list[tuple[Any, ...]]):
    def make() -> Any:
        raise PortError("no")

    ops.check(Traced(), make)
    with pytest.raises(PortError, match="no"):
        handed[0][2]()


def test_nothing_is_reported_while_tracing(handed: list[tuple[Any, ...]]):
    ops.report(Traced(), never)
    assert handed[0][2]() is None


def test_a_traced_first_is_combined_with_the_second(handed: list[tuple[Any, ...]]):
    first = Traced()
    assert ops.both(first, lambda: "host") is first
    assert ops.both(first, lambda: 0) is False
    assert ops.either(first, lambda: "host") is True
    assert ops.either(first, lambda: 0) is first
    assert (ops.both(first, Traced), ops.either(first, Traced)) == ("and", "or")
    assert {name for name, *_ in handed} == {"traced_number"}


def test_a_second_with_effects_is_called_on_one_side(handed: list[tuple[Any, ...]]):
    first = Traced()
    for operator in (ops.both, ops.either, ops.first_falsy, ops.first_truthy):
        operator(first, lambda: "found")
    assert [name for name, *_ in handed] == ["traced_cond"] * 4
    assert [(then(), orelse()) for *_, then, orelse, _ in handed[2:]] == [
        ("found", first),
        (first, "found"),
    ]


def test_a_traced_first_whose_value_counts_selects(handed: list[tuple[Any, ...]]):
    first = Traced()
    ops.first_falsy(first, lambda: 5)
    ops.first_truthy(first, lambda: 5)
    (_, test, then, orelse, *_), (_, _, then_or, orelse_or, *_) = handed
    assert test is first
    assert (then(), orelse()) == (5, first)
    assert (then_or(), orelse_or()) == (first, 5)
