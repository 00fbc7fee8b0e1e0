"""Code that once was rewritten wrongly, or that looks as if it might be, keeps its meaning."""

import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tpuport.rules import no_grad_as_stop_gradient, tensor_in_forward, write_through_view
from tpuport.rules._apply import rewrite
from tpuport.source.rewrite.finding import Severity
from tpuport.source.rewrite.rewriter import RewriteResult
from tpuport.source.syntax.text import Edit, Passage
from tpuport.testing import equivalence
from tpuport.testing.gradients import gradient_difference

INPUTS = "(torch.randn(3, 4), torch.randn(3, 4), torch.rand(3) > 0.5)"
HEAD = """\
import torch
import torch.nn.functional as F
from torch.distributions import Normal


def forward(a: torch.Tensor, b: torch.Tensor, m: torch.Tensor):
"""


def check(source: str, folder: Path) -> RewriteResult:
    """Rewrite a module and make sure that its `forward` does the same, twice over."""
    result = rewrite(source)
    assert rewrite(result.source).source == result.source
    before = equivalence.load(source, folder)
    after = equivalence.load(result.source, folder)
    inputs = equivalence.make_inputs(INPUTS, seeds=3)
    equivalence.check_eager(before, after, inputs)
    for args in inputs:
        assert gradient_difference(before, after, args) is None, result.source
    return result


# Codes that are expected among the fixes, and the body of a function.
REWRITTEN = {
    "a masked fill of another rank": (
        "TPU410",
        "y = a + 1\ny[0].masked_fill_(b[None, 0] > 0, -1.0)\nreturn y",
    ),
    "a result of another dtype": (
        "TPU410",
        "y = (a * 3).long()\ny[0].addcmul_(b[0], b[1])\nreturn y",
    ),
    "a method only in place": ("TPU410", "y = a + 1\ny[1:].fill_diagonal_(3)\nreturn y"),
    "several elements to fill with": ("TPU410", "y = a + 1\ny[..., 0].fill_(b[0])\nreturn y"),
    "a statement in parentheses": ("TPU410", "y = a + 1\n(y[..., 0]\n .fill_(2))\nreturn y"),
    "a leaf": ("TPU410", "a[0].zero_()\nreturn a"),
    "parameters in parentheses": ("TPU114", "d = Normal((a), (b.exp()))\nreturn d.log_prob(a)"),
    "a parameter with its name": ("TPU114", "d = Normal(a, (b := b.exp()))\nreturn d.mean * b"),
    "comments behind parameters": (
        "TPU114",
        "d = Normal(\n    a,  # mean\n    (b.exp()),  # std\n)\nreturn d.log_prob(a)",
    ),
    "an argument in parentheses": ("TPU417", "return a * torch.arange((4))"),
    "a comment behind an argument": (
        "TPU417",
        "t = torch.tensor(\n    [1.0, 2, 3, 4]  # y\n)\nreturn b * t",
    ),
    "another parameter": ("TPU417", "import os as a\nreturn b * torch.arange(4)"),
    "a parameter of a lambda": ("TPU417", "return (lambda a: b * torch.arange(4))(3)"),
    "a float of a new tensor": (
        "TPU416",
        "with torch.no_grad():\n    t = (a * 2).float()\nreturn t * a",
    ),
}


@pytest.mark.parametrize("case", REWRITTEN.values(), ids=REWRITTEN)
def test_a_nasty_function_is_rewritten(case: tuple[str, str], tmp_path: Path):
    code, body = case
    result = check(HEAD + textwrap.indent(body, "    ") + "\n", tmp_path)
    assert code in [applied.code for applied in result.applied]


# Code, part of the reason why it is left, and the body of a function.
LEFT = {
    "a walrus in a fill": (
        "TPU410",
        "binds a name",
        "y = a + 1\nz = y\ny[0].fill_((y := y + 1)[0, 0])\nreturn y, z",
    ),
    "an argument that writes": (
        "TPU410",
        "may write",
        "y = a + 1\ny[0].masked_fill_(y.add_(1)[0] > 0, 2.0)\nreturn y",
    ),
    "a row of an expanded tensor": (
        "TPU410",
        "may share memory",
        "y = (a[:1] + 1).expand(3, 4)\ny[0].zero_()\nreturn y",
    ),
    "all of a leaf": ("TPU410", "the entire tensor", "a[:].fill_(2)\nreturn a"),
    "a view bound again in a loop": (
        "TPU410",
        "a loop around it",
        "y = a * 2\nv = y.unsqueeze(0)\nfor i in range(2):\n    v += 1\n    v = v * 2\nreturn y",
    ),
    "a base bound again in a loop": (
        "TPU410",
        "bound more than once",
        "y = a * 2\nv = y.unsqueeze(0)\nfor i in range(2):\n    v += 1\n    y = y + 1\nreturn y",
    ),
    "a view transposed in place": (
        "TPU410",
        "t_ changes what the view shows",
        "y = a * 2\nv = y.view(4, 3)\nv.add_(1).t_()\nreturn y, v",
    ),
    "a base without gradients": (
        "TPU410",
        "inside a `with`",
        "y = a * 2\nv = y.unsqueeze(0)\nwith torch.no_grad():\n    v += 1\nreturn y",
    ),
    "a view without gradients": (
        "TPU410",
        "inside a `with`",
        "y = a * 2\nwith torch.no_grad():\n    v = y.view(4, 3)\n    v[0] = 1\nreturn y",
    ),
    "a base with two names": (
        "TPU410",
        "other names",
        "y = z = a * 2\nv = y.unsqueeze(0)\nv += 1\nreturn y is z, y, z",
    ),
    "a distribution's arguments unpacked": (
        "TPU114",
        "unpacks",
        "k = (b.exp(), False)\nreturn Normal(a, *k).log_prob(a)",
    ),
    "a distribution's options unpacked": (
        "TPU114",
        "unpacks",
        "k = dict(validate_args=False)\nreturn Normal(a, b, **k).log_prob(a)",
    ),
    "parameters bound elsewhere": (
        "TPU417",
        "no parameter",
        "def g():\n    nonlocal a, b, m\n    a = b = m = 3\nc = b\ng()\nreturn c * torch.arange(4)",
    ),
    "a float that is the tensor itself": (
        "TPU416",
        "more than one tensor",
        "with torch.no_grad():\n    t = a.float()\nreturn t * a",
    ),
    "an activation in place": (
        "TPU416",
        "more than one tensor",
        "with torch.no_grad():\n    t = F.relu(a, inplace=True)\nreturn t * a",
    ),
    "an activation in place by position": (
        "TPU416",
        "more than one tensor",
        "with torch.no_grad():\n    t = F.relu(a, True)\nreturn t * a",
    ),
    "a number without gradients": (
        "TPU416",
        "may be a number",
        "n = a.amax().item()\nwith torch.no_grad():\n    t = n * 2\nreturn t * a",
    ),
    "gradients on again": (
        "TPU416",
        "switched on",
        "with torch.no_grad():\n    with torch.enable_grad():\n        t = a * 2\nreturn t * a",
    ),
    "gradients switched on": (
        "TPU416",
        "switched on",
        "with torch.no_grad():\n    torch.set_grad_enabled(True)\n    t = a * 2\nreturn t * a",
    ),
}


@pytest.mark.parametrize("case", LEFT.values(), ids=LEFT)
def test_a_nasty_function_is_left(case: tuple[str, str, str], tmp_path: Path):
    code, reason, body = case
    result = check(HEAD + textwrap.indent(body, "    ") + "\n", tmp_path)
    assert code not in [applied.code for applied in result.applied]
    assert any(reason in left.reason for left in result.left if left.finding.code == code)


def test_what_says_not_to_validate_by_position_is_no_finding(tmp_path: Path):
    result = check(HEAD + "    return Normal(a, b, False).log_prob(a)\n", tmp_path)
    assert [left.finding.code for left in result.left] == []


# Modules, as they are and as they become; the second may be left out if nothing is applied.
MODULES = {
    "a wrapper around a lambda": (
        "import torch\n\ndouble = torch.compile(lambda x: x * 2)(3)\n",
        "import torch\n\ndouble = (lambda x: x * 2)(3)\n",
    ),
    "a wrapper around a choice": (
        "import torch\n\nname = torch.compile(torch.abs if 1 else torch.exp).__name__\n",
        "import torch\n\nname = (torch.abs if 1 else torch.exp).__name__\n",
    ),
    "a wrapper that binds": (
        "import torch\n\nf = torch.compile(g := torch.abs)\n",
        "import torch\n\nf = (g := torch.abs)\n",
    ),
    "a wrapper over lines": (
        "import torch\n\nf = torch.compile(\n    torch\n    .abs\n)\n",
        "import torch\n\nf = (torch\n    .abs)\n",
    ),
    "a call over lines in a wrapper": (
        "import torch\n\nf = torch.compile(torch.nn.Linear(\n    3,\n    4,\n))\n",
        "import torch\n\nf = torch.nn.Linear(\n    3,\n    4,\n)\n",
    ),
    "a block of wrappers only": (
        "import torch\n\nf = g = torch.abs\n"
        "if f:\n    f = torch.compile(f)\n    g = torch.compile(g)\n",
        None,
    ),
    "a wrapper on the last line": (
        "import torch\n\nf = torch.abs\nf = torch.compile(f)",
        "import torch\n\nf = torch.abs",
    ),
    "a wrapper in a class": (
        "import torch\n\nf = torch.abs\n\n\nclass A:\n    f = torch.compile(f)\n    x = 1\n",
        "import torch\n\nf = torch.abs\n\n\nclass A:\n    f = f\n    x = 1\n",
    ),
    "a wrapped builtin": (
        "import torch\n\nabs = torch.compile(abs)\nabs = torch.compile(abs)\n",
        "import torch\n\nabs = abs\nabs = abs\n",
    ),
    "torch further down": ('import os\n\nDEVICE = "cuda"\n\nimport torch\n', None),
    "an import and code on one line": (
        "import os; x = os.sep; device = 'cuda'\n",
        "import os; import torch; x = os.sep; device = 'cuda'"
        ' if torch.cuda.is_available() else "cpu"\n',
    ),
    "a docstring and code on one line": (
        "'''Two\nlines.'''; device = 'cuda'\n",
        "'''Two\nlines.'''; import torch; device = 'cuda'"
        ' if torch.cuda.is_available() else "cpu"\n',
    ),
    "a comment above the first function": (
        "# The file.\n\n# The function.\ndef f(device='cuda'):\n    pass\n",
        "# The file.\n\nimport torch\n\n\n# The function.\ndef f(device='cuda'"
        ' if torch.cuda.is_available() else "cpu"):\n    pass\n',
    ),
    "a comment about the file": (
        "#!/usr/bin/env python\n# The file.\ndevice = 'cuda'\n",
        "#!/usr/bin/env python\n# The file.\nimport torch\n\ndevice = 'cuda'"
        ' if torch.cuda.is_available() else "cpu"\n',
    ),
}


@pytest.mark.parametrize("case", MODULES.values(), ids=MODULES)
def test_a_nasty_module_becomes_this(case: tuple[str, str | None]):
    source, expected = case
    result = rewrite(source)
    assert result.source == (source if expected is None else expected)
    left = [one for one in result.left if one.finding.severity is not Severity.DEVICE]
    assert bool(left) == (expected is None)
    assert rewrite(result.source).source == result.source
    compile(result.source, "module", "exec")


def always(value: object) -> Callable[..., object]:
    return lambda *_: value


# Conditions of fixes, left out: where, its name, what takes its place, and the case that notices.
MUTANTS: dict[str, tuple[ModuleType, str, object, str]] = {
    "any value fills": (
        write_through_view,
        "_is_single",
        always(True),
        "several elements to fill with",
    ),
    "another tensor": (
        write_through_view,
        "_cloned",
        lambda place, context, call: Edit(place, place, Passage.of(".abs()", 1)),
        "a method only in place",
    ),
    "writes in arguments": (
        write_through_view,
        "_refuse_writes",
        always(None),
        "a walrus in a fill",
    ),
    "arguments that write": (
        write_through_view,
        "_refuse_writes",
        always(None),
        "an argument that writes",
    ),
    "shared memory": (
        write_through_view,
        "_refuse_expanded",
        always(None),
        "a row of an expanded tensor",
    ),
    "the whole tensor": (write_through_view, "_refuse_whole", always(None), "all of a leaf"),
    "loops": (write_through_view, "_refuse_loops", always(None), "a view bound again in a loop"),
    "other shapes": (
        write_through_view,
        "_refuse_other_shapes",
        always(None),
        "a view transposed in place",
    ),
    "no gradients": (
        write_through_view,
        "_refuse_other_withs",
        always(None),
        "a base without gradients",
    ),
    "gradients on": (no_grad_as_stop_gradient, "_switches_on", always(False), "gradients on again"),
    "not new": (
        no_grad_as_stop_gradient,
        "_is_one_tensor",
        always(True),
        "a float that is the tensor itself",
    ),
    "any parameter": (tensor_in_forward, "_may_be_other", always(False), "another parameter"),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_condition_left_out_is_noticed(
    mutant: tuple[ModuleType, str, object, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module, name, replacement, case = mutant
    body = (LEFT[case] if case in LEFT else REWRITTEN[case])[-1]
    source = HEAD + textwrap.indent(body, "    ") + "\n"
    check(source, tmp_path)
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(AssertionError):
        check(source, tmp_path)
