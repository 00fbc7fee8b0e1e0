"""What the sides of a branch write: only the side that is taken has an effect.

Contents:
    FUNCTIONS           writes to rows, views, host tensors, lists and dicts, caught errors, and
                        writes after a branch to what was a tensor from before on one side
    test_generated      random row loops of branches, in one program, with gradients
"""

import contextlib
import copy
import random
import textwrap
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients

X = torch.tensor([[1.0, 2.0], [3.0, -4.0], [-0.5, 0.5], [0.25, 1.0]])
MASKS = [[True, False, True, True], [False] * 4, [True] * 4]
CALLS = tuple((x, torch.tensor(m)) for m in MASKS for x in (X, -X))


def rows(x: torch.Tensor, m: torch.Tensor) -> Any:
    a = x.clone()
    for j in range(8):
        if m[j % 4]:
            a[j % 4] = a[(j + 1) % 4] * 2
        else:
            a[j % 4, 0] += 1
    return a


def views(x: torch.Tensor, m: torch.Tensor) -> Any:
    a = x.clone()
    flat, row = a.view(-1), a[1]
    for j in range(4):
        if m[j]:
            flat[j] = 5.0
            row += 1
        else:
            a[j].mul_(2)
    return a, flat, row


def logarithms(x: torch.Tensor, m: torch.Tensor) -> Any:
    a = x.clone()
    for j in range(4):
        if x[j, 0] > 0:
            a[j] = x[j].abs().log()
    return a


def host_tensors(x: torch.Tensor, m: torch.Tensor) -> Any:
    z, counts = torch.zeros(4), torch.arange(2)
    for j in range(4):
        if m[j]:
            z[j] = 1
            counts += 1
    if x.sum() > 0:
        z += x[0, 0]
    return x * 2, z, counts


def containers(x: torch.Tensor, m: torch.Tensor) -> Any:
    out: list[Any] = [0, 0, 0, 0]
    seen: dict[str, Any] = {"n": 0, "last": x[0]}
    for j in range(4):
        if m[j]:
            out[j] = x[j].sum()
            seen["n"] += 1
            seen["last"] = x[j]
        else:
            out[j] = x[j].max()
    return torch.stack(out), seen["n"], seen["last"]


def caught(x: torch.Tensor, m: torch.Tensor) -> Any:
    a = x.clone()
    try:
        if m[0]:
            a[0] = 7
            raise ValueError("no")
        a = a + 1
    except ValueError:
        a = a * 2
    return a


def appended(x: torch.Tensor, m: torch.Tensor) -> Any:
    kept = []
    for j in range(3):
        if m[j]:
            kept.append(x[j])
    return len(kept), x


def one_of_two(x: torch.Tensor, m: torch.Tensor) -> Any:
    a, b = x * 1, x * 2
    c = a if m[0] else b
    c[0] = 7
    a += 1
    b = b * 2 if m[1] else a
    d = b
    if m[2]:
        d = c
    b *= 3
    return a, b, c, d


def a_row_or_another(x: torch.Tensor, m: torch.Tensor) -> Any:
    a = x.clone()
    row = a[0] if m[0] else a[1]
    row.add_(1)
    return a, row


def the_same_twice(x: torch.Tensor, m: torch.Tensor) -> Any:
    a = b = x * 1
    if m[0]:
        a = b = x * 2
    elif m[1]:
        a = x * 3
    a += 1
    return a, b


def one_again(x: torch.Tensor, m: torch.Tensor) -> Any:
    a = x * 1
    b = a
    if m[1]:
        b = x * 4
    if m[0]:
        b, a = a, x * 5
    b += 1
    return a, b


def a_host_tensor_or_not(x: torch.Tensor, m: torch.Tensor) -> Any:
    z = torch.zeros(4, 2)
    y = z if m[0] else x * 2
    y += 1
    return y, z


def names_under_no_grad(x: torch.Tensor, m: torch.Tensor) -> Any:
    a, b = x * 1, x * 2
    c, d = x * 3, x * 4
    with torch.no_grad():
        if m[0]:
            a = b
        if m[1]:
            c = c * 2
        while d.sum() > 100:
            d = d / 2
    return a, c, d


def a_container_or_a_new_one(x: torch.Tensor, m: torch.Tensor) -> Any:
    """Write to what a name stands for on one side, and make another on the other side."""
    given: Any = None
    out = x.new_zeros(2)
    for j in range(3):
        if given is None or m[j]:
            given = {"a": x[j], "inner": {"b": x[j] * 2}}
        else:
            for key in ("a",):
                given[key] = given[key] * 3
            given["inner"]["b"] = given["inner"]["b"] - 1
        out = out + given["a"] * given["inner"]["b"]
    pair = [x[0], {"c": x[1]}]
    if m[1]:
        pair[1] = {"c": x[2]}
    else:
        pair[0] = pair[0] * 2
        pair[1]["c"] = pair[1]["c"] * 5
    return out, pair[0], pair[1]["c"]


FUNCTIONS = [
    names_under_no_grad,
    a_container_or_a_new_one,
    one_of_two,
    a_row_or_another,
    the_same_twice,
    one_again,
    a_host_tensor_or_not,
]
FUNCTIONS += [rows, views, logarithms, host_tensors, containers, caught, appended]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_only_the_side_that_is_taken_writes(function: Any):
    scenario = Scenario(function.__name__, lambda: function, CALLS)
    check_calls(scenario, by_tpuport)
    if function not in (views, a_row_or_another):  # eager PyTorch refuses these
        check_gradients(scenario, by_tpuport)


def checked(x: torch.Tensor, m: torch.Tensor) -> Any:
    a = x.clone()
    if m.all():
        a[0] = 1
        raise ValueError("all")
    return a


def test_what_comes_before_an_error_happens_with_it_only():
    ported = tpuport.convert(checked, verify=False)
    assert torch.equal(tpuport.to_torch(ported(*CALLS[0])), X)
    with pytest.raises(ValueError, match="all"):
        ported(X, torch.tensor(MASKS[2]))


class Stateful(nn.Module):
    """State that one side changes: a buffer, numbers, a flag."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.weight = nn.Parameter(torch.ones(2))
        self.count, self.flag = 0, False

    def step(self, row: torch.Tensor) -> torch.Tensor:
        if row[0] > 1:
            self.count += 1
            return row
        self.flag = True
        return row * 2

    def forward(self, x: torch.Tensor, m: torch.Tensor) -> Any:
        for j in range(4):
            if m[j]:
                self.total += x[j].detach()
                self.count += 1
            elif x[j, 0] > 1:
                self.total = self.total * 2
                self.total[0] = 3
        return torch.stack([self.step(row) for row in x]) * self.weight + self.total


def test_state_that_one_side_changes():
    scenario = Scenario("state", Stateful, CALLS)
    eager = Stateful()
    for call in CALLS:
        eager(*call)
    kept = check_calls(scenario, by_tpuport).to_torch()
    assert (kept.count, kept.flag) == (eager.count, eager.flag)
    check_gradients(scenario, by_tpuport)


def test_a_row_loop_takes_one_path():
    ported = tpuport.convert(rows, verify=False)
    ported(*CALLS[0])
    assert {branch.how for branch in ported.report.branches} == {"lax.cond"}


def test_a_while_loop_of_no_rounds_gives_what_was_before():
    def halved(x: torch.Tensor, m: torch.Tensor) -> Any:
        a = x * 1
        b = a if m[0] else x * 2
        kept = c = x * 3
        while a.sum() > 1:
            a = a / 2
            c = c
        a += 1
        kept += 1
        return a, b, c, kept

    def swapped(x: torch.Tensor) -> Any:
        a, b = x * 1, x * 2
        while a.sum() > 1:
            a, b = b / 4, a
        b += 1
        return a, b

    calls = ((X / 9, torch.ones(1) > 0), (X, torch.ones(1) > 0), (X / 9, torch.ones(1) > 1))
    check_calls(Scenario("halved", lambda: halved, calls), by_tpuport)
    with pytest.raises(tpuport.PortError, match="shares memory with another tensor") as error:
        tpuport.convert(swapped, verify=False)(X)
    assert error.value.source_line == "b += 1"


def test_an_int_on_one_side_and_a_float_on_the_other():
    def scaled(x: torch.Tensor, m: torch.Tensor) -> Any:
        n = 1 if m[0] else 0.5
        return torch.arange(3) * n if m[0] else torch.arange(3) + x[0, 0].int(), x * n

    check_calls(Scenario("scaled", lambda: scaled, CALLS), by_tpuport)
    refused = tpuport.convert(lambda x: (x, 1 if x.sum() > 0 else 0.5), verify=False)
    with pytest.raises(tpuport.PortError, match=r"differ in .*\(.*int\) against \(.*float\)"):
        refused(X)


# -- generated -------------------------------------------------------------------------------------

TESTS = ["m[j]", "x[j, 0] > 0", "a[j].sum() > b[j].sum()", "n > 1", "not m[j] or n == 0"]
WRITES = [
    "a[j] = b[j] * 2", "a[j, 0] += 1", "b[j] = x[j].exp()", "a[j] = a[j - 1]", "n += 1",
    "b[j:] *= 0.5", "w[0].add_(1)", "s = s + a[j].sum()", "a = a * 1.5", "b = a.clone()",
    "a = b", "b = a", "a, b = b, a", "c[j] = n", "d['k'] = s", "a[j] = a[j].sqrt()",
    "h[j] = 2", "h += 1", "s = s * h[j]",
]  # fmt: skip


def generated(seed: int) -> str:
    """Return the text of a row loop of branches."""
    draw = random.Random(seed)

    def block(depth: int) -> str:
        lines = [draw.choice(WRITES) for _ in range(draw.choice((1, 1, 2)))]
        if depth and draw.random() < 0.4:
            lines.append(branch(depth - 1))
        return "\n".join(lines)

    def branch(depth: int) -> str:
        text = f"if {draw.choice(TESTS)}:\n{textwrap.indent(block(depth), '    ')}"
        if draw.random() < 0.5:
            text += f"\nelse:\n{textwrap.indent(block(depth), '    ')}"
        return text

    body = textwrap.indent("\n".join([branch(1), block(0)]), "    ")
    start = "a, b, n, s = x * 1, x * 2, 0, x.sum()\nw, c, d = a.view(2, 4), [0] * 4, {'k': s}\n"
    end = "return a, b, n, s, w, c, d['k'], h"
    lines = f"{start}h = torch.ones(4)\nfor j in range(3):\n{body}\n{end}"
    return f"def row_loop(x, m):\n{textwrap.indent(lines, '    ')}\n"


# The first has no branch on a traced value, the second has two in each other, as the third.
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_generated(seed: int, tmp_path: Any):
    text = generated(seed)
    path = tmp_path / f"row_loop_{seed}.py"
    path.write_text(f"import torch\n\n\n{text}")
    space: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    ported = tpuport.convert(space["row_loop"], verify=False)

    def total(out: Any) -> Any:
        return out[0].sum() + 2 * out[1].sum() + 3 * out[3] + out[4].sum()

    gradient = jax.jit(jax.grad(lambda x, m: total(ported.apply({}, {}, None, x, m)[0])))
    for x, m in CALLS:
        leaf = x.clone().requires_grad_()
        want = space["row_loop"](leaf, m)
        have = tpuport.to_torch(ported(*copy.deepcopy((x, m))))
        for index, (one, other) in enumerate(zip(have, want, strict=True)):
            assert_same(one, other, f"{index}: {text}")
        with contextlib.suppress(RuntimeError):  # eager PyTorch refuses some views
            (slope,) = torch.autograd.grad(total(want), leaf)
            found = np.array(gradient(x.numpy(), m.numpy()))
            assert_same(torch.from_numpy(found), slope, f"gradient: {text}")


def assert_same(one: Any, other: Any, what: str) -> None:
    """Assert that values, lists of them and their types are equal."""
    assert type(one) is type(other) or isinstance(one, torch.Tensor), what
    if isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b, what)
    else:
        assert torch.allclose(
            torch.as_tensor(one), torch.as_tensor(other), rtol=1e-5, atol=1e-5, equal_nan=True
        ), f"{one} for {other}, {what}"
