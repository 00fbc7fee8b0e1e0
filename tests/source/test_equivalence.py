"""The proofs that rule authors rely on notice what they should."""

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tpuport.testing import equivalence as eq
from tpuport.testing.retrace import RetraceError, TraceCounter, differences, signature

NAN = float("nan")


@pytest.mark.parametrize(
    ("expected", "got", "found"),
    [
        (torch.ones(2), torch.ones(2), None),
        (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN]), None),
        (torch.ones(0), torch.ones(0), None),
        ({"a": (torch.ones(1), "x")}, {"a": (torch.ones(1), "x")}, None),
        (NAN, NAN, None),
        (torch.ones(2), torch.ones(3), "expected torch.float32 (2,), got torch.float32 (3,)"),
        (torch.ones(2), torch.ones(2).double(), "got torch.float64"),
        (torch.ones(2), torch.ones(2) + 1e-6, "differs by up to"),
        (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0]), "finite in one"),
        (torch.tensor([NAN]), torch.tensor([float("inf")]), "infinities or NaN"),
        ([1], (1,), "expected a list, got a tuple"),
        ((1, 2), (1,), "expected 2 values, got 1"),
        ({"a": 1}, {"b": 1}, "expected the keys ['a'], got ['b']"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "['a']: [1]: expected 2, got 3"),
    ],
)
def test_differences_of_values(expected: Any, got: Any, found: str | None):
    difference = eq.difference(expected, got)
    if found is None:
        assert difference is None
    else:
        assert difference is not None
        assert found in difference


def test_a_tolerance_is_relative_to_the_largest_value():
    expected, got = torch.tensor([100.0, 1.0]), torch.tensor([100.0, 1.0005])
    assert eq.difference(expected, got, rtol=1e-5) is None
    assert eq.difference(expected, got, rtol=1e-6) is not None


def loud(x: torch.Tensor) -> torch.Tensor:
    sys.stdout.write("hello\n")
    warnings.warn("careful", UserWarning, stacklevel=1)
    x += 1
    return x


def test_an_outcome_holds_all_that_happened():
    x = torch.zeros(2)
    outcome = eq.observe(loud, (x,))
    assert torch.equal(x, torch.zeros(2))
    assert torch.equal(outcome.arguments[0], torch.ones(2))
    assert (outcome.printed, outcome.warned) == ("hello\n", ((UserWarning, "careful"),))
    assert outcome.error is None


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (lambda x: x.add_(1), "printed"),
        (lambda x: sys.stdout.write("hello\n") and x.add_(1), "warned"),
        (lambda x: 1 / 0, "error: expected None, got (<class 'ZeroDivisionError'>"),
        (lambda x: loud(x.clone()), "arguments: [0]"),
        (lambda x: loud(x) * 2, "value"),
    ],
)
def test_every_part_of_an_outcome_is_compared(other: Any, found: str):
    with pytest.raises(eq.DifferenceError, match="seed 0") as raised:
        eq.check_eager(loud, other, [(torch.zeros(2),)])
    assert found in str(raised.value)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda x: x + 1 if x.ndim == 2 else x, "one rank more"),
        (lambda x: x + 1 if x.numel() else x.sum(), "size 0"),
        (lambda x: x.float() + 1, "bfloat16"),
        (lambda x: x.nan_to_num() + 1, "NaN"),
        (
            lambda x: x.contiguous().view(-1).view(x.shape) + 1 if x.is_contiguous() else x,
            "not contig",
        ),
    ],
)
def test_adversarial_inputs_find_what_seeds_do_not(wrong: Any, name: str):
    inputs = eq.make_inputs("(torch.randn(3, 4),)")
    assert all(eq.difference(x + 1, wrong(x)) is None for (x,) in inputs)
    with pytest.raises(eq.DifferenceError, match=name):
        eq.check_eager(lambda x: x + 1, wrong, inputs)


def test_inputs_depend_on_the_seed_only():
    first, second = eq.make_inputs("(torch.randn(3),)"), eq.make_inputs("(torch.randn(3),)")
    assert eq.difference(first, second) is None
    assert eq.difference(first[0], first[1]) is not None


def test_a_port_that_differs_is_noticed():
    inputs = eq.make_inputs("(torch.randn(3),)", seeds=2)
    eq.check_ported(lambda x: x * 2, lambda x: x + x, inputs)
    with pytest.raises(eq.DifferenceError, match="seed 0: value"):
        eq.check_ported(lambda x: x * 2, lambda x: x * 3, inputs)


def test_a_port_that_is_traced_twice_is_noticed():
    inputs = [(torch.ones(3),), (torch.ones(4),)]
    with pytest.raises(eq.DifferenceError, match="traced again"):
        eq.check_ported(lambda x: x * 2, lambda x: x * 2, inputs)


# Traces.


@dataclass
class Batch:
    image: Any
    size: int


def test_a_retrace_names_the_argument_that_changed():
    counter = TraceCounter(lambda *args, **kwargs: None)
    counter(torch.ones(2, 3), Batch([torch.ones(1)], 4), flag=True)
    counter.check()
    counter(torch.ones(2, 5), Batch([torch.ones(1).int()], 4), flag=False)
    with pytest.raises(RetraceError) as raised:
        counter.check()
    assert str(raised.value) == (
        "Expected 1 trace(s), got 2. In the last one: args[0] was float32[2, 3], now"
        " float32[2, 5]; args[1].image[0] was float32[1], now int32[1]; kwargs['flag'] was True,"
        " now False."
    )
    counter.check(at_most=2)


def test_a_retrace_without_a_reason_says_so():
    counter = TraceCounter(abs)
    assert [counter(-1), counter(-1)] == [1, 1]
    with pytest.raises(RetraceError, match="its arguments are the same as before"):
        counter.check()


def test_a_leaf_that_appears_is_a_change():
    before, after = signature([[1]], {}), signature([[1, 2]], {})
    assert differences(before, after) == ["args[0][1] was absent, now 2"]
