"""`tpuport rewrite --from torch_xla`: the diff, its explanation, and what is left."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tpuport.cli.app import app

SCRIPT = """import torch_xla.core.xla_model as xm

device = xm.xla_device()
total = xm.all_reduce("sum", 1)
"""
AFTER = """import torch_xla.core.xla_model as xm
import torch

device = torch.device("cpu")
total = xm.all_reduce("sum", 1)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.py").write_text(SCRIPT)
    (tmp_path / "b.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "a.py"


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["rewrite", "--from", *arguments])


def test_a_diff_is_explained_and_what_is_left_is_listed(script):
    result = invoke("torch_xla")
    assert result.exit_code == 1
    assert '+device = torch.device("cpu")\n' in result.stdout
    assert (
        'a.py:3: TPU701 changed: `xm.xla_device()` became `torch.device("cpu")`\n' in result.stderr
    )
    assert "a.py:4: TPU701 left: `xm.all_reduce` stays. What to write: " in result.stderr
    assert "Would rewrite 1 of 2 files with 1 fix (TPU701 1). Left: 1 finding." in result.stderr
    assert script.read_text() == SCRIPT


def test_written_files_do_not_change_again(script):
    assert invoke("torch_xla", "--write").exit_code == 0
    assert script.read_text() == AFTER
    assert invoke("torch_xla", "--write").exit_code == 0
    assert script.read_text() == AFTER


def test_copies_are_complete(script):
    assert invoke("torch_xla", "--out", "made").exit_code == 0
    assert (script.parent / "made/a.py").read_text() == AFTER
    assert (script.parent / "made/b.py").read_text() == "x = 1\n"


def test_other_packages_and_standard_input_are_refused(script):
    result = invoke("apex")
    assert result.exit_code == 2
    assert "--from apex: expected torch_xla" in result.stderr
    assert "reads files" in invoke("torch_xla", "-").stderr


def test_a_file_that_cannot_be_read_is_named(script):
    script.with_name("c.py").write_text("import torch_xla\ndef (")
    result = invoke("torch_xla", "--write")
    assert "c.py" in result.stderr
    assert script.read_text() == AFTER


def test_without_libcst_one_line_says_what_to_install(script):
    code = "import sys; sys.modules['libcst'] = None; from tpuport.cli.app import app; app()"
    made = subprocess.run(
        [sys.executable, "-c", code, "rewrite", "--from", "torch_xla"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 2
    assert 'What to do: pip install "tpuport[migrate]"' in made.stderr
    assert "Traceback" not in made.stderr
