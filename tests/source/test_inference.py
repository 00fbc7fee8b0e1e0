"""What the inference knows of a file, and what it keeps quiet about."""

import ast
import textwrap

import pytest

from tpuport.source.inference.inference import Inference
from tpuport.source.syntax.module import Module

HEAD = """
import math
import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn, Tensor
from .layers import Attention, make_mask
"""


def asked(source: str) -> dict[str, str]:
    """`kind`, or `mask` for a traced tensor of dtype bool, of every `here(expression)`."""
    module = Module(HEAD + textwrap.dedent(source), file="model.py")
    inference = Inference(module)
    found: dict[str, str] = {}
    for node in module.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "here":
            expression = node.args[0]
            kind = inference.kind(expression).value
            found[ast.unparse(expression)] = "mask" if inference.is_boolean(expression) else kind
    return found


def in_forward(body: str, *, init: str = "pass", others: str = "") -> dict[str, str]:
    """The same for the body of `forward(self, x: Tensor, y=None, n=2)` of a module."""
    return asked(
        "class Model(nn.Module):\n"
        "    def __init__(self, config, dim=4, layer=None):\n"
        + textwrap.indent(textwrap.dedent(init), " " * 8)
        + "\n    def forward(self, x: Tensor, y=None, n=2):\n"
        + textwrap.indent(textwrap.dedent(body), " " * 8)
        + "\n"
        + textwrap.indent(textwrap.dedent(others), " " * 4)
    )


# Attributes of modules.


@pytest.mark.parametrize(
    ("init", "expression", "expected"),
    [
        ("self.scale = dim ** -0.5", "self.scale", "host"),
        ("self.scale = config.scale", "self.scale > 1", "host"),
        ("self.weight = nn.Parameter(torch.ones(3))", "self.weight", "traced"),
        ("self.weight = nn.Parameter(torch.ones(3))", "self.weight.sum() > 0", "mask"),
        ("self.register_buffer('table', torch.ones(3))", "self.table", "traced"),
        ("self.register_buffer('seen', torch.zeros(3, dtype=torch.bool))", "self.seen", "mask"),
        ("self.table = nn.Buffer(torch.ones(3))", "self.table", "traced"),
        ("self.seen = nn.Buffer(torch.zeros(3, dtype=torch.bool))", "self.seen", "mask"),
        ("self.register_buffer('late', None)", "self.late is None", "host"),
        ("self.table = torch.arange(4)", "self.table.max()", "host"),
        ("self.proj = nn.Linear(dim, dim)", "self.proj(x)", "traced"),
        ("self.proj = nn.Linear(dim, dim)", "self.proj.weight", "traced"),
        ("self.attn = Attention(dim)", "self.attn(x)", "traced"),
        ("self.layers = nn.ModuleList([Attention(dim)])", "self.layers[0](x)", "traced"),
        ("self.act = nn.GELU() if dim else layer", "self.act", "unknown"),
        ("self.sizes = [1, 2]", "self.sizes[0]", "host"),
        ("pass", "self.unknown", "unknown"),
        ("pass", "self.config.use_cache", "host"),
        ("pass", "self.training", "host"),
    ],
)
def test_attributes_are_what_the_constructor_made_them(init: str, expression: str, expected: str):
    assert in_forward(f"here({expression})", init=init) == {expression: expected}


def test_attributes_of_a_base_class_in_the_file():
    found = asked("""
        class Base(nn.Module):
            def __init__(self, heads):
                super().__init__()
                self.heads = heads
                self.weight = nn.Parameter(torch.ones(heads))

            def scaled(self, x):
                return x * self.weight

        class Model(Base):
            def forward(self, x: Tensor):
                here(self.heads)
                here(self.scaled(x))
    """)
    assert found == {"self.heads": "host", "self.scaled(x)": "traced"}


# Calls inside the file.


def test_methods_see_what_is_passed_and_give_what_they_return():
    found = in_forward(
        """
        a, b = self.split(x, 3)
        here(a)
        here(b)
        here(self.size_of(x))
        """,
        others="""
        def split(self, z, count):
            here(z)
            here(count)
            return z * 2, count

        def size_of(self, z):
            return z.shape[0]
        """,
    )
    expected = {"a": "traced", "b": "host", "self.size_of(x)": "host", "z": "traced"}
    assert found == {**expected, "count": "host"}


def test_functions_and_recursion_of_the_file():
    found = asked("""
        def double(value, depth):
            return value if depth == 0 else double(value + value, depth - 1)

        def forward(x: Tensor):
            here(double(x, 3))
            here(double(2, 3))
            helper(x > 0)

        def helper(flag):
            here(flag)
    """)
    assert found == {"double(x, 3)": "traced", "double(2, 3)": "unknown", "flag": "mask"}


def test_a_module_of_the_file_gives_what_its_forward_returns():
    found = asked("""
        class Router(nn.Module):
            def forward(self, x: Tensor):
                return x.softmax(-1), x.shape[-1]

        class Model(nn.Module):
            def __init__(self):
                self.router = Router()

            def forward(self, x: Tensor):
                weights, count = self.router(x)
                here(weights)
                here(count)
    """)
    assert found == {"weights": "traced", "count": "host"}


# Values.


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("x == 2", "mask"),
        ("~(x > 0)", "mask"),
        ("(x > 0) & (x < 1)", "mask"),
        ("(x > 0).unsqueeze(0)", "mask"),
        ("(x > 0).float()", "traced"),
        ("(x > 0).to(x.dtype)", "traced"),
        ("(x > 0).to(x.device)", "mask"),
        ("x.bool()", "mask"),
        ("x.to(torch.bool)", "mask"),
        ("torch.isnan(x)", "mask"),
        ("torch.cat([x > 0, x > 1])", "mask"),
        ("torch.where(x > 0, x, 0)", "traced"),
        ("torch.ones_like(x, dtype=torch.bool)", "mask"),
        ("(x > 0)[0]", "mask"),
        ("(x > 0).any()", "mask"),
        ("x.argmax(-1)", "traced"),
        ("torch.zeros(3)", "host"),
        ("torch.zeros(3, device=x.device)", "traced"),
        ("torch.zeros(3, device='cpu')", "host"),
        ("torch.arange(3).to(x.device)", "traced"),
        ("torch.arange(3).to(torch.float32)", "host"),
        ("torch.rand(3)", "host"),
        ("torch.rand(3, device=x.device)", "traced"),
        ("torch.randn_like(x)", "traced"),
        ("rearrange(x, 'a b -> b a')", "traced"),
        ("F.softmax(x, -1)", "traced"),
        ("x.chunk(2)[0]", "traced"),
        ("x.max(-1).values", "traced"),
        ("x.shape[0] // 2", "host"),
        ("len(x) > 3", "host"),
        ("[x, x][1]", "traced"),
        ("[x.shape[0]][0]", "host"),
        ("np.sqrt(4)", "host"),
        ("math.sqrt(x.shape[0])", "host"),
        ("x.size", "host"),
        ("x is None", "host"),
        ("x == None", "unknown"),
        ("x == 'mean'", "unknown"),
        ("y", "unknown"),
        ("n", "host"),
        ("make_mask(x)", "unknown"),
        ("x.item()", "unknown"),
        ("self.method(x)", "unknown"),
    ],
)
def test_expressions(expression: str, expected: str):
    assert in_forward(f"here({expression})") == {expression: expected}


@pytest.mark.parametrize(
    ("before", "expression", "expected"),
    [
        ("for layer in self.layers:\n    x = layer(x)", "x", "traced"),
        ("for i, row in enumerate(x):\n    pass", "i", "host"),
        ("for i, row in enumerate(x):\n    pass", "row", "traced"),
        ("for a, b in zip(x, [1, 2]):\n    pass", "b", "host"),
        ("z = torch.zeros(3)\nz[0] = x", "z", "traced"),
        ("z = [a * 2 for a in x]", "z[0]", "traced"),
        ("z = []", "z", "host"),
        ("z = []\nz.append(x)", "torch.stack(z)", "traced"),
        ("z = []\nfor i in range(3):\n    z.append(x)", "torch.stack(z)", "traced"),
        ("z = []\nz.append(x)", "z", "unknown"),
        ("z = [1]\nz.append(n)", "torch.tensor(z)", "host"),
        ("z = []\nz.insert(0, x)", "z[0]", "traced"),
        ("z = [1]\nz.extend([x, x])", "z[0]", "unknown"),
        ("z = []\nz.extend(x.chunk(2))", "z[0]", "traced"),
        ("z = []\nz.count(x)", "z", "host"),
        ("z = None\nif n:\n    z = x", "z", "traced"),
        ("z = 1\nif n:\n    return x\nelse:\n    z = x", "z", "traced"),
        ("z = make_mask(x)\nz = z.masked_fill(z == 0, 1)", "z", "traced"),
        ("z = make_mask(x)", "z", "unknown"),
        ("z: Tensor = make_mask(x)", "z", "traced"),
        ("with torch.no_grad():\n    z = x.sum()", "z", "traced"),
        ("z = x.sum().item()", "z > 0", "unknown"),
    ],
)
def test_names_follow_the_flow(before: str, expression: str, expected: str):
    found = in_forward(f"{before}\nhere({expression})", init="self.layers = nn.ModuleList()")
    assert found == {expression: expected}


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        ("y.unsqueeze(0)", "traced"),
        ("y.append(1)", "unknown"),
        ("y.convert('RGB'); y.shape", "unknown"),
        ("y.items()", "unknown"),
        ("isinstance(y, list); y.shape", "unknown"),
        ("for i, (a, b) in enumerate(y):\n        a = a.item()", "traced"),
        ("for a in y:\n        b = a.item()", "traced"),
        ("for i, (a, b) in enumerate(y):\n        i.item()", "unknown"),
        ("for a in y.items():\n        a.item()", "unknown"),
        ("for a in y:\n        self.n.item()", "unknown"),
        ("isinstance(y, list)\nfor a in y:\n    a.item()", "unknown"),
        ("z = y[0].item()", "traced"),
    ],
)
def test_a_bare_parameter_is_judged_by_its_use(use: str, expected: str):
    assert in_forward(f"{use}\nhere(y)") == {"y": expected}


@pytest.mark.parametrize(
    ("annotation", "use", "expected"),
    [
        ("list[int] | Tensor", "y[0].item()", "traced"),
        ("list[int] | Tensor", "y[0] + 1", "unknown"),
        ("list[int] | Tensor", "y[0].item() if isinstance(y, Tensor) else y", "unknown"),
        ("list[int]", "y[0].item()", "host"),
        ("SomeModel", "y.to('cpu')", "unknown"),
        ("Unpack[Anything]", "y.unsqueeze(0)", "traced"),
    ],
)
def test_a_parameter_that_may_be_several_things(annotation: str, use: str, expected: str):
    found = asked(f"def forward(y: {annotation}):\n    {use}\n    here(y)\n")
    assert found == {"y": expected}


@pytest.mark.parametrize(
    ("test", "holds", "fails"),
    [
        ("isinstance(x, np.ndarray)", "unknown", "traced"),
        ("isinstance(x, (list, tuple))", "unknown", "traced"),
        ("isinstance(x, (list, Tensor))", "traced", "traced"),
        ("isinstance(x, torch.Tensor)", "traced", "unknown"),
        ("not isinstance(x, torch.Tensor)", "unknown", "traced"),
        ("isinstance(x, Something)", "traced", "traced"),
        ("torch.is_tensor(x)", "traced", "unknown"),
        ("is_numpy_array(x)", "unknown", "traced"),
        ("n and isinstance(x, int)", "unknown", "traced"),
        ("n or isinstance(x, int)", "traced", "traced"),
        ("n or isinstance(x, Tensor)", "traced", "unknown"),
        ("n and isinstance(x, Tensor)", "traced", "traced"),
        ("isinstance(x)", "traced", "traced"),
        ("callable(x)", "traced", "traced"),
    ],
)
def test_a_test_for_a_class_tells_what_is_no_tensor(test: str, holds: str, fails: str):
    found = in_forward(f"if {test}:\n    here(x + 1)\nelse:\n    here(x + 2)")
    assert found == {"x + 1": holds, "x + 2": fails}
    assert in_forward(f"here(x + 1) if {test} else here(x + 2)") == found


def test_nested_functions_and_lambdas_see_the_names_around_them():
    found = in_forward("""
        def inner(z: Tensor, k):
            here(x)
            here(z)
            here(k)
            return z
        (lambda q: here(q + x))(n)
    """)
    assert found == {"x": "traced", "z": "traced", "k": "unknown", "q + x": "traced"}


def test_nothing_is_traced_outside_a_step():
    found = asked("""
        class Data(torch.utils.data.Dataset):
            def __getitem__(self, index):
                x = torch.rand(3)
                here(x > 0)
                return x

        class Model(nn.Module):
            def __init__(self, weight: Tensor):
                here(weight)

        def save_image(image: Tensor):
            here(image)
    """)
    assert set(found.values()) == {"unknown"}


def test_fields_of_an_argument_that_is_a_record_of_tensors():
    found = asked("""
        from dataclasses import dataclass

        @dataclass
        class Times:
            end: torch.LongTensor

        @dataclass
        class Batch(Times):
            obs: Tensor
            names: list[str]
            count: int

            def first(self):
                return self.obs[0]

        @dataclass
        class Settings:
            width: int

        class Model(nn.Module):
            def forward(self, batch: Batch, other: "Batch", settings: Settings):
                here(batch.obs)
                here(batch.end.bool().any())
                here(other.first().sum())
                here(batch.count)
                here(settings.width)

        def show(batch: Batch):
            here(batch.obs.sum())
    """)
    assert found == {
        "batch.obs": "traced",
        "batch.end.bool().any()": "mask",
        "other.first().sum()": "traced",
        "batch.count": "host",
        "settings.width": "unknown",
        "batch.obs.sum()": "unknown",
    }
