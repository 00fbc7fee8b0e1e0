"""The public surface: what importing costs, what the package exports, its errors, its command."""

import inspect
import pickle
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tpuport
from tpuport.cli.app import FAILED, WRONG_CALL, app
from tpuport.foundation.errors import (
    EXTRA_OF_PACKAGE,
    MissingExtraError,
    ParityError,
    PortError,
    TpuportError,
    UsageError,
)

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "torchax", "jax", "jaxlib", "numpy", "transformers", "diffusers")
HEAVY_OR_CLI = (*HEAVY, "rich", "typer", "jinja2")
IMPORT_SECONDS = 0.3


def run_python(code: str) -> str:
    """What a fresh interpreter prints for this code."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def modules_loaded_by(statement: str, watched: tuple[str, ...]) -> set[str]:
    """Which of the watched packages a fresh interpreter has after the statement."""
    # The statement may print too; what is asked for comes last.
    printed = run_python(f"import sys\n{statement}\nprint(*sys.modules)").splitlines()[-1]
    return set(printed.split()) & set(watched)


def seconds_for(statement: str) -> float:
    """The best of three fresh interpreters: the others measure what else the machine does."""
    code = f"import time\nt = time.perf_counter()\n{statement}\nprint(time.perf_counter() - t)"
    return min(float(run_python(code)) for _ in range(3))


# What importing costs.


def test_importing_loads_nothing_heavy():
    assert modules_loaded_by("import tpuport", HEAVY_OR_CLI) == set()


def test_importing_the_command_line_or_the_source_half_loads_no_framework():
    assert modules_loaded_by("import tpuport.cli.app", HEAVY) == set()
    walk = """
from importlib import import_module
from pkgutil import walk_packages
for stage in ("source", "rules", "lint", "diagnosis", "doctor", "cli"):
    name = f"tpuport.{stage}"
    for module in walk_packages(import_module(name).__path__, name + "."):
        import_module(module.name)
"""
    assert modules_loaded_by(walk, (*HEAVY, "jinja2")) == set()
    assert modules_loaded_by(walk, ("tpuport.rules._discovery",))


_RUN = """
from pathlib import Path
from tempfile import TemporaryDirectory
from tpuport.cli.app import FAILED, WRONG_CALL, app
source = "import torch\\ndef forward(x: torch.Tensor):\\n    if x.sum() > 0:\\n        x = -x\\n"
source += "    return x\\n"
with TemporaryDirectory() as folder:
    path = Path(folder, "model.py")
    path.write_text(source)
    for arguments, code in {calls}:
        try:
            app([*arguments, str(path), "--isolated", "--no-cache"])
        except SystemExit as end:
            assert end.code == code, (arguments, end.code)
"""
FORMATS = ("full", "json", "sarif", "github")


@pytest.mark.parametrize(
    ("calls", "loaded"),
    [
        (
            [
                *((["lint", "--format", form], 1) for form in FORMATS),
                *((["rewrite"], 1), (["lint", "--fix"], 0)),
            ],
            set(),
        ),
        ([(["lint", "--format", "html"], 1)], {"jinja2"}),
    ],
    ids=["text", "html"],
)
def test_lint_and_rewrite_load_no_framework(calls: list[tuple[list[str], int]], loaded: set[str]):
    assert modules_loaded_by(_RUN.format(calls=calls), (*HEAVY, "jinja2")) == loaded


@pytest.mark.parametrize("command", ["lint", "rewrite", "run"])
def test_help_loads_no_rules_and_nothing_that_reads_files(command: str):
    ask = f"""
from tpuport.cli.app import FAILED, WRONG_CALL, app
try:
    app(["{command}", "--help"])
except SystemExit:
    pass
"""
    watched = (
        "tpuport.lint.run",
        "tpuport.source.rewrite.matching",
        "tpuport.rules",
        "pathspec",
        *HEAVY,
    )
    assert modules_loaded_by(ask, watched) == set()


def test_a_heavy_import_would_be_noticed():
    assert modules_loaded_by("import tpuport, typer", HEAVY_OR_CLI) >= {"typer"}
    assert "numpy" in modules_loaded_by("import tpuport; tpuport.convert", HEAVY)


def test_importing_is_fast():
    assert seconds_for("import tpuport") < IMPORT_SECONDS


def test_a_slow_import_would_be_noticed():
    assert seconds_for(f"import tpuport, time; time.sleep({IMPORT_SECONDS})") > IMPORT_SECONDS


# Each time in a fork of a process that has imported torch.
_BESIDE = """
import os
import tempfile
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import create_block_mask

def work():
    accelerator = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    print(*accelerator, torch.get_device_module().__name__)
    with torch.random.fork_rng():
        print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
    print([*torch.utils.data.DataLoader([1, 2], pin_memory=True)])
    print(create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8).shape)
    store = "file://" + tempfile.mkdtemp() + "/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    distributed.barrier()
    mesh = distributed.init_device_mesh("cpu", (1,))
    print(fully_shard(torch.nn.Identity(), mesh=mesh)(torch.ones(1)).item())
    distributed.destroy_process_group()

for first in {firsts}:
    print("beside", flush=True)
    if (child := os.fork()) == 0:
        exec(first)
        work()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def work_beside(*firsts: str) -> list[str]:
    """What torch does after each of some statements."""
    printed = run_python("import sys" + _BESIDE.format(firsts=firsts))
    return [one.strip() for one in printed.split("beside")[1:]]


def test_torch_works_as_before_beside_a_ported_model():
    alone, beside = work_beside("", "import tpuport.model.ported_model")
    assert alone == beside
    assert len(alone.splitlines()) == 5


# None of our code: what the test above would find without the package's care.
@pytest.mark.slow
@pytest.mark.xfail(raises=subprocess.CalledProcessError, reason="torchax 0.0.14.dev20261026")
def test_torch_works_as_before_beside_plain_torchax():
    alone, beside = work_beside("", "import torchax")
    assert alone == beside


# Each name is first used in a process of its own, a fork of one that has imported torch.
_FIRST_USE = """
import gc, os, random, numpy, torch, tpuport.training, tpuport.quantization
for load in ("None", *{names}):
    if (child := os.fork()) == 0:
        random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
        before = [one["collections"] for one in gc.get_stats()]
        eval(load)
        looked = [one["collections"] for one in gc.get_stats()] != before
        drawn = random.random(), numpy.random.rand(), torch.rand(()).item()
        print(*drawn, looked, gc.isenabled(), gc.get_freeze_count(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, load
"""


def test_first_use_draws_no_random_numbers_and_collects_no_garbage():
    names = ("tpuport.convert", "tpuport.training.make_train_step", "tpuport.quantize")
    printed = run_python(_FIRST_USE.format(names=names)).splitlines()
    assert len(printed) == 4
    assert set(printed) == {printed[0]}
    assert printed[0].endswith(" False True 0")


def test_importing_changes_no_environment_variable():
    assert (
        run_python(
            "import os; before = dict(os.environ); import tpuport.cli.app;"
            " print(before == os.environ)"
        )
        == "True"
    )


# What the package exports.


@pytest.mark.parametrize("name", tpuport.__all__)
def test_every_public_name_loads_and_is_documented(name: str):
    value = getattr(tpuport, name)
    assert inspect.getdoc(value)
    assert value.__name__ in {name, f"tpuport.{name}"}


def test_dir_lists_every_public_name_before_any_is_loaded():
    listed = run_python("import tpuport; print(*dir(tpuport))").split()
    assert set(tpuport.__all__) <= set(listed)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tpuport' has no attribute 'convrt'"):
        _ = tpuport.convrt  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("access", "feature"),
    [
        ("tpuport.convert", "tpuport.convert"),
        ("from tpuport import to_torch", "tpuport.to_torch"),
    ],
)
def test_without_the_jax_extra_the_error_is_one_line_that_names_it(access: str, feature: str):
    message = run_python(f"""
        import sys
        sys.modules.update(dict.fromkeys(("torch", "torchax", "jax", "jaxlib", "numpy")))
        import tpuport
        try:
            {access}
        except tpuport.TpuportError as error:
            print(type(error).__name__, isinstance(error, ImportError), error)
    """)
    kind, is_import_error, *words = message.split(" ")
    assert (kind, is_import_error) == ("MissingExtraError", "True")
    assert words[:2] == [feature, "needs"]
    assert message.endswith('not installed. What to do: pip install "tpuport[jax]"')
    assert "\n" not in message


# Its errors.


def test_a_port_error_shows_the_place_the_code_and_the_remedy():
    error = PortError(
        "the shape of x[mask] depends on the values of mask",
        code="TPU201",
        file="model.py",
        line=12,
        source_line="    kept = x[mask]\n",
        remedy="use torch.where.",
    )
    assert str(error) == (
        "model.py:12: TPU201 the shape of x[mask] depends on the values of mask\n"
        "    kept = x[mask]\n"
        "What to do: use torch.where."
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "no"),
        ({"code": "TPU101"}, "TPU101 no"),
        ({"file": "m.py"}, "m.py: no"),
        ({"file": "m.py", "line": 3}, "m.py:3: no"),
        ({"line": 3, "remedy": "stop."}, "no\nWhat to do: stop."),
    ],
)
def test_a_port_error_leaves_out_what_is_not_known(fields: dict, expected: str):
    assert str(PortError("no", **fields)) == expected


def test_errors_are_also_what_callers_catch():
    assert issubclass(ParityError, PortError)
    for error in (PortError, UsageError, MissingExtraError):
        assert issubclass(error, TpuportError)
    assert issubclass(UsageError, ValueError)
    assert issubclass(MissingExtraError, ImportError)


@pytest.mark.parametrize(
    "error",
    [
        ParityError("no", code="TPU401", file="m.py", line=3, remedy="stop."),
        UsageError("Expected a module, got a str."),
        MissingExtraError("tpuport.convert", "jax", "jax"),
    ],
)
def test_errors_survive_pickling(error: TpuportError):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_a_failed_import_names_the_extra_or_is_not_ours():
    found = MissingExtraError.from_import("x", ModuleNotFoundError("", name="diffusers.models"))
    assert str(found) == (
        'x needs diffusers, which is not installed. What to do: pip install "tpuport[recipes]"'
    )
    assert MissingExtraError.from_import("x", ModuleNotFoundError("", name="tpuport.nope")) is None
    assert MissingExtraError.from_import("x", ModuleNotFoundError("")) is None


def test_every_named_extra_brings_its_package():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = pyproject["project"]["optional-dependencies"]
    brought = {(re.split(r"[>=<\[]", line)[0], name) for name in extras for line in extras[name]}
    assert EXTRA_OF_PACKAGE.items() <= brought


# Its command.


@pytest.fixture
def invoke():
    """Runs the command with the given arguments."""
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_the_version_is_the_packages(invoke):
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"tpuport {tpuport.__version__}\n")


def test_the_package_runs_as_the_command():
    command = [sys.executable, "-m", "tpuport"]
    result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"tpuport {tpuport.__version__}\n"
    wrong = subprocess.run([*command, "no-command"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "Usage: tpuport " in wrong.stderr  # not the name of a file


def test_help_lists_every_command_and_the_exit_codes(invoke):
    result = invoke("--help")
    assert result.exit_code == 0
    commands = ("demo", "lint", "rewrite", "rules", "explain", "run", "compile", "warmup", "doctor")
    for word in (*commands, "Exit codes: 0 all is well"):
        assert word in result.stdout


def test_rules_lists_every_rule(invoke):
    from tpuport.rules._discovery import find_rules

    result = invoke("rules")
    assert result.exit_code == 0
    assert find_rules()
    for rule in find_rules():
        assert rule.CODE in result.stdout
        assert rule.__name__ in result.stdout


def test_explain_prints_the_rules_page_by_code_or_name(invoke):
    from tpuport.rules._discovery import find_rules

    rule = find_rules()[0]
    dashed = "".join(f"-{c.lower()}" if c.isupper() else c for c in rule.__name__).lstrip("-")
    for spelling in (rule.CODE, rule.CODE.lower(), rule.__name__, dashed):
        result = invoke("explain", spelling)
        assert result.exit_code == 0
        assert result.stdout.startswith(f"{rule.CODE} {rule.__name__}")
        assert inspect.cleandoc(rule.__doc__ or "no page") in result.stdout
        assert textwrap.indent(rule.EXAMPLES[0].before.strip(), "    ") in result.stdout


def test_an_unknown_rule_is_a_wrong_call(invoke):
    from tpuport.rules._discovery import find_rules

    code = find_rules()[0].CODE
    result = invoke("explain", f"{code}x")
    assert result.exit_code == WRONG_CALL
    assert f"There is no rule {code}x. Did you mean {code}?" in result.stderr
    assert "Did you mean" not in invoke("explain", "zzzz").stderr


@pytest.mark.parametrize(
    ("raised", "exit_code", "printed"),
    [
        (PortError("cannot", file="m.py", line=3), FAILED, "m.py:3: cannot\n"),
        (UsageError("Expected a module, got a str."), WRONG_CALL, "Expected a module"),
        (ModuleNotFoundError("", name="torch"), WRONG_CALL, 'pip install "tpuport[jax]"'),
    ],
)
def test_our_errors_end_the_command_without_a_traceback(
    invoke, monkeypatch, raised: Exception, exit_code: int, printed: str
):
    def fail(**_: object) -> bool:
        raise raised

    monkeypatch.setattr("tpuport.demo.run", fail)
    result = invoke("demo")
    assert result.exit_code == exit_code
    assert printed in result.stderr


def test_a_bug_keeps_its_traceback(invoke, monkeypatch):
    def fail(**_: object) -> bool:
        raise ModuleNotFoundError("No module named 'tpuport.nope'", name="tpuport.nope")

    monkeypatch.setattr("tpuport.demo.run", fail)
    assert isinstance(invoke("demo").exception, ModuleNotFoundError)


@pytest.mark.parametrize(("holds", "exit_code"), [(True, 0), (False, FAILED)])
def test_the_demo_fails_when_parity_does(invoke, monkeypatch, tmp_path, holds, exit_code: int):
    given = {}

    def run(**arguments: object) -> bool:
        given.update(arguments)
        return holds

    monkeypatch.setattr("tpuport.demo.run", run)
    assert invoke("demo", "--out", str(tmp_path / "r.html")).exit_code == exit_code
    assert given == {"out": tmp_path / "r.html", "verbose": False, "as_json": False}


def test_a_wrong_option_is_a_wrong_call(invoke):
    assert invoke("demo", "--nope").exit_code == WRONG_CALL
    assert invoke("nope").exit_code == WRONG_CALL


def test_every_name_of_training_is_found_and_is_no_module():
    from tpuport import training

    # In the order of the list a module is loaded before the function that it would hide.
    kinds = {name: type(getattr(training, name)) for name in training.__all__}
    assert [name for name, kind in kinds.items() if kind is type(training)] == []
