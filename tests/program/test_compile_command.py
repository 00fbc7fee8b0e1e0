"""`tpuport compile`: exit codes, output, and what is said where it cannot work."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.program.small import needs_libtpu
from tpuport.aot.report import CompileReport
from tpuport.cli.app import FAILED, WRONG_CALL, app
from tpuport.cli.compile import DOES_NOT_FIT

ROOT = Path(__file__).parent.parent.parent
FITS, LARGE = "tests.program.small:fits", "tests.program.small:does_not_fit"


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["compile", *arguments])


def start(code: str) -> subprocess.Popen[str]:
    """A process of its own, without the variables that tests run under."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "ALLOW_", "XLA_"))}
    kept["JAX_PLATFORMS"] = "cpu"
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env=kept,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@needs_libtpu
def test_a_program_that_fits_exits_with_0_and_is_written(tmp_path):
    out = tmp_path / "r.json"
    result = invoke(FITS, "--topology", "v6e-1", "--json", "--out", str(out))
    assert result.exit_code == 0
    printed = CompileReport.from_json(result.stdout)
    assert (printed.model, printed.topology, printed.num_chips) == ("Linear", "v6e-1", 1)
    assert CompileReport.from_json(out.read_text(encoding="utf-8")) == printed
    assert json.loads(result.stdout)["fits"] is True


@needs_libtpu
def test_a_step_of_training_is_compiled_as_it_is():
    result = invoke("tests.program.small:trained", "-t", "v5e-4", "--json")
    assert result.exit_code == 0, result.output
    printed = CompileReport.from_json(result.stdout)
    assert (printed.model, printed.what, printed.optimizer) == ("Small", "training step", "adamw")
    assert printed.memory.averages == printed.memory.parameters > 0
    refused = invoke("tests.program.small:trained", "-t", "v5e-4", "--train")
    assert (refused.exit_code, "leave train=" in refused.output) == (WRONG_CALL, True)


@needs_libtpu
def test_one_that_does_not_fit_has_an_exit_code_of_its_own(tmp_path):
    page = tmp_path / "r.html"
    result = invoke(LARGE, "-t", "v5e-4", "--mesh", "data=2,fsdp=-1", "-o", str(page))
    assert DOES_NOT_FIT not in (FAILED, WRONG_CALL, 0)
    assert result.exit_code == DOES_NOT_FIT
    assert result.stdout.startswith("✘ Small, training step: does not fit v5e-4")
    assert "What to try, in this order" in result.stdout
    assert "mesh data=2 fsdp=2" in result.stdout
    assert page.is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tests.program.small:says_nothing", "-t", "v6e-8"), "says_nothing returned a NoneType"),
        (("tests.program.small:nothing", "-t", "v6e-8"), "has no function nothing"),
        ((FITS, "-t", "v6e-8", "--mesh", "fsdp"), "--mesh: expected sizes by axis such as"),
        ((FITS, "-t", "v6e-7"), "There is no TPU topology 'v6e-7'"),
        ((FITS, "-t", "h100"), "There is no TPU topology 'h100'"),
    ],
)
def test_a_wrong_call_is_one_line(arguments: tuple[str, ...], message: str):
    result = invoke(*arguments)
    assert result.exit_code == WRONG_CALL
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_without_libtpu_one_line_says_what_to_install():
    process = start(
        f"""
        import importlib.util as util
        find = util.find_spec
        util.find_spec = lambda name, *rest: None if name == "libtpu" else find(name, *rest)
        from tpuport.cli.app import FAILED, WRONG_CALL, app
        app(["compile", "{FITS}", "--topology", "v6e-8"])
        """
    )
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == (WRONG_CALL, "")
    assert stderr == (
        "the topology 'v6e-8' needs libtpu, which is not installed. What to do: pip install"
        ' "tpuport[tpu]"\n'
    )


@needs_libtpu
def test_two_processes_compile_at_once_and_keep_their_environment():
    code = """
        import os, sys
        import jax
        from jax.sharding import NamedSharding, PartitionSpec as P
        from tpuport.sharding import make_mesh
        before = dict(os.environ)
        mesh = make_mesh({"fsdp": 1}, "v6e-1")
        print(dict(os.environ) == before, flush=True)
        sys.stdin.readline()
        x = jax.ShapeDtypeStruct((8, 128), "float32", sharding=NamedSharding(mesh, P()))
        lowered = jax.jit(lambda x: x @ x.T).trace(x).lower(lowering_platforms=("tpu",))
        print(lowered.compile().memory_analysis().argument_size_in_bytes)
        """
    both = [start(code) for _ in range(2)]
    # Each has loaded libtpu before the other compiles.
    assert [process.stdout.readline() for process in both if process.stdout] == ["True\n"] * 2
    results = [process.communicate("go\n", timeout=120) for process in both]
    assert [stdout for stdout, _ in results] == ["4096\n"] * 2
    assert [process.returncode for process in both] == [0, 0]
