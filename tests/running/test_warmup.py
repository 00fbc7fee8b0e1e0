"""Programs compiled ahead: from shapes, several at a time, and from the command line."""

import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch
from typer.testing import CliRunner

import tpuport
from tpuport.aot.cache.compile_cache import CacheReport, watching
from tpuport.cli.app import WRONG_CALL, app
from tpuport.compat.runner.target import load_target
from tpuport.foundation.errors import PortError, UsageError

S = jax.ShapeDtypeStruct


class Net(torch.nn.Module):
    """A small model with two methods."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.layer(x).sin() * scale

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


class Repeats(torch.nn.Module):
    """Reads the value of an argument: how many rounds there are."""

    def forward(self, x: torch.Tensor, rounds: torch.Tensor) -> torch.Tensor:
        return torch.zeros(int(rounds), 2) + x.sum()


def net(**options) -> tpuport.PortedModel:
    torch.manual_seed(0)
    return tpuport.convert(Net(), methods=("forward", "score"), verify=False, **options)


def names(report: CacheReport) -> list[str]:
    """The ported programs that were compiled."""
    return [program.name for program in report.programs if program.name.startswith("Net")]


@pytest.mark.parametrize(
    "shape",
    [torch.empty(3, 4, device="meta"), S((3, 4), jnp.float32), torch.ones(3, 4), jnp.ones((3, 4))],
    ids=["meta", "shape", "tensor", "array"],
)
def test_a_call_like_it_compiles_nothing(shape):
    ported = net()
    x = torch.randn(3, 4)
    first = CacheReport("")
    with watching(first):
        ported.compile(shape)
    assert names(first) == ["Net_forward"]
    assert ported.report.timing.compile > 0
    later = CacheReport("")
    with watching(later):
        y = ported(x)
    assert names(later) == []
    assert ported.report.retraces == []
    torch.testing.assert_close(tpuport.to_torch(y), ported.to_torch()(x))


def test_nothing_is_run_or_changed_by_it():
    model = torch.nn.BatchNorm1d(4)
    ported = tpuport.convert(model, verify=False)
    before = {name: jnp.array(value) for name, value in ported.buffers.items()}
    ported.compile(S((3, 4), jnp.float32))
    assert all((ported.buffers[name] == value).all() for name, value in before.items())
    ported(torch.randn(3, 4))
    assert int(ported.buffers["num_batches_tracked"]) == 1


def test_the_first_call_is_still_compared_with_eager():
    ported = tpuport.convert(Net())
    ported.compile(S((3, 4), jnp.float32))
    assert ported.report.verdict == "not verified"
    ported(torch.randn(3, 4))
    assert ported.report.verdict == "agrees"


def test_a_program_that_depends_on_a_value_needs_it():
    ported = tpuport.convert(Repeats(), verify=False)
    with pytest.raises(PortError):
        ported.compile(S((2,), jnp.float32), torch.empty((), dtype=torch.int64, device="meta"))
    ported.compile(S((2,), jnp.float32), torch.tensor(3))
    later = CacheReport("")
    with watching(later):
        assert ported(torch.ones(2), torch.tensor(3)).shape == (3, 2)
    assert "Repeats_forward" not in {program.name for program in later.programs}
    with pytest.raises(
        UsageError,
        match=r"depends on the value of \S+, and only its shape is given; pass a tensor",
    ):
        ported.compile(S((2,), jnp.float32), torch.empty((), dtype=torch.int64, device="meta"))


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = Net()
    with pytest.raises(UsageError, match="converted from the meta device"):
        tpuport.convert(model).compile(S((3, 4), jnp.float32))


def test_many_programs_at_a_time(tmp_path: Path):
    def programs(ported):
        for rows in (1, 2, 3):
            yield ported, (S((rows, 4), jnp.float32),)
        yield ported, (torch.empty(5, 4, device="meta"),), {"scale": 2.0}
        yield ported, (S((3, 4), jnp.float32),), {"method": "score"}

    with tpuport.compile_cache(tmp_path):
        first = tpuport.warmup(programs(net()), workers=2)
        jax.clear_caches()
        second = tpuport.warmup(programs(net()), workers=2)
    assert [one.name for one in first] == [
        "Net.forward(float32[1, 4])",
        "Net.forward(float32[2, 4])",
        "Net.forward(float32[3, 4])",
        "Net.forward(float32[5, 4])",
        "Net.score(float32[3, 4])",
    ]
    assert [one.hit for one in first] == [False] * 5
    assert [one.hit for one in second] == [True] * 5
    assert all(one.seconds > 0 for one in first)


def test_what_this_process_has_takes_no_time():
    ported = net()
    (one,) = tpuport.warmup([(ported, (S((3, 4), jnp.float32),))])
    (again,) = tpuport.warmup([(ported, (S((3, 4), jnp.float32),))])
    assert one.seconds > 0
    assert (again.seconds, again.hit) == (0, False)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((torch.nn.Linear(1, 1), ()), "program 0: expected .* got tuple of Linear, tuple"),
        ("model", "program 0: expected .ported model, args tuple. or .* got str$"),
    ],
)
def test_an_item_of_another_form_is_a_wrong_call(item, message: str):
    with pytest.raises(UsageError, match=message):
        tpuport.warmup([item])


# The command.

PROGRAMS = """
import helper
import torch, tpuport

ported = tpuport.convert(torch.nn.Linear(4, helper.WIDTH), verify=False)

def programs():
    for rows in (1, 2):
        yield ported, (torch.empty(rows, 4, device="meta"),)

def calls():
    ported(torch.ones(3, 4))

def idle():
    pass
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch) -> Path:
    """A file with functions, beside a module that it imports."""
    import sys

    path = tmp_path / "code" / "my_programs.py"
    path.parent.mkdir()
    path.write_text(PROGRAMS)
    (path.parent / "helper.py").write_text("WIDTH = 4")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    return path


def invoke(*arguments: object):
    """Run `tpuport warmup`."""
    return CliRunner().invoke(app, ["warmup", *map(str, arguments)])


def test_the_command_says_what_was_compiled_and_what_was_there(script: Path, tmp_path: Path):
    folder = tmp_path / "cache"
    result = invoke(f"{script}:programs", "--cache-dir", folder, "-j", 1)
    assert result.exit_code == 0, result.output
    *lines, summary = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["compiled", "compiled"]
    assert lines[0].endswith(" s  Linear.forward(float32[1, 4])")
    assert summary.startswith(f"2 programs: 0 loaded, 2 compiled; {folder} holds ")
    jax.clear_caches()
    result = invoke(f"{script}:programs", "--cache-dir", folder)
    assert [line.split()[0] for line in result.stdout.splitlines()[:-1]] == ["loaded", "loaded"]


def test_a_function_may_make_the_calls_itself(script: Path, tmp_path: Path):
    result = invoke(f"{script}:calls", "--cache-dir", tmp_path / "cache")
    assert result.exit_code == 0, result.output
    assert "  Linear_forward\n" in result.stdout


def test_damaged_entries_are_removed_first(script: Path, tmp_path: Path):
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "jit_x-00-cache").write_bytes(b"\x78\x9c broken")
    result = invoke(f"{script}:programs", "--cache-dir", folder)
    assert result.exit_code == 0, result.output
    assert "removed 1 damaged entry\n" in result.stderr
    assert not (folder / "jit_x-00-cache").exists()


def test_a_target_that_compiles_nothing_is_a_mistake(script: Path, tmp_path: Path):
    result = invoke(f"{script}:idle", "--cache-dir", tmp_path / "cache")
    assert result.exit_code == WRONG_CALL
    assert f"{script}:idle compiled nothing" in result.stderr


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("programs", "programs: expected package.module:function or file.py:function, such as"),
        ("my.py:f()", "expected package.module:function"),
        ("nowhere.py:f", "nowhere.py: there is no such file"),
        ("no_such_package.at_all:f", "there is no module no_such_package.at_all"),
        ("os.path:nope", "os.path has no function nope"),
        ("os.path:sep", "os.path has no function sep"),
    ],
)
def test_a_wrong_target_is_a_wrong_call(target: str, message: str, tmp_path: Path):
    result = invoke(target, "--cache-dir", tmp_path)
    assert result.exit_code == WRONG_CALL
    assert message in result.stderr


def test_an_error_of_the_target_itself_is_its_own(tmp_path: Path, monkeypatch):
    import sys

    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "broken_target.py"
    path.write_text(textwrap.dedent("import no_such_package_here\n"))
    with pytest.raises(ModuleNotFoundError, match="no_such_package_here"):
        load_target(f"{path}:f")
