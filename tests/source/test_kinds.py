"""What an oracle says about an expression."""

import ast
import textwrap

import pytest

from tpuport.source.inference.inference import StaticKinds
from tpuport.source.inference.kinds import Kind, Kinds, ObservedKinds, Oracle, Site
from tpuport.source.syntax.module import Module


def answers(body: str, oracle: Oracle, *, signature: str = "self, x, n, m: int") -> dict[str, Kind]:
    """The kind of every `here(expression)` in `def forward(signature): body`, by expression."""
    head = (
        "import math\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn, randn\n"
    )
    source = f"{head}def forward({signature}):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    module = Module(source)
    kinds: Kinds = oracle.bind(module)
    return {
        ast.unparse(node.args[0]): kinds.kind(node.args[0])
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "here"
    }


def static(
    expression: str, before: str = "", signature: str = "self, x: torch.Tensor, n, m: int"
) -> str:
    found = answers(f"{before}\nhere({expression})", StaticKinds(), signature=signature)
    return list(found.values())[-1].value


@pytest.mark.parametrize(
    "expression",
    [
        *("x", "x + 1", "-x", "x[0]", "x.T", "x.sum()", "x > 0", "x.max().values", "[x][0]"),
        *("torch.sum(x)", "F.relu(x)", "torch.rand_like(x)", "math.sqrt(x)", "y.abs()"),
        *("(x > 0).any() and True", "1 if m else x", "x if m else -x"),
        *("torch.where(x > 0, x, 0)", "x @ x", "x.shape[0] * x", "(x, 1)[0]", "(z := x)"),
    ],
)
def test_values_of_the_program(expression: str):
    if expression == "1 if m else x":
        assert static(expression) == "unknown"
    else:
        assert static(expression, before="y = x * 2") == "traced"


@pytest.mark.parametrize(
    "expression",
    [
        *("1", "None", "'a'", "f'{x}'", "x.shape", "x.shape[0] > 1", "x.size(0)", "x.dim() == 2"),
        *("len(x)", "x is None", "x is not None and x.ndim > 1", "isinstance(x, int)", "x.dtype"),
        *(
            "torch.zeros(3)",
            "torch.rand(3)",
            "randn(2)",
            "torch.arange(len(x)).max()",
            "torch.is_tensor(x)",
            "self.training",
        ),
        *("x.device.type == 'cuda'", "torch.cuda.is_available()", "hasattr(x, 'y')", "x.numel()"),
        *(
            "torch.finfo(x.dtype).max",
            "not x.requires_grad",
            "torch.jit.is_tracing()",
            "k",
            "m",
            "m.real",
        ),
    ],
)
def test_values_that_python_knows(expression: str):
    assert static(expression, before="k = x.shape[-1] // 2") == "host"


@pytest.mark.parametrize(
    "expression",
    [
        "n",
        "self.weight",
        "self.layer(x)",
        # Numbers that a traced tensor was asked for: the call is what fails, not what follows.
        "x.item()",
        "float(x)",
        "(x, 1)",
        "x == 'fir'",
        "n > 0",
        "f(x)",
        "nn.Linear(3, 3)",
        "x in n",
    ],
)
def test_what_is_not_known(expression: str):
    assert static(expression) == "unknown"


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("torch.Tensor", "traced"),
        ("Tensor", "traced"),
        ("'torch.Tensor'", "traced"),
        ("torch.Tensor | None", "traced"),
        ("Optional[torch.FloatTensor]", "traced"),
        ("Union[None, Tensor]", "traced"),
        ("Float[torch.Tensor, 'b n']", "traced"),
        ("Union[torch.Tensor, float]", "unknown"),
        ("list[torch.Tensor]", "unknown"),
        ("tuple[torch.Tensor, torch.Tensor]", "unknown"),
        ("dict[str, Tensor]", "unknown"),
        ("'not python'", "unknown"),
    ],
)
def test_annotations_of_parameters(annotation: str, expected: str):
    assert static("x", signature=f"self, x: {annotation}") == expected


def test_a_parameter_of_forward_used_like_a_tensor():
    assert static("x", before="x.unsqueeze(0)", signature="self, x") == "traced"
    assert static("x", before="x.append(0)", signature="self, x") == "unknown"


@pytest.mark.parametrize(
    ("before", "expression", "expected"),
    [
        ("y = 1\nif m:\n    y = x", "y", "unknown"),
        ("y = x\nif m:\n    y = x + 1", "y", "traced"),
        ("if m:\n    y = x\nelse:\n    y = x", "y", "traced"),
        ("y = 0\nfor i in n:\n    y = y + x", "y", "unknown"),
        ("y = x\nfor i in n:\n    y = y + 1", "y", "traced"),
        ("y, z = x, 1", "z", "host"),
        ("y, z = x.max(dim=0)", "z", "traced"),
        ("for y in x:\n    pass", "y", "traced"),
        ("for y in x:\n    y = y\nelse:\n    y = x", "y", "traced"),
        ("y = 1\ny += x", "y", "traced"),
        ("with torch.no_grad():\n    y = x", "y", "traced"),
        ("try:\n    y = x\nexcept E:\n    y = 1", "y", "unknown"),
        ("x = 1", "x", "host"),
        ("torch = n", "torch.sum(x)", "unknown"),
        ("y = [x for x in n]", "x", "traced"),
        ("y = tpuport.ops.cond(x > 0, lambda: 1, lambda: 2)", "y", "traced"),
        ("y = tpuport.ops.cond(m, lambda: x, lambda: 2)", "y", "traced"),
        (
            "def if_true(x):\n    return x\ny = tpuport.ops.cond(m, if_true, if_true, (x,))",
            "y",
            "traced",
        ),
        ("y = tpuport.ops.both(m, lambda: x > 0)", "y", "traced"),
        ("", "tpuport.ops.to_float(x)", "traced"),
        ("", "tpuport.ops.passes(x > 0)", "host"),
    ],
)
def test_kinds_follow_the_flow(before: str, expression: str, expected: str):
    assert static(expression, before=before) == expected


def test_outside_functions_only_the_form_counts():
    module = Module("import torch\nx = torch.rand(3)\nif x > 0: pass\nif x is None: pass\n")
    kinds = StaticKinds().bind(module)
    tests = [node.test for node in module.tree.body if isinstance(node, ast.If)]
    assert [kinds.kind(test).value for test in tests] == ["unknown", "host"]


# What a trace saw.


def observed(*sites: Site | tuple[int, int | None] | int) -> dict[str, str]:
    body = """
        y = 1 if here(x) else 2
        z = here(n is None)
        here(m.shape[0] > 1), here(w)
    """
    return {text: kind.value for text, kind in answers(body, ObservedKinds(sites)).items()}


def test_a_line_is_a_site():
    assert observed(8) == {
        "x": "unknown",
        "n is None": "host",
        "m.shape[0] > 1": "host",
        "w": "unknown",
    }
    # Sizes may depend on data where a site says so; `is` never does.
    assert observed(7, 8, 9) == {
        "x": "traced",
        "n is None": "host",
        "m.shape[0] > 1": "traced",
        "w": "traced",
    }
