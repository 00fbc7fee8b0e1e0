"""Rewritten code under torchax and `jax.jit` alone: branches, loops, truths, checks and numbers."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
import torchax
from torchax import interop

from tpuport import ops
from tpuport.foundation.errors import PortError
from tpuport.testing import equivalence

X = torch.arange(12.0).reshape(3, 4) - 4


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchax hands torch arrays that are not writable
        yield


def agree(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """The same result under plain torchax as in eager PyTorch, also for negated inputs."""
    inputs = [tensors, tuple(-t if t.is_floating_point() else t for t in tensors)]
    equivalence.check_plain(function, function, inputs)


def run(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    return equivalence.plain_jit(function, tensors)


def finish(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """Run a program until all that it does besides its result is done."""
    run(function, *tensors)
    jax.effects_barrier()


# Branches.


def test_a_side_may_use_closures_and_give_any_structure():
    def function(x):
        def left(y):
            return {"a": y * x.mean(), "b": (1, 2.5, None, "text")}

        def right(y):
            return {"a": y - x, "b": (1, 3.5, None, "text")}

        result = ops.cond(x.sum() > 0, left, right, (x + 1,))
        assert result["b"][2:] == (None, "text")
        return result["a"], result["b"][:2]

    agree(function, X)


def test_host_constants_may_be_results():
    agree(lambda x: ops.cond(x.sum() > 0, lambda: torch.ones(2), lambda: torch.zeros(2)), X)


def test_numbers_of_both_sides_meet_as_python_makes_them():
    def function(x):
        scale = ops.cond(x.sum() > 0, lambda: 2, lambda: 0.5)
        same = ops.cond(x.sum() > 0, lambda: 3, lambda: 3)
        assert same == 3
        return x * scale + list(range(9))[same]

    agree(function, X)


def test_a_number_does_not_widen_what_it_meets():
    def function(x):
        scale = ops.to_float(x.float().abs().max())
        chosen = ops.cond(x.sum() > 0, lambda: scale, lambda: 1.0)
        return x * scale, x / chosen, x.long() * ops.to_int(x.sum())

    half, *_ = run(function, X.bfloat16())
    assert half.dtype is torch.bfloat16
    agree(function, X)


@pytest.mark.parametrize(
    ("then", "orelse"),
    [
        (lambda x: x, lambda x: x[:2]),
        (lambda x: x, lambda x: x.long()),
        (lambda x: (x, x), lambda x: x),
        (lambda x: (x, "a"), lambda x: (x, "b")),
        (lambda x: x.sum(), lambda x: 1.0),
    ],
)
def test_sides_that_differ_are_refused(then: Callable[..., Any], orelse: Callable[..., Any]):
    with pytest.raises(PortError, match="TPU101 a branch on a traced value differs"):
        run(lambda x: ops.cond(x.sum() > 0, then, orelse, (x,)), X)


def test_a_side_may_write_to_its_operands():
    def function(x):
        y, z = x * 2, x * 3

        def left(y):
            y += 10
            return y

        def right(y):
            return y

        y_after = ops.cond(x.sum() > 0, left, right, (y,))
        y_after.mul_(2)
        z.add_(y)
        return y, y_after, z

    agree(function, X)


def test_what_is_written_through_a_view_reaches_its_base():
    def function(x):
        base = x * 2
        row = base[1]

        def left(row):
            row += 10
            return row

        ops.cond(x.sum() > 0, left, lambda row: row, (row,))
        return base

    agree(function, X)


def test_writes_that_another_variable_would_see_are_refused():
    def function(x):
        base = x * 2

        def left(row, base):
            row += 10
            return row + base[1]

        return ops.cond(x.sum() > 0, left, lambda row, base: row, (base[1], base))

    with pytest.raises(PortError, match="another variable is a view of"):
        run(function, X)


def test_writes_to_host_constants_are_refused():
    table = torch.zeros(4)

    def left(table):
        table += 1
        return table

    with pytest.raises(PortError, match="that the program does not compute"):
        run(lambda x: ops.cond(x.sum() > 0, left, lambda t: t, (table,)), X)
    assert table.sum() == 0


def test_gradients_pass_through_the_side_that_counts():
    def loss(x):
        return ops.cond(x.sum() > 0, lambda: (x**2).sum(), lambda: x.sum()) * ops.to_float(x.max())

    for sign in (1, -1):
        x = (X * sign).requires_grad_()
        loss(x).backward()
        with torchax.default_env():
            got = jax.jit(jax.grad(interop.jax_view(loss)))(interop.jax_view(x.detach().to("jax")))
        assert x.grad is not None
        assert equivalence.difference(x.grad, torch.tensor(got.tolist()), rtol=1e-6) is None


def test_draws_inside_a_side_leave_no_tracer_behind():
    def function(x):
        def left(x):
            return torch.nn.functional.dropout(x, 0.5)

        y = ops.cond(x.sum() > -1e9, left, lambda x: x, (x,))
        return y, torch.nn.functional.dropout(x, 0.5)

    x = torch.ones(64)
    inside, after = run(function, x)
    assert not torch.equal(inside, after)
    again, _ = run(function, x)
    assert set(inside.tolist()) == {0.0, 2.0}
    assert not torch.equal(inside, again)


# Loops.


def test_a_loop_carries_tensors_and_numbers():
    def function(x):
        def test(x, rounds, hit):
            return ops.both(x.abs().max() > 0.5, lambda: rounds < 20)

        def body(x, rounds, hit):
            return x * 0.75, rounds + 1, ops.negate(hit)

        return ops.while_loop(test, body, (x, 0, False))

    agree(function, X)


def test_a_loop_draws_other_numbers_in_each_round():
    def function(x):
        def body(x, kept, rounds):
            return x, torch.cat([kept[1:], torch.nn.functional.dropout(x, 0.5)[None]]), rounds + 1

        start = torch.zeros_like(torch.stack([x, x]))
        return ops.while_loop(
            lambda x, kept, rounds: rounds < x.new_ones(()) * 3, body, (x, start, 0)
        )

    _, (first, second), rounds = run(function, torch.ones(64))
    assert rounds.item() == 3
    assert not torch.equal(first, second)


def test_what_comes_after_a_loop_draws_other_numbers():
    def function(x):
        def body(x, rounds):
            return torch.nn.functional.dropout(x, 0.5), rounds + 1

        def once(x):
            return ops.while_loop(lambda _, rounds: rounds < x.new_ones(()), body, (x, 0))[0]

        return once(x), once(x), torch.nn.functional.dropout(x, 0.5)

    first, second, third = run(function, torch.ones(64))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda x, n: (x[:2], n), "into float32"),
        (lambda x, n: (x, n + 0.5), r"from int32\[\] into float32\[\]"),
        (lambda x, n: (x.long(), n), "into int32"),
        (lambda x, n: (x, n, n), "does not carry"),
        (lambda x, n: (x.add_(1) + 1, n), "does not carry"),
    ],
)
def test_a_loop_that_changes_what_it_carries_is_refused(body: Callable[..., Any], message: str):
    with pytest.raises(PortError, match=f"TPU104 .*{message}"):
        run(lambda x: ops.while_loop(lambda x, n: x.sum() > n, body, (x, 0)), X)


def test_a_loop_may_write_to_what_it_carries():
    def body(x, n):
        x -= 1
        return x, n + 1

    agree(lambda x: ops.while_loop(lambda x, n: x.sum() > 0, body, (x * 1, 0)), X)


# Truths.


def test_connectives_are_pythons():
    def function(x):
        small, large = x.sum() < 3, x.max() > 2
        return (
            ops.to_bool(ops.both(small, lambda: large)),
            ops.to_bool(ops.either(small, lambda: large)),
            ops.negate(x.sum()),
            ops.first_truthy(x.sum().clamp(min=0), lambda: x.min()),
            ops.first_falsy(x.sum().clamp(min=0), lambda: x.min()),
            ops.both(small, lambda: False),
            ops.to_bool(ops.either(small, lambda: "host")),
        )

    agree(function, X)


def test_the_truth_of_many_elements_is_ambiguous():
    for make in (lambda x: ops.cond(x, lambda: x, lambda: x), ops.negate, ops.to_bool):
        with pytest.raises(RuntimeError, match="more than one value is ambiguous"):
            run(make, X)
    with pytest.raises(RuntimeError, match="with no values is ambiguous"):
        run(ops.to_bool, X[:0])


def test_the_largest_of_tensors_and_numbers():
    def function(x):
        count = ops.to_int(x.sum())
        return (
            ops.largest(x[0, 0], x[0, 1], x[2, 3]),
            ops.smallest(x.sum(), 0.5),
            ops.largest(3, count, len(x)) * x,
        )

    agree(function, X)


# Checks.


def checked(x: torch.Tensor) -> torch.Tensor:
    ops.check(x.sum() > 1e6, lambda: ValueError("too large"))
    assert ops.passes(x.sum() < 1e6, lambda: "still too large")
    ops.report(x.sum() > 1e6, lambda: warnings.warn("never", stacklevel=2))
    return x + 1


def test_checks_are_dropped():
    agree(lambda x: ops.check(x.sum() > 1e9, lambda: 1 / 0) or x, X)
    assert torch.equal(run(checked, X * 1e6), X * 1e6 + 1)


def test_debug_checks_raise_when_the_program_runs():
    with ops.debug_checks():
        assert ops.are_checks_on()
        assert torch.equal(run(checked, X), X + 1)
        with pytest.raises(Exception, match="too large"):
            finish(checked, X * 1e6)
    assert not ops.are_checks_on()


# Numbers.


def test_numbers_of_elements():
    def function(x):
        first = ops.item(x[0, 1])
        rows = ops.to_list(x[:2])
        assert [len(row) for row in rows] == [4, 4]
        return first, rows, ops.to_list(x.sum()), ops.item((x > 0).any()), ops.to_int(x.mean() * 9)

    agree(function, X / 3)
    agree(lambda x: (ops.item(x[0]), ops.to_list(x), ops.to_float(x[1])), torch.arange(3))


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (ops.item, "a Tensor with 12 elements cannot be converted to Scalar"),
        (ops.to_float, "only one element tensors can be converted to Python scalars"),
    ],
)
def test_many_elements_are_no_number(function: Callable[..., Any], error: str):
    for call in (function, lambda x: run(function, x)):
        with pytest.raises((RuntimeError, ValueError), match=error):
            call(X)


def test_a_traced_tensor_stays_where_it_is():
    agree(lambda x: ops.to_cpu(x[1]) + ops.to_cpu(x) * 2, X)


def test_tensors_that_are_not_traced_do_as_in_eager_pytorch():
    with torchax.default_env():
        concrete = (X + 0).to("jax").sum()
        assert not ops.is_traced(concrete)
        assert ops.cond(concrete > 0, lambda: 1, lambda: 2) == 1
        assert ops.to_float(concrete) == ops.item(concrete) == 18.0
