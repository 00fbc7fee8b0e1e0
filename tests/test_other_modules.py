"""Modules that others wrote are found, built, given an input and judged."""

import sys
import textwrap
from pathlib import Path

import pytest
import torch

from benchmarks.other_modules import difference, files_of, judge_file

FILES = {
    "blocks/attention.py": """
        import torch
        from torch import nn


        class Gate(nn.Module):
            def __init__(self, channels, reduction):
                super().__init__()
                self.net = nn.Sequential(
                    nn.AdaptiveAvgPool2d(1),
                    nn.Conv2d(channels, channels // reduction, 1),
                    nn.Conv2d(channels // reduction, channels, 1),
                )

            def forward(self, x):
                return x * self.net(x).sigmoid()


        class Shift(nn.Module):
            def forward(self, x):
                x = x.clone()
                x[:, 1:] = x[:, :-1]
                return x


        class Noisy(nn.Module):
            def __init__(self):
                super().__init__()
                self.strength = nn.Parameter(torch.zeros(()))

            def forward(self, x):
                return x + torch.randn_like(x) * self.strength


        class Unguessable(nn.Module):
            def __init__(self, settings):
                super().__init__()
                self.width = settings.width


        def gate(dim):
            return Gate(dim, 2)


        def helper(x):
            return x
    """,
    "blocks/broken.py": "import a_package_that_is_not_there\nfrom torch.nn import Module\n",
    "tests/test_it.py": "from torch.nn import Module\n",
    "data.py": "rows = []\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("blocks", "blocks.attention", "blocks.broken", "attention", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_files_that_define_modules_are_found(folder: Path):
    assert files_of(folder) == ["blocks/attention.py", "blocks/broken.py"]


def test_each_module_of_a_file_is_judged(folder: Path):
    found = {one.name: one for one in judge_file(folder, "blocks/attention.py", 60)}
    kinds = {name: one.kind for name, one in found.items()}
    assert kinds == {
        "Gate": "passes",
        "Noisy": "runs",  # its gradient is another one for each draw
        "Shift": "refused",
        "Unguessable": "not judged",
        "gate": "passes",
    }
    assert "TPU202" in found["Shift"].reason
    assert "AttributeError" in found["Unguessable"].reason


def test_a_file_that_cannot_be_imported_is_not_judged(folder: Path):
    (one,) = judge_file(folder, "blocks/broken.py", 60)
    assert one.kind == "not judged"
    assert "a_package_that_is_not_there" in one.reason


def test_what_is_farther_from_float64_than_rounding_differs():
    truth = torch.tensor([1.0, 1e-3], dtype=torch.float64)
    eager, near, far = (truth.float() + torch.tensor([0.0, x]) for x in (1e-6, 5e-5, 5e-4))
    assert not difference([eager], [truth], [near])
    assert "tensor 0: 5.0e-04 from float64" in difference([eager], [truth], [far])
    assert difference([eager], [truth], [near.double()])
    assert difference([eager], [truth], []) == "0 tensors instead of 1"
    whole = torch.tensor([1, 2])
    assert "int64, differs" in difference([whole], [whole], [whole + 1])
