"""Loops of many rounds: one program, equal to eager PyTorch."""

import os
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from jax.extend.core import jaxprs_in_params
from torch import nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients
from tests.exactness.test_whole_programs import check_programs
from tests.model import long_programs

FEW, MORE = 3, int(os.environ.get("TPUPORT_FUZZ", "200"))


class Selective(nn.Module):
    """The scan of a state-space model, as references write it."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.project = nn.Parameter(-torch.rand(4, 3)), nn.Linear(4, 10)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        delta, b, c = self.project(u).split([4, 3, 3], dim=-1)
        delta = nn.functional.softplus(delta)
        da = torch.exp(torch.einsum("bld,dn->bldn", delta, self.decay))
        dbu = torch.einsum("bld,bln,bld->bldn", delta, b, u)
        x, ys = torch.zeros(u.shape[0], 4, 3), []
        for i in range(u.shape[1]):
            x = da[:, i] * x + dbu[:, i]
            ys.append(torch.einsum("bdn,bn->bd", x, c[:, i]))
        return torch.stack(ys, dim=1)


class Recurrent(nn.Module):
    """A cell over the time steps, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.drop = nn.LSTMCell(4, 4), nn.Dropout(0.3)

    def forward(self, u: torch.Tensor) -> Any:
        state, outputs = (torch.zeros(len(u), 4), torch.zeros(len(u), 4)), []
        for t in range(u.size(1)):
            state = self.cell(u[:, t], state)
            outputs.append(self.drop(state[0]).unsqueeze(1))
        return torch.cat(outputs, 1), state


def rolled(ported: Any) -> list[str]:
    return [line for line in str(ported.report).splitlines() if "one lax.scan of" in line]


def size_of(model: nn.Module, *given: torch.Tensor) -> int:
    """How many operations the program of a model has, those of inner programs included."""

    def count(jaxpr: Any) -> int:
        inner = [j for e in jaxpr.eqns for j in jaxprs_in_params(e.params)]
        return len(jaxpr.eqns) + sum(map(count, inner))

    ported = tpuport.convert(model, verify=False)
    args = [tpuport.foundation.interop.backend.to_jax(one) for one in given]

    def program() -> Any:
        run = jax.make_jaxpr(lambda *a: ported.apply(ported.params, {}, jax.random.key(0), *a)[0])
        return run(*args).jaxpr

    program()  # it holds what attempts to find the loop have traced, too
    return count(program())


@pytest.mark.parametrize("kind", [Selective, Recurrent])
def test_a_loop_over_time_is_one_scan(kind: type[nn.Module]):
    calls = tuple((torch.randn(2, length, 4),) for length in (64, 72))
    ported = check_calls(Scenario("time", kind, calls, train=False), by_tpuport)
    assert rolled(ported)
    check_gradients(Scenario("time", kind, calls[:1], train=False), by_tpuport)


def test_the_program_is_no_longer_for_more_rounds():
    few, many = (size_of(Selective(), torch.randn(2, length, 4)) for length in (64, 160))
    assert many - few <= 96  # a row of each round, which nothing reads


def test_short_loops_stay_as_they_are():
    ported = tpuport.convert(Selective(), verify=False)
    ported(torch.randn(2, 12, 4))
    assert not rolled(ported)


def test_random_loops_are_eagers(short: None, tmp_path: Path):
    check_programs(range(FEW), tmp_path, long_programs.program)


# The fast sibling is the one above.
@pytest.mark.slow
def test_many_random_loops_are_eagers(short: None, tmp_path: Path):
    check_programs(range(FEW, FEW + MORE), tmp_path, long_programs.program)


class Loops(nn.Module):
    """What the lists of a loop may be used for; `scanned` are those that become one program."""

    scanned = (
        *("last_is_the_state", "first_is_the_state", "numbers", "nothing", "nested", "parts"),
        *("backwards", "twice", "drawn", "ends_early", "held", "stays"),
        *("stays_and_is_written", "never_bound", "bound_by_the_first"),
    )
    is_lstm = False

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def last_is_the_state(self, x):
        outs = []
        for _ in range(6):
            x = x * 0.5 + self.lin.bias
            outs.append(x)
        x.mul_(2)
        return torch.stack(outs), outs, x

    def first_is_the_state(self, x):
        h, outs = x * 1, []
        for _ in range(6):
            outs.append(h)
            h = h * 0.5 + self.lin.bias
        outs[0].mul_(2)
        outs[3].add_(1)
        return torch.stack(outs, 1), outs, h

    def a_view_is_written_later(self, x):
        outs = []
        for _ in range(6):
            x = x * 0.5 + self.lin.bias
            outs.append(x[:, None])
        x.mul_(2)
        return torch.cat(outs, 1)

    def numbers(self, x):
        outs, places = [], []
        for t in range(2, 14, 2):
            x = x * 0.5 + t
            outs.append((t, {"x": x * 1}))
            places.append(t * 3 - 1)
        return outs, places

    def nothing(self, x):
        outs = []
        for _ in range(6):
            x = x * 0.5
            outs.append(None)
        return x, outs

    def nested(self, x):
        rows = []
        for i in range(6):
            for j in range(2):
                x = x * 0.5 + i * j
            rows.append(x.sum(0))
        return torch.stack(rows)

    def parts(self, x):
        outs = [x]
        for _ in range(6):
            x = x * 0.5
            outs.append(x + 1)
        y = torch.stack([*outs[2:5], x, *outs[:3]], -1)
        return y, torch.cat(outs), torch.cat(outs[1:], 1), outs[::-1]

    def backwards(self, x):
        scales, outs = torch.arange(7.0), []
        for t in reversed(range(1, 7)):
            x = x * 0.5 + scales[t] - scales[t - 1] * t
            outs.append(x * t)
        return torch.stack(outs), x

    def ends_early(self, x):
        rounds = 0
        for t in range(1, 7):
            x, rounds = x * 1.5 + t, rounds + 1
            if x.abs().max() > 30:
                break
        return x, rounds

    def both_paths(self, x):
        outs = []
        for _ in range(6):
            x = x * 0.5
            if x.sum() > 0.1:
                outs.append(x + 1)
            else:
                outs.append(x - 1)
        return torch.stack(outs)

    def twice(self, x):
        a, b = [], []
        for _ in range(6):
            x = x * 0.5
            a.append(x.relu())
            a.append(x.sum())
            b.extend([x + 1, x * 2])
        return a, torch.stack(b)

    def drawn(self, x):
        outs = []
        for _ in range(6):
            outs.append(nn.functional.dropout(x, 0.0) + 1)
            x = x * 0.5
        return torch.stack(outs)

    def by_another_name(self, x):
        outs = []
        put = outs.append
        for _ in range(6):
            x = x * 0.5
            put(x * 2)
        return outs

    def read(self, x):
        outs = []
        for _ in range(6):
            x = x * 0.5 + (outs[-1] if outs else 0)
            outs.append(x * 2)
        return outs

    def counted(self, x):
        outs = []
        for _ in range(6):
            x = x * 0.5
            try:
                n = len(outs)
            except Exception:
                n = 7
            outs.append(x * n)
        return outs

    def held(self, x):
        box = {"outs": []}
        for _ in range(6):
            x = x * 0.5
            box["outs"].append(x * 2)
        return box

    def shared(self, x):
        outs, more, kept = [], [], [x]
        for _ in range(6):
            x = x * 0.5
            outs.append(x)
            more.append((x, kept))
        return outs, more


class Staying(Loops):
    """Variables that rounds leave as they were, or unbound."""

    def stays(self, x):
        h = torch.zeros(2, 4)
        c, outs = h, []
        for _ in range(6):
            if self.is_lstm:
                h, c = c * 0.5 + x, h
            else:
                h = torch.tanh(h * 0.5 + self.lin.bias + x)
            outs.append(h)
        c.add_(1)
        return torch.stack(outs), h, c

    def stays_and_is_kept(self, x):
        h = c = torch.zeros(2, 4)
        outs = []
        for _ in range(6):
            if self.is_lstm:
                c = h
            h, kept = h * 0.5 + x, c
            outs.append(h)
        c.add_(1)
        return torch.stack(outs), kept

    def stays_and_is_appended(self, x):
        h, c = x, torch.zeros(2, 4)
        outs = []
        for _ in range(6):
            if self.is_lstm:
                c = h
            h = h * 0.5 + x
            outs.append(c)
        c.add_(1)
        return h, outs

    def stays_and_is_written(self, x):
        h = c = torch.zeros(2, 4)
        outs = []
        for _ in range(6):
            if self.is_lstm:
                c = h
            c.add_(1)
            h = h * 0.5 + x + c
            outs.append(h)
        return torch.stack(outs), c

    def never_bound(self, x):
        h, outs = torch.zeros(2, 4), []
        for _ in range(6):
            if self.is_lstm:
                h, c = c * 0.5 + x, h  # noqa: F821, F841
            else:
                h = torch.tanh(h * 0.5 + self.lin.bias + x)
            outs.append(h)
        return torch.stack(outs)

    def bound_by_the_first(self, x):
        h, outs = x * 1, []
        for t in range(6):
            if t == 0:
                c = x * 2
            else:
                c = torch.tanh(c * 0.5 + h)
            h = h * 0.5 + self.lin.bias + c
            outs.append(h)
        return torch.stack(outs)


ways = {
    name: function
    for kind in (Loops, Staying)
    for name, function in vars(kind).items()
    if callable(function) and name not in ("__init__", "forward")
}


@pytest.mark.parametrize("name", ways)
def test_lists_of_a_loop(name: str, short: None):
    class One(Loops):
        forward = ways[name]

    calls = ((torch.randn(2, 4),), (torch.randn(2, 4),))
    ported = check_calls(Scenario(name, One, calls), by_tpuport)
    assert bool(rolled(ported)) is (name in Loops.scanned)
    check_gradients(Scenario(name, One, calls[:1]), by_tpuport)


def test_a_variable_that_no_round_has_bound_is_unbound(short: None):
    class One(Loops):
        def forward(self, x):
            for t in range(6):
                if t == 9:
                    c = x
                x = x * 0.5 + (c if t == 5 else 1)
            return x

    ported = tpuport.convert(One(), verify=False)
    with pytest.raises(UnboundLocalError, match="'c'"):
        One()(torch.randn(2, 4))
    with pytest.raises(UnboundLocalError, match="no round of the loop before it has bound"):
        ported(torch.randn(2, 4))
