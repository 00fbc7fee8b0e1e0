"""Generated tensor programs do in eager PyTorch what they did before they were rewritten.

`TPUPORT_FUZZ` sets how many programs are generated; `make fuzz` generates thousands.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tpuport.rules._apply import rewrite
from tpuport.rules._discovery import find_rules
from tpuport.source.rewrite.rewriter import RewriteResult
from tpuport.testing import equivalence
from tpuport.testing.gradients import gradient_difference

PROGRAMS = int(os.environ.get("TPUPORT_FUZZ", "150"))
INPUTS = "(torch.randn(3, 4), torch.randn(3, 4), torch.rand(3) > 0.5)"
HEAD = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributions import Normal
from torch.utils.data import DataLoader


"""
FUNCTION = """\
def forward(a: torch.Tensor, b: torch.Tensor, m: torch.Tensor):
    c = a[0, 0]
    n = a.shape[0]
"""
MODULE = """\
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 0.5
        self.weight = torch.nn.Parameter(torch.ones(4) * 2)
        self.register_buffer("table", torch.arange(4.0))

    def rows(self, x: torch.Tensor):
        return x * self.weight + self.table

    def forward(self, a: torch.Tensor, b: torch.Tensor, m: torch.Tensor):
        c = a[0, 0]
        n = a.shape[0]
"""
# What code that needs CUDA or several processes does, for a machine with neither.
WITHOUT_CUDA = {
    ".cuda()": "",
    '"cuda"': '"cpu"',
    "torch.cuda.synchronize()": "pass",
    "dist.all_reduce(a)": "pass",
    "dist.get_world_size()": "1",
    "torch.compile(torch.abs)": "torch.abs",
    "pin_memory=True": "pin_memory=False",
}
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
            *(f"c = max({x}.sum(), {y}.mean(), {k})", f"{x} = {x}.cpu() + {y}.to('cpu')"),
            *(f"{x}[1:].masked_fill_({y}[1:] > 0, {k})", f"{x}[..., 0].fill_({y}.sum())"),
            *(f"{x}[:, 1].zero_()", f"w = {x} * 2\nv = w.unsqueeze(0)\nv += {k}\n{x} = w"),
            *(f"{x} = {x} * torch.arange(4)", f"{x} = {y} + torch.tensor([1.0, 2.0, 3.0, 4.0])"),
            *(f"{x} = {x} + len({y}[{mask}]) * c", f"c = {x}.masked_select({y} > 0).mean()"),
        )
    )
    return list(lines)


stopped = st.sampled_from(
    [
        "{} * 2",
        "({} + 1).float()",
        "{}.float()",
        "F.relu({}, inplace=True)",
        "torch.softmax({}, -1)",
    ]
)
on_devices = one_of(
    *("a = a.cuda() + b.cuda()", 'b = b.to("cuda") * 2', "torch.cuda.synchronize()"),
    *(
        'b = b + torch.ones(4, device="cuda")',
        "dist.all_reduce(a)",
        "c = c * dist.get_world_size()",
    ),
    *("a = torch.compile(torch.abs)(a)", "n = len(DataLoader([n], pin_memory=True))"),
    *("b = b * torch.arange(4)", "a = a + torch.tensor([1.0, 2.0, 3.0, 4.0])"),
)
seldom = one_of(  # met too seldom otherwise
    *("d = Normal(a, b.exp())\nc = d.log_prob(b).sum()", "c = max(a.sum(), b.mean(), 0.5)"),
    *("assert a.sum() == a.sum(), 'NaN'", "if a.max() > 9:\n    print('large', a.sum())"),
    *("c = a.masked_select(a > 0).sum()", "a[m] *= 2", "c = b[a > 0].sum()"),
)
on_self = one_of(
    *("a = a * self.weight", "b = self.rows(a)", "self.table[0] = 1.5", "self.table[1:].zero_()"),
    *("self.table += 1", "c = self.table.sum().item()", "a = a + self.table[self.table > 2].sum()"),
    *("self.scale = self.scale + 1", "a = a * self.scale", "self.table = self.table * 2"),
    *("if self.table.sum() > a.sum():\n    a = self.rows(b)", "self.last = a.detach()"),
)


@st.composite
def gradient_stop(draw: st.DrawFn) -> Lines:
    """A value made where gradients are off, and used where they are on."""
    x, y, value = draw(tensors), draw(tensors), draw(stopped)
    made = indented("with torch.no_grad():", [f"t = {value.format(x)}"])
    return [*made, f"{y} = t * {x}"]


@st.composite
def loop(draw: st.DrawFn) -> Lines:
    """A loop for which a traced value says how often it runs."""
    x, k = draw(tensors), draw(st.sampled_from(["0.1", "1", "5"]))
    line = draw(one_of(f"{x} = {x} * 0.5", f"{x} *= 0.5", f"{x} = {x} / 2\nc = c + 1"))
    return ["k = 0", *indented(f"while {x}.abs().max() > {k} and k < 3:", ["k = k + 1", *line])]


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
        k = f"k{depth}"  # a loop inside counts for itself, or this one might never end
        return [f"{k} = 0", *indented(f"while {k} < 2 and {test}:", [f"{k} += 1", *body])]
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
    in_module = draw(st.integers(0, 3)) == 0
    special = [
        on_devices,
        on_devices,
        gradient_stop(),
        loop(),
        *([on_self, on_self] if in_module else []),
    ]
    parts = st.one_of(statement(), statement(), statement(), *special)
    lines = draw(st.lists(parts, min_size=1, max_size=5))
    lines.append(draw(st.one_of(on_devices, seldom)))
    body = [line for part in lines for line in part]
    if in_module:
        made = "".join(f"        {line}\n" for line in [*body, LAST])
        return HEAD + MODULE + made + "\n\nforward = Model()\n"
    return HEAD + FUNCTION + "".join(f"    {line}\n" for line in [*body, LAST])


def check(source: str, result: RewriteResult, folder: Path) -> None:
    """Make sure that a program and its rewrite do the same, and that the rewrite is settled."""
    reference = source
    for old, new in WITHOUT_CUDA.items():
        reference = reference.replace(old, new)
    before = equivalence.load(reference, folder)
    after = equivalence.load(result.source, folder)
    rtol = 1e-5 if any(applied.safety == "close" for applied in result.applied) else 0.0
    for number, args in enumerate(equivalence.make_inputs(INPUTS, seeds=3)):
        for name, bent in (("as drawn", args), *list(equivalence.adversarial(args))[number::3]):
            expected, got = equivalence.observe(before, bent), equivalence.observe(after, bent)
            found = equivalence.compare(expected, got, rtol=rtol)
            assert found is None, f"seed {number}, {name}: {found}\n{source}\n{result.source}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = gradient_difference(before, after, args, rtol=rtol)
        assert found is None, f"seed {number}: {found}\n{source}\n{result.source}"
    found = equivalence.difference(state(before), state(after), rtol=rtol)
    assert found is None, f"state: {found}\n{source}\n{result.source}"
    again = rewrite(result.source)
    assert again.source == result.source
    assert again.applied == []


def state(function: Callable[..., object]) -> dict[str, object]:
    """What calls have left in a module; nothing of a function."""
    if not isinstance(function, torch.nn.Module):
        return {}
    written = {name: vars(function).get(name) for name in ("scale", "last")}
    return {**function.state_dict(), **written}


# Rules with a fix that the grammar does not reach yet.
NOT_MET = frozenset({"TPU111", "TPU121", "TPU412", "TPU420", "TPU421"})


def fixable() -> set[str]:
    """The codes of all rules with a fix that needs no asking for and that the grammar reaches."""
    return {
        rule.CODE
        for rule in find_rules()
        if rule.CODE not in NOT_MET
        and rule.SAFETY.name != "unsafe"
        and any(example.after for example in rule.EXAMPLES)
    }


def test_tensor_programs_do_the_same_after_rewriting(tmp_path: Path):
    applied: Counter[str] = Counter()

    @given(source=programs())
    @settings(
        max_examples=PROGRAMS,
        deadline=None,
        derandomize=PROGRAMS <= 300,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    def run(source: str) -> None:
        result = rewrite(source)
        applied.update({fix.code for fix in result.applied})
        check(source, result, tmp_path)

    run()
    # Otherwise the programs would say nothing about some rules.
    assert [code for code in sorted(fixable()) if applied[code] < 3] == []


PROGRAM = (
    HEAD
    + FUNCTION
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
