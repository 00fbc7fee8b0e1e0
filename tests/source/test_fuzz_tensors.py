"""Generated tensor programs do in eager PyTorch what they did before they were rewritten.

`TPUPORT_FUZZ` sets how many programs are generated; `make fuzz` generates thousands.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpuport.source.rewriter import RewriteResult, rewrite
from tpuport.testing import equivalence

PROGRAMS = int(os.environ.get("TPUPORT_FUZZ", "300"))
INPUTS = "(torch.randn(3, 4), torch.randn(3, 4), torch.rand(3) > 0.5)"
HEAD = """\
import torch
import torch.nn.functional as F
from torch.distributions import Normal


def forward(a: torch.Tensor, b: torch.Tensor, m: torch.Tensor):
    c = a[0, 0]
    n = a.shape[0]
"""
LAST = "return a, b, c, m, n"

Lines = list[str]


def one_of(*texts: str) -> st.SearchStrategy[Lines]:
    """One of several simple statements."""
    return st.sampled_from([text.split("\n") for text in texts])


tensors = st.sampled_from(["a", "b"])
numbers = st.sampled_from(["0", "1", "-1.5", "0.25", "n"])
tests = st.sampled_from(
    [
        *("a.sum() > 0", "(b > a).any()", "n > 2 and c > 0", "not m.all()", "c > 0 or n > 5"),
        *("a.abs().max().item() > 1", "bool(m.any())", "-1 < c < 1", "n > 2", "m[0]"),
        *("float(a.mean()) > 0", "int(m.sum()) > 1", "a.shape[0] > 2", "a is not b"),
    ]
)
masks = st.sampled_from(
    ["m", "~m", "a[:, 0] > 0", "m & (b[:, 1] > 0)", "a > 0", "b > a", "a.isnan()"]
)


@st.composite
def simple(draw: st.DrawFn) -> Lines:
    """A statement without a block."""
    x, y = draw(tensors), draw(tensors)
    mask, other, k = draw(masks), draw(masks), draw(numbers)
    lines = draw(
        one_of(
            *(f"{x} = {x} + {y} * {k}", f"{x} = {y}.clone()", f"{x} = {y}", f"m = {x}[:, 0] > {k}"),
            *(f"c = {x}.sum()", f"c = {x}.max()", f"n = n + {k}", "m = ~m", "n = int(m.sum())"),
            # Masks.
            *(f"{x}[{mask}] = {k}", f"{x}[{mask}] = {y}[{mask}]", f"{x}[{mask}] += {k}"),
            *(f"{x}[{mask}] *= {y}[{mask}]", f"{x}[{mask}] = {x}[{mask}] * 2 + {k}"),
            *(f"c = {x}[{mask}].sum()", f"c = {x}[{mask}].mean()", f"c = {x}[{mask}].max()"),
            *(
                f"c = ({x}[{mask}] * {y}[{mask}]).sum()",
                f"c = F.mse_loss({x}[{mask}], {y}[{mask}])",
            ),
            *(f"{x} = torch.cat([{x}[m], {x}[~m]])", f"rows = {x}[m]\n{y}[m] = rows * 2"),
            *(
                f"rows = {x}[{mask}]\n{y}[{other}] = rows",
                f"kept = {x}[m]\n{x} = kept.new_zeros(3, 4)",
            ),
            *(f"c = {x}.masked_select({mask}).sum()", f"c = torch.nonzero({mask}).shape[0] + c"),
            # Writes.
            *(f"{x}.clamp_(-1, 1)", f"{x}.mul_({k})", f"{x}[0] = {y}[1]", f"{x}[:, 1] += {k}"),
            *(
                f"{x}.reshape(-1)[0] = {k}",
                f"v = {x}.flatten()\nv.add_({k})",
                f"v = {x}[1:]\nv.zero_()",
            ),
            *(f"v = {x}.unsqueeze(0)\nv += {k}", f"v = {x}.view(4, 3)\nv[0] = {k}\nc = {x}[0, 1]"),
            *(f"v = {x}.t()\nv[0] = {k}", f"torch.add({x}, {y}, out={x})", f"{x} += {y}"),
            *(
                f"v = {x}.reshape(-1)\n{x} = {x} + 1\nv.zero_()",
                f"u, v = {x}.chunk(2, -1)\nu.zero_()",
            ),
            # Numbers.
            *(f"c = {x}.max().item() + c", f"values = {x}[0].tolist()\nc = c + values[0]"),
            *(
                f"c = c + float({x}.mean())",
                "c = c * round(float(c), 2)",
                f"c = {x}[:2].sum().item() * c",
            ),
            *("print(c.item())", "print(f'{c}', n)", f"{x} = {x} / ({x}.norm().item() + 1)"),
            # Distributions, checks and the rest.
            *(f"d = Normal({x}, {y}.exp())\nc = d.log_prob({y}).sum()", f"assert c == c, '{k}'"),
            *(f"{x} = {x}.detach().cpu()", f"{x} = torch.from_numpy({y}.detach().numpy()).clone()"),
        )
    )
    return list(lines)


def indented(head: str, lines: Lines) -> Lines:
    return [head, *("    " + line for line in lines)]


@st.composite
def statement(draw: st.DrawFn, depth: int = 2) -> Lines:
    """A statement, or a block of them."""
    if depth == 0 or draw(st.integers(0, 2)) > 0:
        return draw(simple())
    body = draw(block(depth - 1))
    form = draw(st.sampled_from(["if", "if else", "for", "while", "raise", "with", "try"]))
    test = draw(tests)
    if form == "if":
        return indented(f"if {test}:", body)
    if form == "if else":
        return indented(f"if {test}:", body) + indented("else:", draw(block(depth - 1)))
    if form == "for":
        head = draw(
            st.sampled_from(["for i in range(2):", "for row in a:", "for i, row in enumerate(b):"])
        )
        return indented(head, body)
    if form == "while":
        return ["k = 0", *indented(f"while k < 2 and {test}:", ["k += 1", *body])]
    if form == "raise":
        return indented(f"if {test}:", ["raise ValueError('no')"])
    if form == "with":
        return indented("with torch.no_grad():", body)
    return indented("try:", body) + indented("except ValueError:", draw(block(0)))


def block(depth: int) -> st.SearchStrategy[Lines]:
    return st.lists(statement(depth), min_size=1, max_size=3).map(
        lambda parts: [line for part in parts for line in part]
    )


@st.composite
def programs(draw: st.DrawFn) -> str:
    lines = draw(st.lists(statement(), min_size=1, max_size=5))
    body = [line for part in lines for line in part]
    return HEAD + "".join(f"    {line}\n" for line in [*body, LAST])


def check(source: str, result: RewriteResult, folder: Path) -> None:
    """Make sure that a program and its rewrite do the same, and that the rewrite is settled."""
    before = equivalence.load(source, folder)
    after = equivalence.load(result.source, folder)
    rtol = 1e-5 if any(applied.safety == "close" for applied in result.applied) else 0.0
    for number, args in enumerate(equivalence.make_inputs(INPUTS, seeds=3)):
        for name, bent in (("as drawn", args), *list(equivalence.adversarial(args))[number::3]):
            expected, got = equivalence.observe(before, bent), equivalence.observe(after, bent)
            found = equivalence.compare(expected, got, rtol=rtol)
            assert found is None, f"seed {number}, {name}: {found}\n{source}\n{result.source}"
    again = rewrite(result.source)
    assert again.source == result.source
    assert again.applied == []


@given(source=programs())
@settings(
    max_examples=PROGRAMS,
    deadline=None,
    derandomize=PROGRAMS <= 300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_tensor_programs_do_the_same_after_rewriting(source: str, tmp_path: Path):
    check(source, rewrite(source), tmp_path)


PROGRAM = (
    HEAD
    + "    if a.sum() > 0:\n        a = a + b\n    else:\n        a = a - b\n    "
    + LAST
    + "\n"
)
MUTANTS: dict[str, Callable[[str], str]] = {
    "wrong operation": lambda text: text.replace("a = a + b", "a = a * b"),
    "one branch": lambda text: text.replace("a = a - b", "pass"),
    "argument written": lambda text: text.replace(
        "    c = a[0, 0]", "    a[0] = 1\n    c = a[0, 0]"
    ),
}


@pytest.mark.parametrize("change", MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_rewrite_would_be_noticed(change: Callable[[str], str], tmp_path: Path):
    result = rewrite(PROGRAM)
    mutant = change(result.source)
    assert mutant != result.source
    with pytest.raises(AssertionError):
        check(PROGRAM, RewriteResult(mutant, result.applied, result.left), tmp_path)
