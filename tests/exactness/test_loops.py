"""What a loop on a traced value carries from round to round."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tpuport


def whole_numbers(x: torch.Tensor):
    count, done = 0, False
    while not done:
        x = x / 2
        count = count + 1
        done = x.abs().max() < 1
    return x, x * count


def fractions(x: torch.Tensor):
    share = 0.0
    while x.abs().max() > 1:
        x = x / 2
        share = share + 0.5
    return x * share


def turns_into_a_fraction(x: torch.Tensor):
    share = 0
    while x.abs().max() > 1:
        x = x / 2
        share = share + 0.5
    return x * share


def turns_into_another_dtype(x: torch.Tensor):
    share = torch.zeros((), dtype=torch.int64)
    while x.abs().max() > 1:
        x = x / 2
        share = share + 0.5
    return x * share


@pytest.mark.parametrize("function", [whole_numbers, fractions])
def test_numbers_keep_their_type(function):
    ported = tpuport.convert(function)
    for scale in (0.5, 3.0, 40.0):
        x = torch.full((3,), scale)
        expected, got = function(x), tpuport.to_torch(ported(x))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("function", [turns_into_a_fraction, turns_into_another_dtype])
def test_a_number_that_becomes_a_fraction_is_refused(function):
    """Kept in the type that it had, it would lose its fraction without a word."""
    ported = tpuport.convert(function)
    # No round runs for these inputs, so comparing results would not notice.
    with pytest.raises(tpuport.PortError, match=r"TPU104 .* is int\d+ before the loop and float"):
        ported(torch.full((3,), 0.5))


def writes_to_an_argument(x: torch.Tensor, y: torch.Tensor):
    while y[0, 0] < 3:
        y += 1
    return y.sum()


def writes_through_a_view(x: torch.Tensor, y: torch.Tensor):
    b = x.clone()
    v, seen = b[0], torch.zeros(())
    while v.sum() < 30:
        v += 1
        seen = seen + b.sum()
    return b, v * 2, seen


def writes_behind_a_view(x: torch.Tensor, y: torch.Tensor):
    b = y * 1
    v, seen = b[1], torch.zeros(())
    while b[0, 0] < 4:
        b += 1
        seen = seen + v.sum()
    return b, v * 2, seen


def writes_without_gradients(x: torch.Tensor, y: torch.Tensor):
    b = x * 2
    with torch.no_grad():
        while b.sum() < 40:
            b += 1
    return b * b


def replaces_what_it_writes_to(x: torch.Tensor, y: torch.Tensor):
    b = y
    while b.sum() < 40:
        b += 1
        b = b * 2
    return b


def writes_in_a_loop_in_a_loop(x: torch.Tensor, y: torch.Tensor):
    b, total = x.clone(), torch.zeros(())
    while total < 40:
        while b[0, 0] < total:
            b += 1
        total = total + 9
    return b, total


def writes_in_a_loop_in_a_branch(x: torch.Tensor, y: torch.Tensor):
    b = x.clone()
    if y[0, 0] > 0.6:
        while b.sum() < 40:
            b += 1
            y[1:] *= 2
    else:
        while b.sum() < 20:
            b[0] *= 2
    return b * 2


def writes_in_a_loop_before_a_branch(x: torch.Tensor, y: torch.Tensor):
    b, rounds = x, 0
    while b.sum() < 20 and rounds < 3:
        b += 1
        rounds += 1
    for last in range(2):  # noqa: B007  (the caller gets it)
        if y.sum() > 4:
            break
    return b * 2, rounds, last


WRITES = [
    writes_to_an_argument,
    writes_through_a_view,
    writes_behind_a_view,
    writes_without_gradients,
    replaces_what_it_writes_to,
    writes_in_a_loop_in_a_loop,
    writes_in_a_loop_in_a_branch,
    writes_in_a_loop_before_a_branch,
]


@pytest.mark.parametrize("function", WRITES)
def test_a_loop_writes_to_memory_from_before_it(function):
    ported = tpuport.convert(function)
    # No round runs for the first inputs, so comparing results would not notice at the first call.
    for scale in (50.0, 1.0, 0.5):
        x, y = torch.arange(6.0).reshape(3, 2) + scale, torch.ones(3, 2) * scale
        args = x.clone(), y.clone()
        expected = function(x, y)
        torch.testing.assert_close(tpuport.to_torch(ported(*args)), expected)
        torch.testing.assert_close(args, (x, y))


def test_the_gradient_of_what_a_loop_writes_to_without_gradients():
    ported = tpuport.convert(writes_without_gradients)
    y = torch.ones(3, 2)

    def total(a: jax.Array) -> jax.Array:
        return ported.apply({}, {}, None, a, y.numpy())[0].sum()

    for scale in (50.0, 1.0):
        x = torch.full((3, 2), scale, requires_grad=True)
        writes_without_gradients(x, y).sum().backward()
        got = jax.jit(jax.grad(total))(jnp.full((3, 2), scale))
        torch.testing.assert_close(torch.from_numpy(np.array(got)), x.grad)


def replaces_a_view(x: torch.Tensor, y: torch.Tensor):
    b = x.clone()
    v = b[0]
    while b.sum() < 40:
        b += 1
        v = v + 1
    return b, v


def reads_under_another_name(x: torch.Tensor, y: torch.Tensor):
    b, seen = y, torch.zeros(())
    while b.sum() < 40:
        b += 1
        seen = seen + y.sum()
        b = b * 2
    return b, seen


@pytest.mark.parametrize("function", [replaces_a_view, reads_under_another_name])
def test_a_write_that_another_name_would_see_in_one_round_only_is_refused(function):
    ported = tpuport.convert(function)
    match = r"TPU104 a loop writes to a tensor in place"
    with pytest.raises(tpuport.PortError, match=match):
        ported(torch.full((3, 2), 50.0), torch.full((3, 2), 50.0))


def condition_writes(x: torch.Tensor):
    def grown(t):
        t += 1
        return t.sum()

    b = x.clone()
    while grown(b) < 40:
        x = x / 2
    return b, x


def changes_a_shape(x: torch.Tensor, y: torch.Tensor):
    v = x[1:]
    while x.sum() < 40:
        x = x * 2
        v = x[0]
    return v


def test_a_tensor_that_gets_another_shape_is_refused():
    match = r"TPU104 .* shape \(2, 2\) before the loop and \(2,\) after a round"
    with pytest.raises(tpuport.PortError, match=match):
        tpuport.convert(changes_a_shape)(torch.ones(3, 2), torch.ones(1))


def fails_in_each_round(x: torch.Tensor):
    while x.sum() < 40:
        x = x @ torch.ones(5, 5)
    return x


def raises_in_each_round(x: torch.Tensor):
    while x.sum() < 40:
        raise ValueError("too small")
    return x


@pytest.mark.parametrize("is_jitted", [False, True])
def test_without_checks_a_loop_is_left_out_only_if_the_code_itself_raises(is_jitted):
    large, small = torch.full((3, 2), 50.0), torch.ones(3, 2)

    def call(function, x):
        ported = tpuport.convert(function, checks=False, verify=False)
        if is_jitted:
            return jax.jit(ported.apply)({}, {}, None, x.numpy())[0]
        return tpuport.to_numpy(ported(x))

    with pytest.raises(RuntimeError, match="same reduction dim"):
        call(fails_in_each_round, small)
    assert np.array_equal(call(raises_in_each_round, small), small.numpy())
    ported = tpuport.convert(fails_in_each_round)
    assert np.array_equal(tpuport.to_numpy(ported(large)), large.numpy())


def tells_each_round(x: torch.Tensor):
    while x.abs().max() > 1:
        print("too large", len(x))  # noqa: T201
        x = x / 2
        logging.getLogger(__name__).warning("halved")
    return x


def tells_at_times(x: torch.Tensor):
    left, rounds = x * 1, 0
    while left.max() > 1:
        print("a"); left = left - 1  # fmt: skip # noqa: E702, T201
        rounds += 1
        if rounds % 2 == 0:
            print(f"{rounds}: {left.max().item():.2f}")  # noqa: T201
    return left


@pytest.mark.parametrize("function", [tells_each_round, tells_at_times])
def test_a_loop_that_logs_is_one_program_that_says_nothing(function, capsys):
    """Eager PyTorch says it in the comparison; a trace would tell of rounds that do not run."""
    ported = tpuport.convert(function, verify=False)
    for scale in (0.5, 3.0, 40.0):
        x = torch.full((3,), scale)
        got = tpuport.to_torch(ported(x))
        assert capsys.readouterr().out == ""
        torch.testing.assert_close(got, function(x))
        assert (capsys.readouterr().out != "") == (scale > 1)
    assert not ported.report.retraces


def shows_what_it_changes(x: torch.Tensor):
    seen = []
    while x.abs().max() > 1:
        print(seen.append(1))  # noqa: T201
        x = x / 2
    return x, len(seen)


def shows_what_its_function_changes(x: torch.Tensor):
    seen = []

    def note():
        seen.append(1)
        return len(seen)

    while x.abs().max() > 1:
        print(note())  # noqa: T201
        x = x / 2
    return x, len(seen)


class Counts:
    def __init__(self):
        self.asked = 0

    def count(self):
        self.asked += 1
        return self.asked


def shows_what_a_method_changes(x: torch.Tensor):
    counts = Counts()
    while x.abs().max() > 1:
        if counts.count() > 1:
            print("again")  # noqa: T201
        x = x / 2
    return x, counts.asked


CHANGES = [shows_what_it_changes, shows_what_its_function_changes, shows_what_a_method_changes]


@pytest.mark.parametrize("function", CHANGES)
def test_what_a_log_line_changes_is_not_left_out(function):
    with pytest.raises(tpuport.PortError):
        tpuport.convert(function, verify=False)(torch.full((3,), 5.0))
