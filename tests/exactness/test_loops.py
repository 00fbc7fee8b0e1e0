"""What a loop on a traced value carries from round to round."""

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
