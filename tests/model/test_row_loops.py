"""Long loops over the rows of a tensor: one program, equal to eager PyTorch."""

# ruff: noqa: B905 (`zip` is as user code writes it)

from typing import Any

import jax
import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients
from tests.model.test_long_loops import rolled, size_of
from tpuport.tracing.control_flow import growing_loop


class Cell(nn.Module):
    """A recurrent cell over the time steps, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.drop = nn.GRUCell(4, 4), nn.Dropout(0.3)

    def forward(self, xs: torch.Tensor) -> Any:
        h, outs = torch.zeros(len(xs), 4), []
        for x_t in xs.unbind(1):
            h = self.cell(x_t, h)
            outs.append(self.drop(h))
        return torch.stack(outs, 1), h


class LastState(Cell):
    """The same without a list, over the tensor itself."""

    def forward(self, xs: torch.Tensor) -> Any:
        h = torch.zeros(len(xs), 4)
        for x_t in xs.transpose(0, 1):
            h = self.drop(self.cell(x_t, h))
        return h


class ByFunction(Cell):
    """The same by the function, with a keyword."""

    def forward(self, xs: torch.Tensor) -> Any:
        h = torch.zeros(len(xs), 4)
        for x_t in torch.unbind(xs, dim=-2):
            h = self.cell(x_t, h)
        return h


kinds = [Cell, LastState, ByFunction]


@pytest.mark.parametrize("kind", kinds)
def test_a_loop_over_rows_is_one_scan(kind: type[nn.Module]):
    calls = tuple((torch.randn(2, length, 4),) for length in (64, 72, 64))
    ported = check_calls(Scenario("rows", kind, calls, train=False), by_tpuport)
    assert rolled(ported)
    check_gradients(Scenario("rows", kind, calls[:1], train=False), by_tpuport)


@pytest.mark.parametrize("kind", kinds)
def test_the_program_is_no_longer_for_more_rows(kind: type[nn.Module]):
    few, many = (size_of(kind().eval(), torch.randn(2, length, 4)) for length in (64, 160))
    assert many - few <= 96  # a row of each round that is appended, which nothing reads


def test_draws_are_those_of_the_unrolled_loop(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    model, xs = Cell(), torch.randn(2, 40, 4)

    def drawn() -> torch.Tensor:
        ported = tpuport.convert(model)
        run = jax.jit(lambda *a: ported.apply(*a, xs)[0][0])  # op by op it is slow
        return tpuport.to_torch(run(ported.params, ported.buffers, jax.random.key(3)))

    scanned = drawn()
    monkeypatch.setattr(growing_loop, "_FEWEST_ROUNDS", 99)
    assert (scanned == 0).any()
    torch.testing.assert_close(scanned, drawn())


def test_short_loops_stay_as_they_are():
    calls = ((torch.randn(2, 12, 4),),)
    assert not rolled(check_calls(Scenario("short", Cell, calls, train=False), by_tpuport))


class Loops(nn.Module):
    """What the rows of a loop may be used for."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.kept = nn.Linear(4, 4), None
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(4))

    def plain(self, x):
        h = x[0]
        for row in x:
            h = torch.tanh(self.lin(h) + row)
        return h

    def unbound(self, x):
        h, outs = x[0] * 1, []
        for row in x.unbind():
            h = h * 0.5 + row
            outs.append(h)
        return torch.stack(outs), h

    def named(self, x):
        h = x[:, 0]
        for row in torch.unbind(x, dim=1):
            h = h * 0.5 + row
        return h

    def of_a_view(self, x):
        h = x[0, 1:]
        for row in x[1:, 1:]:
            h = h * 0.5 + row
        for row in x.t()[1:].unbind(1):
            h = h * 0.5 + row
        return h

    def ends(self, x):
        h, n = x[0], 0
        for row in x:
            h, n = h * 1.5 + row, n + 1
            if h.abs().max() > 20:
                break
        return h, n

    def rebound(self, x):
        for row in x:
            x = x * 0.5 + row
        return x

    def detached(self, x):
        h = x[0]
        for row in x.detach():
            h = h * 0.5 + row * x.mean()
        for row in x:
            h = h * 0.5 + row.detach()
        return h

    def asked(self, x):
        h, y = x[0], self.lin(x)
        for row in y:
            h = h * 0.5 + row * (2 if row.requires_grad else 1) * row.dim() * row.stride(0)
        for row in x.unbind(1):
            h = h * 0.5 + row.sum() * (2 if row.is_contiguous() else 1) * row.stride(0)
        return h

    def nested(self, x):
        h = x[0]
        for row in x:
            for one in row:
                h = h * 0.5 + one
        return h

    def flipped(self, x):
        h = x[0]
        for row in x.flip(0):
            h = h * 0.5 + row
        return h

    def skipping(self, x):
        h = x[0]
        for row in x:
            h = h * 0.5
            if row.sum() > 0:
                continue
            h = h + row
        return h

    def counting(self, x):
        h, n = x[0], 0
        for row in x:
            n += 2
            h = h * 0.5 + row * n + x.sum()
        return h, n

    def of_a_parameter(self, x):
        h = x
        for row in self.lin.weight:
            h = h * 0.5 + row
        return h

    def other_is_written(self, x):
        out = torch.zeros_like(x[0])
        for row in x:
            out += row
            self.seen.mul_(0.5).add_(row.detach())
        return out

    def caught(self, x):
        h = x[0]
        y = self.lin(x)
        for row in y:
            try:
                row.add_(1)
            except RuntimeError:  # autograd refuses it
                h = h + 1
            h = h * 0.5 + row
        return h, y

    def without_grad(self, x):
        h = x[0]
        with torch.no_grad():
            for row in x:
                h = h * 0.5 + row
        return h + x.sum()

    def whole_numbers(self, x):
        ids, h = (x * 10).long(), x[0].long()
        for row in ids:
            h = h // 2 + row
        return h

    def halves(self, x):
        h = x[0].bfloat16()
        for row in x.bfloat16():
            h = h * 0.5 + row
        return h

    def copied(self, x):
        outs = []
        for row in x:
            outs.append(row.clone())
        return torch.stack(outs, 1)

    def a_copy_is_written(self, x):
        h = x[0]
        for row in x:
            row = row.clone()
            row[0] = h[1]
            row.mul_(0.5)
            h = h * 0.5 + row
        return h


class OtherLoops(Loops):
    """What keeps a loop as it is."""

    def row_is_written(self, x):
        y, h = x.detach() * 2, x[0]
        for row in y:
            row.mul_(0.5)
            h = h * 0.5 + row
        return h, y

    def part_of_a_row_is_written(self, x):
        y, h = x.detach() * 2, x[0]
        for row in y:
            row[:2] = h[:2].detach()
            h = h * 0.5 + row
        return h, y

    def next_row_is_written(self, x):
        y, h = x.detach() * 1, x[0]
        for row in y:
            y[1:] *= 0.5
            h = h * 0.5 + row
        return h, y

    def base_is_written(self, x):
        y, h = x.detach() * 1, x[0]
        view = y[:, 0]
        for row in y:
            h = h * 0.5 + row
            view += 1
        return h, y

    def written_and_replaced(self, x):
        y = x.detach() * 1
        for row in y:
            y = y.add_(row.sum()) * 2
        return y

    def written_if(self, x):
        y, h = x.detach() * 1, x[0]
        for row in y:
            if row.sum() > 0:
                y.mul_(0.5)
            h = h * 0.5 + row
        return h, y

    def caught_write(self, x):
        y, h = x.detach() * 1, x[0]
        for row in y:
            try:
                row.add_(1)
            except Exception:
                h = h + 1
            h = h * 0.5 + row
        return h, y

    def appended(self, x):
        outs = []
        for row in x:
            outs.append(row)
        outs[0].sum()
        return torch.stack(outs, 1), outs

    def view_appended(self, x):
        outs = []
        for row in x:
            outs.append(row[None])
        return torch.cat(outs)

    def returned(self, x):
        h, prev = x[0], x[0]
        for row in x:
            h = h * 0.5 + row * prev
            prev = row
        return h, prev

    def stored(self, x):
        for row in x:
            self.kept = row
        return self.kept * 2  # pyright: ignore[reportOptionalOperand]

    def read_later(self, x):
        h = x[0]
        for row in x:
            h = h * 0.5 + row
        return h + row  # pyright: ignore[reportPossiblyUnboundVariable]

    def placed(self, x):
        h = x[0]
        for row in x:
            h = h * 0.5 + row * row.storage_offset()
        return h

    def windowed(self, x):
        h = x[0]
        for row in x:
            h = h * 0.5 + row.as_strided((4,), (1,))
        return h

    def in_a_list(self, x):
        h = x[0]
        for row in list(x):
            h = h * 0.5 + row
        return h

    def by_iterator(self, x):
        h, rows = x[0], iter(x)
        for row in rows:
            h = h * 0.5 + row + next(rows)
        return h

    def same(self, x):
        h, rows = x[0], x.unbind(0)
        for row in rows:
            h = h * 0.5 + (row if row is rows[2] else row * 2)
        return h

    def with_else(self, x):
        h = x[0]
        for row in x:
            h = h * 0.5 + row
        else:
            h = h + 1
        return h

    def none(self, x):
        h = x[0]
        for row in x[:0]:
            h = h * 0.5 + row
        return h


class Paired(Loops):
    """Rows with numbers, side by side, and parts of more than one row."""

    def numbered(self, x):
        h, outs = x[0], []
        for i, row in enumerate(x):
            h = torch.tanh(h * 0.5 + row * i)
            outs.append(h)
        return torch.stack(outs, 1), h

    def numbered_from(self, x):
        h = x[0]
        for i, row in enumerate(x.unbind(1), start=2):
            h = h * 0.5 + row.sum() * i + x[i - 2].mean()
        for i, row in enumerate(x, -3):
            h = h + row * i if i else h
        return h

    def side_by_side(self, x):
        h = x[0]
        for a, b in zip(x, (x * 2).unbind(0)):
            h = h * 0.5 + a * b
        return h

    def shortest(self, x):
        h, outs = x[0], []
        for a, b, t in zip(x, x[1:], range(9, 0, -1)):
            h = h * 0.5 + a * b / t
            outs.append(h * 2)
        return h, torch.stack(outs)

    def all_of_it(self, x):
        h, ids = x[0], (x * 10).long()
        for i, (a, (k, b)) in enumerate(zip(x, enumerate(ids, 1))):
            h = h * 0.5 + a * i + b * k + b.sum()
        return h

    def strictly(self, x):
        h = x[0]
        for a, b in zip(x, x.flip(0), strict=True):
            h = h * 0.5 + a * b
        return h

    def as_a_pair(self, x):
        h = x[0]
        for pair in zip(x, x.flip(0)):
            h = h * 0.5 + torch.maximum(*pair) + pair[0]
        return h

    def parts(self, x):
        h, outs = x[:2], []
        for part in x.repeat(4, 1).split(2):
            h = torch.tanh(h * 0.5 + part)
            outs.append(h.sum(0))
        for part in torch.split(x, 1, dim=1):
            h = h * 0.5 + part[:2]
        return h, torch.stack(outs)

    def chunks(self, x):
        h = x[:, 0]
        for part in x.chunk(4, dim=-1):
            h = h * 0.5 + part.sum(1) * part.stride(0)
        for i, part in enumerate(torch.chunk(x.repeat(4, 1), len(x))):
            h = h * 0.5 + part.mean() * i
        return h

    def whole_parts(self, x):
        ids, h = (x * 10).long(), x[:2].long()
        for part in ids.repeat(4, 1).split(2, 0):
            h = h // 2 + part
        return h

    def ends_by_a_row(self, x):
        h, n = x[0], 0
        for i, row in enumerate(x):
            h, n = h * 1.5 + row * i, n + 2
            if row.sum() > 0.5:
                break
        return h, n

    def number_read_later(self, x):
        h = x[0]
        for i, row in enumerate(x):
            h = h * 0.5 + row * i
        return h + i  # pyright: ignore[reportPossiblyUnboundVariable]

    def returns(self, x):
        h = x[0]
        for row in x:
            h = h * 0.5 + row
            if x.dim() > 2:
                return h
        return h


class OddlyPaired(Loops):
    """What keeps such loops as they are."""

    def unequal(self, x):
        h, y = x[0], torch.cat([x, x, x[:1]])
        for part in y.split(5):
            h = h * 0.5 + part.sum(0)
        for part in y.chunk(5):
            h = h * 0.5 + part.sum(0)
        return h

    def of_sizes(self, x):
        h = x[0]
        for part in x.split([1] * len(x)):
            h = h * 0.5 + part[0]
        return h

    def with_a_list(self, x):
        h = x[0]
        for a, b in zip(x, [1.0, 2.0, 3.0, 4.0, 5.0]):
            h = h * 0.5 + a * b
        return h

    def with_an_iterator(self, x):
        h, numbers = x[0], iter(range(12))
        for a, b in zip(numbers, x):
            h = h * 0.5 + a * b
        return h + next(numbers)

    def numbered_iterator(self, x):
        h, pairs = x[0], enumerate(x)
        for i, row in pairs:
            h = h * 0.5 + row * i + next(pairs)[1]
        return h

    def too_strict(self, x):
        h = x[0]
        try:
            for a, b in zip(x, x[2:], strict=True):
                h = h * 0.5 + a * b
        except ValueError:
            h = h * 7
        return h

    def pair_appended(self, x):
        pairs = []
        for pair in zip(x, x.flip(0)):
            pairs.append(pair)
        return pairs

    def other_is_written(self, x):
        y, h = x.detach() * 1, x[0]
        for a, b in zip(x, y):
            y[-1] += 1
            h = h * 0.5 + a + b
        return h, y

    def first_writes(self, x):
        y, h = x.detach() * 1, x[0]
        for i, row in enumerate(y):
            if i == 0:
                y.mul_(2)
            h = h * 0.5 + row
        return h, y

    def part_is_written(self, x):
        y, h = x.detach().repeat(4, 1), x[0]
        for part in y.split(2):
            part[0] *= 2
            h = h * 0.5 + part.sum(0)
        return h, y

    def window_of_the_storage(self, x):
        h, y = x[0], x.detach() * 2
        for row in y:
            h = h * 0.5 + row + row.as_strided((4,), (1,), 4)
        return h

    def seen_by_id(self, x):
        h, seen = x[0], {}
        for row in x:
            seen[id(row)] = 1
            h = h * 0.5 + row
        return h, len(seen)

    def turned(self, x):
        h, y, z = x[0], x.detach() * 2, x.detach() @ x.detach().t()
        for row in x:
            h = h * 0.5 + row + y.sum()
            y.t_()
        for _ in range(5):
            y.t_()
        square = z
        for row in x:
            z = z.t_()
            h = h * 0.5 + row + z[0, 1]
        return h, y, z, square

    def shadowed(self, x):
        def zip(a, b):
            return [(b[0], a[0])] * 5

        h = x[0]
        for a, b in zip(x.unbind(0), x.unbind(1)):
            h = h * 0.5 + a.sum() * b
        return h


scanned = (Loops, Paired)
ways = [
    pytest.param(kind, name, id=f"{kind.__name__}-{name}")
    for kind in (*scanned, OtherLoops, OddlyPaired)
    for name, way in vars(kind).items()
    if name[0] != "_" and callable(way)
]


@pytest.mark.parametrize(("kind", "name"), ways)
def test_rows_of_a_loop(kind: type[Loops], name: str, short: None):
    class One(kind):
        forward = vars(kind)[name]

    calls = tuple((torch.randn(rows, 4),) for rows in (6, 8, 6))
    ported = check_calls(Scenario(name, One, calls), by_tpuport)
    assert bool(rolled(ported)) is (kind in scanned)
    check_gradients(Scenario(name, One, calls[:1]), by_tpuport)
