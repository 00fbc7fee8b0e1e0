"""Results that share memory with an argument, state or one another: written and read as in eager.

Each program is run by eager PyTorch and by its port. `then` writes to the results or to what they
share, between calls, and all values that can be seen afterwards must be equal.
"""

import copy
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError

TABLE = torch.zeros(4)


class State(nn.Module):
    """A model that returns its state, written in place or replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
        self.turned = nn.Parameter(torch.ones(2, 4).t(), requires_grad=False)
        self.cache, self.found = torch.zeros(2, 4), None

    def forward(self, x: torch.Tensor) -> Any:
        self.total += x[0]
        self.last = x[0] * 1
        self.cache[0] = x[1]
        self.found = x[0] * 2 if self.found is None else x[0] * 2 + self.found
        state = (self.total, self.total[1:3], self.last, self.weight, self.turned)
        return *state, self.cache, self.cache[1], self.found


def windows(x: torch.Tensor) -> Any:
    return x[1:], x.t(), x[:, ::2], x


def with_views(x: torch.Tensor) -> Any:
    whole = x * 2
    return whole, whole[:, 1:], whole.t(), whole


def apart(x: torch.Tensor) -> Any:
    return (x * 2).split([1, 3], 1)


def kept_in(x: torch.Tensor, found: list[Any]) -> Any:
    whole = x * 2
    found += [whole, x[1]]
    return whole[0]


def outside(x: torch.Tensor) -> Any:
    return TABLE, x + TABLE


def write_all(outs: list[Any], x: torch.Tensor) -> None:
    for index, out in enumerate(outs):
        out.add_(index + 1)
    x[0, 1] = 9.0


CASES = {
    "windows of an argument": windows,
    "a result and its views": with_views,
    "views without a common element": apart,
    "a tensor from outside": outside,
}


def seen(function: Callable[..., Any], calls: int = 3) -> list[torch.Tensor]:
    """Return what can be seen of three calls, with writes after each."""
    x = torch.arange(8.0).reshape(2, 4)
    values, results = [], []
    for _ in range(calls):
        outs = pytree.flatten(function(x))[0]
        write_all(outs, x)
        results += outs
        values += [tpuport.to_torch(out).clone() for out in results] + [x.clone()]
    return values


@pytest.mark.parametrize("name", CASES)
def test_writes_are_seen_as_in_eager(name: str):
    TABLE.zero_()
    expected = seen(CASES[name])
    TABLE.zero_()
    ported = tpuport.convert(CASES[name])
    assert all(map(torch.equal, expected, seen(ported)))


def test_results_that_are_state():
    model = State()
    assert all(map(torch.equal, seen(copy.deepcopy(model)), seen(tpuport.convert(model))))


def test_results_in_a_list_of_the_caller():
    def run(function: Callable[..., Any]) -> list[Any]:
        x, found = torch.arange(8.0).reshape(2, 4), []
        for _ in range(2):
            found.append(function(x, found))
            found[-1].add_(1)
            found[-2].mul_(2)
        return [*map(tpuport.to_torch, found), x]

    assert all(map(torch.equal, run(kept_in), run(tpuport.convert(kept_in))))


def test_integers_of_64_bits():
    x = torch.tensor([1, 2, 3])
    result = tpuport.convert(lambda x: x[1:])(x)
    x.add_(2**40)
    assert torch.equal(tpuport.to_torch(result), x[1:])
    result.sub_(2**40)
    assert x.tolist() == [2**40 + 1, 2, 3]


def test_a_result_as_the_argument_of_the_next_call():
    def run(function: Callable[..., Any]) -> list[Any]:
        outs = function(torch.arange(8.0).reshape(2, 4))
        again = function(outs[0])
        again[1].mul_(3)
        return [*map(tpuport.to_torch, outs), *map(tpuport.to_torch, again)]

    assert all(map(torch.equal, run(with_views), run(tpuport.convert(with_views))))


def overlapping(x: torch.Tensor) -> Any:
    whole = x * 2
    return whole[:, :3], whole[:, 2:]


def other_dtype(x: torch.Tensor) -> Any:
    return x.view(torch.int32), x + 1


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.table[:2], x + self.table


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (overlapping, "result 1 of the call, which shares memory with result 0"),
        (other_dtype, r"argument \[0\]\[0\] would not see this write to the result"),
        (Attribute(), "a tensor from outside of the model would not see"),
    ],
)
def test_a_write_that_cannot_be_carried_is_refused(program: Any, what: str):
    first = tpuport.convert(program)(torch.ones(2, 4))[0]
    with pytest.raises(PortError, match=what) as caught:
        first.add_(1)
    assert caught.value.file == __file__
    assert "take one of the result" in str(caught.value.remedy)


def test_an_old_copy_is_not_read():
    x = torch.ones(2, 4)
    first, _ = tpuport.convert(other_dtype)(x)
    assert torch.equal(tpuport.to_torch(first), x.view(torch.int32))
    x.add_(1)
    with pytest.raises(PortError, match="has changed since the call, and the result has not"):
        first.add(1)


def test_an_array_of_jax_is_not_written():
    result = tpuport.convert(lambda x: x)(jnp.ones(3))
    with pytest.raises(PortError, match="an array of JAX, would not see this write"):
        result.add_(1)


def test_an_argument_that_requires_grad_is_not_written():
    ported = tpuport.convert(lambda x: x[1:])
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(PortError, match="which requires grad, cannot be written in place"):
        ported(x).add_(1)
    with torch.no_grad():
        ported(x).add_(1)
    assert x.tolist() == [1, 2, 2]


class Lost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> Any:
        self.state.add_(1)
        self.state = self.state + x
        return self.state


def test_state_that_is_written_and_then_replaced():
    ported, x = tpuport.convert(Lost()), torch.ones(2)
    first, second = ported(x), ported(x)
    assert tpuport.to_torch(second).tolist() == [4, 4]
    with pytest.raises(PortError, match="state was written to and then replaced in one call"):
        tpuport.to_torch(first)


class Counter(nn.Module):
    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2, 3))

    def forward(self, x: torch.Tensor) -> Any:
        self.total[0] += x[0]
        return self.total, self.total[0], x * 2, x[1]


def test_buffers_that_a_program_of_a_script_writes_to():
    def run(model: Counter, x: torch.Tensor) -> list[Any]:
        found = []
        for _ in range(3):
            total, row, doubled, second = model(x)
            row.add_(1)
            second.mul_(2)
            found += [total.tolist(), model.total.tolist(), doubled.tolist(), x.tolist()]
        return found

    expected = run(Counter(), torch.ones(2, 3))
    with tpuport.porting():
        assert run(Counter().cuda(), torch.ones(2, 3).cuda()) == expected


class KeepsParts(nn.Module):
    """Keeps parts of what it returns: in its place, before it, and in order."""

    last: torch.Tensor
    row: torch.Tensor
    rows: torch.Tensor

    def forward(self, x: torch.Tensor) -> Any:
        first, second, third = x * 1, x * 2, x * 3
        self.last, self.row, self.rows = first[:, -1], second[2], third[1:3]
        return first, second, third[2:]


def test_results_with_parts_that_are_state_outlive_it_and_are_not_written() -> None:
    model = KeepsParts()
    model.last = model.row = model.rows = torch.zeros(())
    ported, x = tpuport.convert(model), torch.arange(12.0).view(4, 3)
    results = ported(x)
    ported(x + 1)
    expected = KeepsParts()(x)
    assert [tpuport.to_numpy(one).tolist() for one in results] == [t.tolist() for t in expected]
    for result in ported(x):
        with pytest.raises(PortError, match="would not see this write to the result"):
            result.add_(1)
