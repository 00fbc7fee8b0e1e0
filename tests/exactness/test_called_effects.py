"""Effects of functions that are called in a branch, an `and` or an `or`: as often as in eager.

Contents:
    CASES               each in one program: attributes, lists, variables of closures, writes,
                        errors and checks
    LOOPS               effects in a `while` on a traced value, which are refused
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError

VALUES = (1.0, -1.0, 3.0, 0.0)


class Counts(nn.Module):
    """Counts calls."""

    def __init__(self, case: Callable[..., Any]) -> None:
        super().__init__()
        self.case, self.calls = case, 0

    def double(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2

    def positive(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.max() > 0

    def forward(self, x: torch.Tensor) -> Any:
        return self.case(self, x.clone())


class All(nn.ModuleDict):
    """Runs every case. Paths of one do not multiply with those of another."""

    def forward(self, x: torch.Tensor) -> Any:
        return {name: one(x) for name, one in self.items()}


def append(to: list[Any], x: torch.Tensor) -> torch.Tensor:
    to.append(1)
    return x


def scale(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def fail() -> bool:
    raise LookupError("no")


def in_expression(self: Counts, x: torch.Tensor) -> Any:
    return self.double(x) if x.sum() > 0 else x


def in_statement(self: Counts, x: torch.Tensor) -> Any:
    y = x
    if x.sum() > 0:
        y = self.double(x)
    return y


def in_test(self: Counts, x: torch.Tensor) -> Any:
    if x.sum() > 0 and self.positive(x):
        return x * 2
    return x


def in_negated_test(self: Counts, x: torch.Tensor) -> Any:
    if not (x.sum() > 0 and self.positive(x)):
        return x * 2
    return x


def in_alternative(self: Counts, x: torch.Tensor) -> Any:
    if x.sum() > 0 or self.positive(x):
        return x * 2
    return x


def in_assertion(self: Counts, x: torch.Tensor) -> Any:
    assert x.sum() > 0 or self.positive(x + 9)
    return x


def of_a_result(self: Counts, x: torch.Tensor) -> Any:
    return x, x.sum() > 0 and self.positive(x), x.sum() > 0 or self.positive(x)


def of_a_list(self: Counts, x: torch.Tensor) -> Any:
    found: list[int] = []
    y = append(found, x) if x.sum() > 0 else x
    return y, len(found)


def of_a_list_in_a_test(self: Counts, x: torch.Tensor) -> Any:
    found: list[int] = []
    if x.sum() > 0 and append(found, x).max() > 0:
        x = x * 2
    return x, len(found)


def of_a_variable(self: Counts, x: torch.Tensor) -> Any:
    count = 0

    def double(value: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return value * 2

    y = double(x) if x.sum() > 0 else x
    return y, count


def of_an_iterator(self: Counts, x: torch.Tensor) -> Any:
    numbers = iter([1.0, 2.0, 3.0])

    def following() -> float:
        return next(numbers)

    y = x * following() if x.sum() > 0 else x
    return y, x * following()


def of_a_write(self: Counts, x: torch.Tensor) -> Any:
    y = x * 1
    if x.sum() > 0 and scale(x).max() > 0:
        y = x + 1
    return x, y


def of_a_helper(self: Counts, x: torch.Tensor) -> Any:
    for _ in range(2):
        if x.sum() > 0:
            x = nested(self, x)
    return x


def nested(self: Counts, x: torch.Tensor) -> torch.Tensor:
    if x.max() > 1:
        self.calls += 1
        return x - 1
    return x * 2


def of_an_error(self: Counts, x: torch.Tensor) -> Any:
    failed = 0.0
    try:
        x[0, 0].item() > 0 and fail()
    except LookupError:
        failed = 1.0
    return x, failed


def of_an_error_in_a_test(self: Counts, x: torch.Tensor) -> Any:
    y = x
    try:
        if x.sum() < 0 or fail():
            y = x * 2
    except LookupError:
        y = x * 3
    return y


def of_a_check(self: Counts, x: torch.Tensor) -> Any:
    place = (x[0, 0] * 2 + 2).long()  # up to 8: the index is out of range in some calls
    if place < 3 and x.flatten()[place] >= -5:
        return x * 2
    return x


def loop_of_a_body(self: Counts, x: torch.Tensor) -> Any:
    while x.sum() > 0:
        x = self.double(x) - 9
    return x


CASES = {
    one.__name__: one
    for one in (
        *(in_expression, in_statement, in_test, in_negated_test, in_alternative, in_assertion),
        *(
            of_a_result,
            of_a_list,
            of_a_list_in_a_test,
            of_a_variable,
            of_an_iterator,
            of_a_write,
            of_a_helper,
            loop_of_a_body,
        ),
        *(of_an_error, of_an_error_in_a_test, of_a_check),
    )
}


def same_calls(cases: dict[str, Callable[..., Any]]) -> None:
    """Outputs and counts of some calls are eager's."""
    eager, source = (All({n: Counts(one) for n, one in cases.items()}) for _ in range(2))
    ported = tpuport.convert(source, verify=False)
    for value in VALUES:
        x = torch.full((2, 2), value)
        want, have = eager(x), tpuport.to_torch(ported(x))
        counts = {name: one.calls for name, one in ported.to_torch().items()}
        assert counts == {name: one.calls for name, one in eager.items()}, value
        for name in want:
            torch.testing.assert_close(have[name], want[name], msg=f"{name} at {value}")


def test_what_a_branch_calls_has_effects_only_if_it_is_taken():
    try:
        same_calls(CASES)
    except Exception:
        for name, case in CASES.items():
            try:
                same_calls({name: case})
            except Exception as error:
                raise AssertionError(f"{name}: {error}") from error
        raise


def loop_of_a_condition(self: Counts, x: torch.Tensor) -> Any:
    while x.sum() > 0 and self.positive(x):
        x = x - 1
    return x


def loop_of_a_variable(self: Counts, x: torch.Tensor) -> Any:
    count = 0

    def less(value: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return value - 1

    while x.sum() > 0:
        x = less(x)
    return x, count


def loop_of_a_buffer(self: Counts, x: torch.Tensor) -> Any:
    count, norm = 0, nn.BatchNorm1d(2)
    while norm(x)[x[:, 0] > 0].numel() > 0 and count < 2:
        count += 1
    return x


@pytest.mark.parametrize("case", [loop_of_a_condition, loop_of_a_variable, loop_of_a_buffer])
def test_effects_of_what_a_while_loop_calls_are_refused(case: Callable[..., Any]):
    with pytest.raises(
        PortError, match=r"a while loop on a traced value (writes to t|changes P)"
    ) as info:
        tpuport.convert(Counts(case), verify=False)(torch.ones(2, 2))
    assert info.value.file == __file__
