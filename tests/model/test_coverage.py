"""docs/coverage.md is what its generator writes, and says of known operations what is true."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "generate_coverage", ROOT / "docs/generate_coverage.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_not_stale(generator):
    committed = generator.PAGE.read_text(encoding="utf-8")
    assert committed == generator.page(), "run `make docs`"


@pytest.mark.parametrize(
    ("name", "answer", "in_torchax"),
    [
        ("cat", "lowering", True),
        ("nll_loss", "decomposed", False),
        ("adaptive_max_pool2d", "lowering", False),
        ("transpose", "view", True),
        ("linear", "function", True),
        ("interpolate", "Python", False),
        ("cos", "torchax", True),
        ("kaiser_window", None, False),
    ],
)
def test_known_operations(generator, name, answer, in_torchax):
    made = generator.row(name, (1,))
    assert made.answers[:1] == ((answer,) if answer else ())
    assert made.in_torchax is in_torchax
    assert bool(made.missing) is (answer is None)


def test_what_is_no_operation_has_no_row(generator):
    assert generator.row("no_grad", (1,)) is None
    assert generator.row("is_floating_point", (1,)) is None


def test_names_are_found_in_every_form(generator, tmp_path, monkeypatch):
    text = """
import torch.nn.functional as F
y = torch.fft.rfft(torch.nn.functional.silu(x)) + F.gelu(x.masked_fill(m, 0).sum(-1))
z = "a b".split() + self.torch_relu(x) + nn.Linear(2, 3) + my_torch.tanh(3).items()
"""
    (tmp_path / "model.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(generator, "folder", lambda package: tmp_path)
    found = generator.used("anything", ("*.py",))
    assert set(found) == {"fft.rfft", "silu", "gelu", "masked_fill", "sum", "tanh"}
    assert set(found.values()) == {1}
