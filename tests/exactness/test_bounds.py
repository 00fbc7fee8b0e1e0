"""Traced ends of slices and traced sizes, in and out of range: exact, or the error of eager.

Each program is compiled once, and called with a number of every relation to the size: negative, 0,
inside, the size itself, and far past it on both sides.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tpuport
from tests.exactness.scenario import by_tpuport
from tpuport import PortError

NUMBERS = (2, 1, 0, 3, 4, 5, 6, 7, 9, -1, -2, -5, -6, -7, -9)
x = torch.arange(1.0, 7.0)
grid = torch.arange(24.0).view(4, 6)


def put(n: Any, *index: Any) -> torch.Tensor:
    made = x.clone()
    made[index] = 9.0
    return made


def moved_by_writing(n: torch.Tensor) -> torch.Tensor:
    """An index whose known bounds end with a write."""
    k = (x * n).argmax()
    k += 3 * n
    return x[:k] * 1


EXACT: dict[str, Callable[[Any], Any]] = {
    "end": lambda n: x[:n] * 1,
    "start": lambda n: x[n:] * 1,
    "both": lambda n: x[n : n + 2] * 1,
    "end after a start": lambda n: x[1:n] * 1,
    "start before an end": lambda n: x[n:4] * 1,
    "negated": lambda n: x[-n:] * 1,
    "count": lambda n: x[-(x > n).sum() :] * 1,
    "count end": lambda n: x[: -(x > n).sum()] * 1,
    "columns": lambda n: grid[:, n:] * 1,
    "rows and columns": lambda n: grid[n:, :n].sum(),
    "shape": lambda n: torch.zeros(()) + x[:n].shape[0],
    "mean": lambda n: x[:n].mean(),
    "halves": lambda n: torch.cat([x[:n], x[n:]]),
    "slice of a slice": lambda n: x[n:][n:] * 1,
    "end of a slice": lambda n: x[:n][-2:] * 1,
    "element": lambda n: x[n] * 1,
    "element of a slice": lambda n: x[n:][1] * 1,
    "row and column": lambda n: grid[n, n] * 1,
    "select": lambda n: (grid + n * 0).select(1, n.item()) * 1,
    "narrow length": lambda n: (x + n * 0).narrow(0, 1, n.item()) * 1,
    "narrow": lambda n: x.narrow(0, n.item(), n.item()) * 1,
    "split": lambda n: (x + n * 0).split([n.item(), 6 - n.item()])[1] * 1,
    "arange": lambda n: torch.arange(10)[: n.item()] + torch.arange(10)[: n.item()],
    "arange of a count": lambda n: torch.arange((x > n).sum().item()),
    "arange from": lambda n: torch.arange((x > n).sum().item() - 3, 2),
    "arange by step": lambda n: torch.arange(0, (x > n).sum().item(), 4),
    "arange down": lambda n: torch.arange((x > n).sum().item(), -1, -2),
    "zeros": lambda n: torch.zeros((x > n).sum().item() - 2),
    "expand": lambda n: x[0].expand((x > n).sum().item() - 2) * 1,
    "pad": lambda n: torch.nn.functional.pad(x, (0, (x > n).sum().item())),
    "write": lambda n: put(n, slice(None, n)),
    "write of a window": lambda n: put(n, slice(n, n + 2)),
    "write of one": lambda n: put(n, n),
    "moved": moved_by_writing,
}


def outcome(program: Callable[[Any], Any], n: int) -> Any:
    try:
        return tpuport.to_torch(program(torch.tensor(n)))
    except (RuntimeError, IndexError) as error:
        return error


@pytest.mark.parametrize("name", EXACT)
def test_traced_bounds_are_those_of_eager(name):
    program = EXACT[name]
    ported = by_tpuport(lambda n: program(n))
    for n in NUMBERS:
        expected, got = outcome(program, n), outcome(ported, n)
        assert not isinstance(got, PortError), got
        if isinstance(expected, Exception):
            assert isinstance(got, type(expected)), f"{n}: {got}, eager raises {expected!r}"
        else:
            assert isinstance(got, torch.Tensor), f"{n}: {got!r}, eager {expected}"
            torch.testing.assert_close(
                got, expected, equal_nan=True, msg=lambda m, n=n: f"{n}: {m}"
            )


def test_a_tensor_from_outside_that_is_cut_at_a_traced_place_is_guarded():
    table = torch.arange(6.0)
    for cut in (
        lambda n: table.select(0, n.item()) * 1,
        lambda n: table.narrow(0, n.item(), 2) * 1,
        lambda n: table.narrow(0, 1, n.item()).sum(),
    ):
        ported = by_tpuport(cut)
        for n in (torch.tensor(2), torch.tensor(3)):
            assert torch.equal(ported(n).torch(), cut(n))
        table.mul_(10)
        assert torch.equal(ported(n).torch(), cut(n))
    with pytest.raises(PortError, match=r"test_bounds\.py:\d+: TPU406 .* written in place"):
        by_tpuport(lambda n: table.select(0, n.item()).mul_(2))(torch.tensor(1))
