"""Python numbers of a program have Python's 64 bits, and int64 tensors are exact or refused.

Contents:
    NUMBERS, TENSORS    what used to be computed in 32 bits, by name
    test_generated_*    random programs against eager PyTorch, to the last bit; more are slow
    test_*_refused      what no 64 or 32 bits hold is an error at the call
    test_state_*        numbers and counters that a module keeps
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpuport
from tests.exactness import generated
from tpuport.foundation.errors import ParityError, PortError, UsageError

FEW, MANY = 2, 150


def _numbers(x: torch.Tensor, k: torch.Tensor) -> Any:
    a, b = x[0].item(), x[1].item()
    n: Any = k[0].item()
    rounded = (round(a, 1), round(b, 2), round(a), round(n * 5, -1), round(-a, 3))
    divided = (a // 0.1, -a // 0.3, a % -0.3, n // -7, n % -7, divmod(a, 0.7), n / 3, a / 3)
    powers = ((-a) ** 2, a**0.5, n**3, 2**n, 1.5**-n, (a * 0.1) * 0.3 + a * b)
    wide = (n * 1000003 * 12345, (n << 20) >> 3, n ^ 2**40, n * 2**31 % 997, -n)
    compared = (a == 0.1, a < 0.1, n * 10**9 > 2**33, a * 3 == 0.3, abs(b - a) > 1e-12)
    used = (torch.zeros(1) + int(a * 10), torch.ones(2, dtype=torch.bfloat16) * (a * 1.01) + n)
    half = x.bfloat16()[0].item() * 3
    return rounded, divided, powers, wide, compared, used, half


def _loop(x: torch.Tensor, k: torch.Tensor) -> Any:
    total, steps = x[0].item(), k[0].item()
    while total * 3 < 2**34 + steps:
        total = total * 2.7 + 0.1
        steps = steps * 2 + 1
    return total, steps


NUMBER_ARGS = [
    (torch.tensor([0.1, 2.675]), torch.tensor([7])),
    (torch.tensor([0.7, 2.45]), torch.tensor([3])),
    (torch.tensor([2.5, 1e-20]), torch.tensor([15])),
]


@pytest.mark.parametrize("program", [_numbers, _loop])
def test_numbers(program: Callable[..., Any]) -> None:
    """Rounding, division, powers, comparisons and loops of Python numbers are Python's own."""
    ported = tpuport.convert(program)
    for args in NUMBER_ARGS:
        want, have = program(*args), tpuport.to_torch(ported(*args))
        flat = zip(_flat(want), _flat(have), strict=True)
        wrong = [(a, b) for a, b in flat if not generated.same(a, b) or type(a) is not type(b)]
        assert not wrong


def _flat(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in _flat(part)] if isinstance(value, tuple) else [value]


def _hashes(x: torch.Tensor) -> Any:
    primes = torch.tensor([1, 2654435761, 805459861])
    parts = x.view(-1, 3) * primes
    spatial = (parts[:, 0] ^ parts[:, 1] ^ parts[:, 2]) % 2**19
    chain = x
    for _ in range(3):
        chain = (chain * 1103515245 + 12345) & 0x7FFFFFFF
    mixed = ((x ^ (x >> 16)) * 0x45D9F3B) & 0xFFFFFFFF
    running = torch.zeros_like(x)
    running ^= x * 2654435761
    running %= 1009
    return (x * 1000003) % 997, spatial, chain, mixed, running, torch.eye(5)[(x * 2654435761) % 5]


def _arithmetic(x: torch.Tensor) -> Any:
    square = x * x
    written = torch.zeros(4, dtype=torch.int64)
    written[1:3] = square[:2]
    written[0] += 2**33
    if x.sum() > 0:
        branch = square * 2
    else:
        branch = x + 1
    products = (x[None] @ x[:, None], torch.einsum("i,j->ij", x, x), x.prod(), x.cumsum(0))
    counts = torch.zeros(2, dtype=torch.int64).index_add(0, torch.tensor([0, 1, 0]), square)
    floats = (square * 0.5, square.float().sum(), (x.float() / 0).long(), square > 2**33)
    number = square.sum().item() % 1009
    selected = (square[torch.tensor([2, 0])], square.sort().values, square.view(3, 1).t()[:, 1:])
    return (
        written,
        branch,
        products,
        counts,
        floats,
        selected,
        x + 2**40,
        number,
    )


@pytest.mark.parametrize("program", [_hashes, _arithmetic])
def test_tensors(program: Callable[..., Any]) -> None:
    """Hashes and sums of int64 tensors do not wrap at 32 bits, at later calls either."""
    ported = tpuport.convert(program)
    for values in ([2, 3, 4], [123456, 7, 2**31 - 1], [-(2**31), -5, 46341]):
        args = (torch.tensor(values),)
        want, have = program(*args), tpuport.to_torch(ported(*args))
        assert all(map(generated.same, _flat(want), _flat(have)))


def test_hash_in_blocks() -> None:
    """Blocks that share a program, and checkpoints, keep 64 bits between them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.mix = nn.Embedding(97, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> Any:
            index = ((ids * 2654435761) ^ (ids.roll(1, 1) * 805459861)) % 97
            return torch.tanh(self.mix(x) + self.table(index)), index * 1000003

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> Any:
            for block in self.blocks:
                x, ids = checkpoint(block, x, ids, use_reentrant=False)
            return x, ids

    model = Stack()
    ported = tpuport.convert(model)
    for shift in (0, 20000):
        args = (torch.ones(2, 5, 8), torch.arange(10).view(2, 5) + shift)
        want, have = model(*args), tpuport.to_torch(ported(*args))
        torch.testing.assert_close(have[0], want[0])
        assert torch.equal(have[1], want[1])


def test_generated_numbers(tmp_path: Path) -> None:
    for seed in range(FEW):
        _check_numbers(seed, tmp_path)


def test_generated_tensors(tmp_path: Path) -> None:
    for seed in range(2 * FEW):
        _check_tensors(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FEW, MANY))
def test_more_generated_numbers(seed: int, tmp_path: Path) -> None:
    _check_numbers(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2 * FEW, 2 * MANY))
def test_more_generated_tensors(seed: int, tmp_path: Path) -> None:
    _check_tensors(seed, tmp_path)


def _check_numbers(seed: int, folder: Path) -> None:
    text = generated.number_program(seed)
    function = generated.load(text, folder, f"numbers{seed}")
    assert not generated.differing(function, generated.NUMBER_CALLS), text


def _check_tensors(seed: int, folder: Path) -> None:
    text = generated.tensor_program(seed)
    function = generated.load(text, folder, f"tensors{seed}")
    assert not generated.differing(function, list(generated.tensor_calls(seed))), text


def test_beyond_is_refused() -> None:
    """What 64 bits, or the 32 of an index or of state, do not hold is an error at that call."""

    def int_beyond(k: torch.Tensor) -> Any:
        return k[0].item() ** 2 * 3

    def in_place(k: torch.Tensor) -> None:
        k *= 1000003

    def bound(k: torch.Tensor) -> torch.Tensor:
        return torch.arange(5)[: k[0].item() * 1000003]

    cases = ((int_beyond, "64 bits"), (in_place, "fit in 32 bits"), (bound, "fit in 32 bits"))
    for function, message in cases:
        ported = tpuport.convert(function)
        for first in (2, 3):
            want, have = torch.tensor([first]), torch.tensor([first])
            assert generated.same(function(want), tpuport.to_torch(ported(have)))
            assert torch.equal(want, have)
        with pytest.raises(PortError, match=message):
            ported(torch.tensor([2**31 - 1]))


def test_argument_beyond_is_refused_at_a_later_call() -> None:
    ported = tpuport.convert(lambda k: k % 7)
    assert tpuport.to_torch(ported(torch.tensor([15]))).item() == 1
    with pytest.raises(UsageError, match="does not fit in int32"):
        ported(torch.tensor([2**31]))


def test_python_errors() -> None:
    """What Python refuses of numbers is raised by the port: shifts, powers, infinite integers."""

    def program(x: torch.Tensor, k: torch.Tensor) -> Any:
        n: Any = k[0].item()
        return int(x[0].item() * 1e30), 1 << n, x[1].item() ** n

    ported = tpuport.convert(program)
    for x, k, error in (
        ([float("nan"), 1.0], [1], ValueError),
        ([float("inf"), 1.0], [1], OverflowError),
        ([0.0, 1.0], [-1], ValueError),
        ([0.0, 3e38], [9], OverflowError),
    ):
        args = (torch.tensor(x), torch.tensor(k))
        with pytest.raises(error):
            program(*args)
        with pytest.raises(error):
            ported(*args)


def test_state_keeps_64_bits() -> None:
    """A float that a module keeps is Python's float, and a counter needs no check."""

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean = 0.0
            self.calls: torch.Tensor
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: torch.Tensor, new: float) -> Any:
            self.mean = self.mean * 0.9 + 0.1 * new
            self.calls.add_(1)
            return x * self.mean, self.mean, self.calls

    eager = Average()
    ported = tpuport.convert(copy.deepcopy(eager))
    for _ in range(5):
        want, have = eager(torch.ones(2), 0.3), tpuport.to_torch(ported(torch.ones(2), 0.3))
        assert all(map(generated.same, want, have))


def test_first_call_compares_integers_exactly() -> None:
    """An integer that is off by one through float64 in 32 bits is found, not called rounding."""
    ported = tpuport.convert(lambda x: (x.double() * 0 + 16777217).long())
    with pytest.raises(ParityError, match="16777216 where eager PyTorch gives 16777217"):
        ported(torch.ones(1))


def _put(x: torch.Tensor) -> Any:
    made = [torch.zeros(3, dtype=torch.int64) for _ in range(4)]
    made[0].copy_(x)
    made[1][:] = x
    made[2][1:] = x[1:]
    made[3].fill_(x[0])
    return *made, torch.zeros(3, dtype=torch.int64).copy_(x) // 2


class Losses(nn.Module):
    """A sum over the rows that count, as detectors have it: a Python number if there are none."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        loss, count = 0.0, 0
        for index in range(len(x)):
            if mask[index]:
                loss, count = loss + x[index].square().sum(), count + 1
        return {"mean": loss / max(count, 1), "sum": loss, "count": count}


@pytest.mark.parametrize("first", [[False, False], [True, False]])
def test_a_sum_that_starts_as_a_number_is_a_tensor(first: list[bool]):
    module, x = Losses(), torch.randn(2, 3)
    ported = tpuport.convert(module)
    for mask in (first, [False, False], [True, True]):
        want, got = module(x, torch.tensor(mask)), ported(x, torch.tensor(mask))
        assert got["count"] == want["count"]
        assert isinstance(got["sum"], torch.Tensor)
        for name in ("mean", "sum"):
            assert float(got[name]) == pytest.approx(float(want[name]))


def test_a_number_where_no_path_has_one_is_found(monkeypatch: pytest.MonkeyPatch):
    ported = tpuport.convert(lambda x: x.sum().item())
    real = tpuport.tracing.session.tracer.program_leaves

    def as_tensors(leaves: list[Any], *, wide: bool) -> tuple[list[Any], list[Any]]:
        values, _ = real(leaves, wide=wide)
        return values, [torch.empty((), device="meta") for _ in leaves]

    monkeypatch.setattr(tpuport.tracing.session.tracer, "program_leaves", as_tensors)
    with pytest.raises(ParityError, match="where eager PyTorch gives float"):
        ported(torch.ones(3))


def test_floats_put_into_int64_tensors_have_64_bits():
    ported = tpuport.convert(_put)
    for x in (torch.tensor([1.5, -2.0, 3.0]), torch.tensor([3e9, -4e9, 1e20])):
        for got, want in zip(ported(x), _put(x), strict=True):
            assert torch.equal(tpuport.to_torch(got), want), (got, want)
