"""Random modules through `convert`, and what they have found.

`python -m benchmarks.whole_programs` runs more of them; `TPUPORT_FUZZ` sets how many run here.
"""

import inspect
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import tpuport
from benchmarks.whole_programs.judge import FINDS, Judge, TooSlow, limited
from benchmarks.whole_programs.programs import Call, Maker, Node, Program
from benchmarks.whole_programs.shrink import shrink
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients
from tpuport.foundation.errors import PortError

# A program that ends may take what the first one of a process does, beside other work.
SECONDS = 30.0

FEW, MORE = 8, int(os.environ.get("TPUPORT_FUZZ", "200"))


def random_program(seed: int) -> Program:
    return Maker(seed).program()


def check_programs(
    seeds: range, folder: Path, make: Callable[[int], Program] = random_program
) -> None:
    """No program differs."""
    judge = Judge(folder, SECONDS)
    for seed in seeds:
        program = make(seed)
        verdict = judge.run(program)
        assert verdict.kind not in FINDS, f"{verdict}\n{program.script()}"


def test_random_programs_are_eagers(tmp_path: Path):
    check_programs(range(FEW), tmp_path)


# The fast sibling is the one above.
@pytest.mark.slow
def test_many_random_programs_are_eagers(tmp_path: Path):
    check_programs(range(FEW, FEW + MORE), tmp_path)


def written(*lines: str, later: str = "ordinary", verify: bool = False) -> Program:
    """A program of these lines."""
    body = [Node("statement", line) for line in ("a = x", "s = x.sum()", *lines)]
    calls = [Call("ordinary", 1), Call(later, 1)]
    return Program(0, [], body, "return a, s", calls, True, verify)


def test_a_difference_is_found_and_made_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = torch.Tensor.tanh
    traced = tpuport.tracing.core.tensor.TracedTensor
    monkeypatch.setattr(
        torch.Tensor, "tanh", lambda t: right(t) * (2 if isinstance(t, traced) else 1)
    )
    judge = Judge(tmp_path, SECONDS)
    program = written("a = a + 1", "if s > 100:\n    s = s + 1", "a = a.tanh()")
    verdict = judge.run(program)
    assert verdict.kind in ("silent", "gradient")
    small = shrink(program, lambda one: judge.run(one).kind == verdict.kind)
    assert "tanh" in small.source()
    assert "s + 1" not in small.source()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("a = x[7]", "eager raises"),
        ("a = x[x > 0]", "refused"),
        ("a = torch.randn(3)", "rounding"),  # eager PyTorch differs from itself
    ],
)
def test_what_becomes_of_a_program_is_told(line: str, kind: str, tmp_path: Path):
    assert Judge(tmp_path, SECONDS).run(written(line)).kind == kind


@pytest.mark.parametrize(
    "program",
    [
        written("a = 1 / x.amax(1)", later="zeros"),
        written("s = y", "if m.any():\n    a = y", verify=True),
    ],
)
def test_what_the_promises_except_is_no_find(program: Program, tmp_path: Path):
    assert Judge(tmp_path, SECONDS).run(program).kind == "excepted"


def test_a_program_given_up_in_a_callback_leaves_no_warning():
    def spin(_: object) -> None:
        end = time.process_time() + SECONDS
        while time.process_time() < end:
            pass

    def program() -> None:
        model = nn.Identity()
        watch = weakref.ref(model, spin)
        del model  # `spin` runs, and Python ignores what is raised in it
        assert watch() is None
        spin(None)

    with pytest.raises(TooSlow), limited(0.01):
        program()


# -- what they found -------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["u[0].add_(1)", "torch.add(u[0], 1, out=u[0])"])
def test_a_write_that_eager_refuses_on_one_path_is_refused(write: str, tmp_path: Path):
    branch = "if m.any():\n    a = x * 2\nelif self.cache is None:\n    x[1:] = x[:-1].clone()"
    lines = (
        "a = self.lin(x)",
        branch,
        "u = a.unbind(0)",
        write,
        "s = [r for r in y if r.sum() > 0]",
    )
    verdict = Judge(tmp_path, SECONDS).run(written(*lines, "s = len(s)"))
    assert (verdict.kind, verdict.line) == ("refused", write)
    assert "require grad, which depends on a branch" in verdict.what


class Flag(nn.Module):
    """A flag that a call sets by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x + 1 if self.kept else x
        self.kept = bool((x > 1).any())
        return out


class Last(nn.Module):
    """A number of the last call, None before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x if self.kept is None else x + self.kept
        self.kept = x.sum().item()
        return out


class Count(nn.Module):
    """A count of what the calls have seen."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept += int((x > 0).sum())
        return x * self.kept


@pytest.mark.parametrize("made", [Flag, Last, Count])
def test_an_attribute_set_to_a_traced_number_is_state(made: type[nn.Module]):
    calls = tuple((torch.tensor(x),) for x in ([1.0, 0.5], [2.0, -1.0], [0.0, 0.0], [3.0, 1.0]))
    eager = made()
    for call in calls:
        eager(*call)
    ported = check_calls(Scenario(made.__name__, made, calls), by_tpuport)
    kept = ported.to_torch().kept
    assert type(kept) is type(eager.kept)
    assert kept == eager.kept


class History(nn.Module):
    """A list of traced numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.sum().item())
        return x


class TwoForms(nn.Module):
    """A branch whose outcomes differ in structure."""

    def forward(self, x: torch.Tensor) -> Any:
        y = x * 2
        if x.sum() > 0:
            return y
        return y, x


class ManyPaths(nn.Module):
    """A loop with a way out in each round."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for row in x:
            if row.max() > 0:
                return x * row
            x = x + 1
        return x


def test_a_way_out_in_each_of_a_few_rounds_is_a_path():
    ported = tpuport.convert(ManyPaths())
    for shift in (-3.5, 0.5, -20.0):
        x = torch.linspace(-1, 0, 16).reshape(8, 2) + shift
        torch.testing.assert_close(tpuport.to_torch(ported(x)), ManyPaths()(x))


@pytest.mark.parametrize(
    ("target", "x", "line"),
    [
        (History(), torch.ones(2), "def forward(self, x"),
        (TwoForms(), torch.ones(2), "if x.sum() > 0:"),
        (ManyPaths(), torch.ones(14, 2), "for row in x:"),
    ],
)
def test_a_refusal_names_a_line_of_the_module(target: nn.Module, x: torch.Tensor, line: str):
    with pytest.raises(PortError) as error:
        tpuport.convert(target, verify=False)(x)
    assert error.value.file == __file__
    assert line in inspect.getsource(type(target))
    assert (error.value.source_line or "").startswith(line)


class Inverted(nn.Module):
    """`~` of a traced number, which only a branch computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = x + ~int(x.sum())
        return x


def test_what_a_traced_number_cannot_do_is_no_error_of_the_code():
    with pytest.raises(PortError, match="where its value is needed") as error:
        tpuport.convert(Inverted(), verify=False)(torch.ones(2))
    assert (error.value.source_line or "").strip() == "x = x + ~int(x.sum())"


class Halving(nn.Module):
    """A loop that ends by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        total, rounds = (x * self.weight).sum(), 0
        while total > 1:
            total = total / 2
            rounds += 1
        return total, rounds


def test_a_while_loop_has_derivatives_of_first_order():
    ported = tpuport.convert(Halving(), verify=False)

    def total(params: Any) -> Any:
        return ported.apply(params, {}, None, jnp.ones(3))[0][0]

    value, tangent = jax.jvp(total, (ported.params,), (ported.params,))
    assert (float(value), float(tangent)) == (0.75, 0.75)
    gradient = jax.jit(jax.grad(total))(ported.params)
    assert gradient["weight"].tolist() == [0.25, 0.25, 0.25]
    with pytest.raises(PortError, match="no second derivative") as error:
        jax.grad(lambda params: jax.grad(total)(params)["weight"].sum())(ported.params)
    assert (error.value.source_line or "").strip() == "while total > 1:"


def _write_selected(x: torch.Tensor, m: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    out = x * 0
    out[k] = x[m]
    return out


def _add_selected(x: torch.Tensor, m: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return x[: len(k) - 1] + x[m]


def _write_by_places(x: torch.Tensor, m: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return x.index_put((k.nonzero()[:, 0],), x[m])


@pytest.mark.parametrize("function", [_write_selected, _add_selected, _write_by_places])
def test_one_selected_row_serves_all_places(function: Any):
    x, k = torch.arange(6.0).reshape(3, 2), torch.tensor([True, False, True])
    one, two = torch.tensor([False, True, False]), torch.tensor([True, True, False])
    scenario = Scenario(function.__name__, lambda: function, ((x, one, k), (x, two, k)))
    ported = check_calls(scenario, by_tpuport)
    check_gradients(scenario, by_tpuport)
    with pytest.raises(RuntimeError, match=r"must match|shape mismatch"):
        ported(x, torch.ones(3, dtype=torch.bool), k)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * (x > 0),
        lambda x: x * (x > 0).float(),
        lambda x: (x > 0) * x,
        lambda x: x.clone().mul_(x > 0),
        lambda x: (x * (x > 0).to(x.dtype)).sum(0),
    ],
)
def test_a_mask_as_a_factor_keeps_nan_and_the_sign_of_zero(function: Any):
    x = torch.tensor([torch.nan, 1.0, -1.0, torch.inf, -torch.inf])
    got, want = tpuport.convert(function, verify=False)(x).torch(), function(x)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(1 / got.nan_to_num(3.0), 1 / want.nan_to_num(3.0))


def _filled(v: torch.Tensor, m: torch.Tensor) -> Any:
    v, w = v.clone(), v * 1
    v[m] = v[0]
    w[m] = w[1:2]
    return v, w


def test_a_mask_is_filled_with_an_element_of_its_own_tensor():
    v, m = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, False, True])
    scenario = Scenario("filled", lambda: _filled, ((v, m), (v.flip(0), ~m)))
    check_calls(scenario, by_tpuport)
    check_gradients(scenario, by_tpuport)


class _Loops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(3)
        self.may_loop = False

    def forward(self, x: torch.Tensor, m: torch.Tensor) -> Any:
        s, rounds = x.sum(), 0
        while s > 0 and rounds < 2:
            rounds += 1
            if m[0]:
                continue
            self.total = x.mean(0)
        while s > 10:
            s = s / 2
            assert self.may_loop, "each round raises"
        try:
            while s < -10:
                s = s / 2
                raise ValueError
        except ValueError:
            s = s - 7
        return s, rounds, self.total * 2


def test_loops_that_raise_in_each_round_or_set_attributes_in_some():
    x, m = torch.full((2, 3), 0.5), torch.tensor([True, False])
    calls = ((-x, m), (x, m), (x * 2, ~m), (x, m), (-9 * x, m))
    ported = check_calls(Scenario("loops", _Loops, calls), by_tpuport)
    with pytest.raises(AssertionError, match="each round raises"):
        ported(9 * x, m)


class _RaisesAfterAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        a = self.linear(x)
        a[int(m.sum()), 0] = 1.0  # IndexError
        while x.sum() == 0:
            torch.add(a, a, out=a)  # RuntimeError, since `a` has a gradient
        if x.sum() > 100:
            raise KeyError
        return a


@pytest.mark.parametrize(
    ("x", "m", "error"),
    [
        (0.0, [True, True], IndexError),
        (99.0, [True, True], IndexError),
        (0.0, [True, False], RuntimeError),
        (99.0, [False, False], KeyError),
    ],
)
def test_of_two_errors_the_first_is_raised(x: float, m: list[bool], error: type[Exception]):
    module = _RaisesAfterAnother()
    ported = tpuport.convert(module)
    ported(torch.ones(2, 3), torch.tensor([True, False]))
    for one in (module, ported):
        with pytest.raises(error):
            one(torch.full((2, 3), x), torch.tensor(m))
