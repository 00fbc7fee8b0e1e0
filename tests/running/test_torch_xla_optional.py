"""A script whose own import of torch_xla is inside `try`, and what it is told when it fails."""

import pytest

from tpuport.compat.runner.run import RunTarget
from tpuport.compat.runner.run import run as run_program

SCRIPT = """
try:
    import torch_xla.core.xla_model as xm
except ImportError:
    xm = None

print(xm.get_ordinal())
"""


@pytest.mark.parametrize("asked", [False, True])
def test_the_error_of_a_script_says_how_its_import_finds_torch_xla(
    tmp_path, monkeypatch, capsys, asked
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    if asked:
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
    (tmp_path / "script.py").write_text(SCRIPT)
    status = run_program(RunTarget("script.py", False, ()), ends_process=False)
    out, said = capsys.readouterr()
    assert (status, out) == ((0, "0\n") if asked else (1, ""))
    assert ("script.py:3 imports torch_xla where it can do without" in said) is not asked
    assert ("set PJRT_DEVICE=TPU" in said) is not asked


def test_another_error_says_nothing_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    (tmp_path / "script.py").write_text("raise ValueError(3)")
    assert run_program(RunTarget("script.py", False, ()), ends_process=False) == 1
    assert "torch_xla" not in capsys.readouterr().err
