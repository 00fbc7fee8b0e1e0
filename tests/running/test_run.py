"""`tpuport run`: a script finds what it finds with `python`, and ends as it does there."""

import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
import zipfile
from concurrent.futures.process import _process_worker  # pyright: ignore[reportPrivateUsage]
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch.utils.data._utils.worker import _worker_loop
from typer.testing import CliRunner

from tpuport.cli.app import app
from tpuport.compat.emulated.child_processes import is_ported
from tpuport.compat.porting import porting
from tpuport.compat.runner.run import RunTarget
from tpuport.compat.runner.run import run as run_program
from tpuport.foundation.errors import UsageError

ROOT = Path(__file__).parents[2]


VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_RUN_ID",
)


def state() -> tuple:
    objects = sys.argv, sys.path, sys.modules["__main__"], sys.excepthook
    environment = [os.environ.get(name) for name in VARIABLES]
    return (*map(id, objects), list(sys.path), list(sys.meta_path), environment)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a script, or what `name` says of its folder; all is then as it was before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(source: str, *arguments: str, name: str = "script.py", **options) -> int:
        Path("script.py").write_text(textwrap.dedent(source))
        program = RunTarget(name, options.pop("is_module", False), arguments)
        before = state()
        try:
            return run_program(program, ends_process=False, **options)
        finally:
            assert state() == before

    return call


FACTS = """
import os, sys
import torch

def forward(x: torch.Tensor):
    if x.sum() > 0:
        x = -x
    return x

if __name__ == "__main__":
    print(sys.argv[0], sys.argv[1:], sys.path[0])
    print(__file__, __package__, getattr(__spec__, "name", None), "tpuport" in globals())
    print(sys.modules["__main__"].__dict__ is globals(), __doc__)
"""


def test_a_script_finds_what_python_gives_it(run, tmp_path, capsys):
    assert run(FACTS, "--help", "--", "-x") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"script.py ['--help', '--', '-x'] {tmp_path}",
        f"{tmp_path}/script.py None None True",
        "True None",
    ]


def test_a_linked_script_imports_from_where_it_lies(run, tmp_path, capsys):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "link.py").symlink_to(tmp_path / "script.py")
    assert run(FACTS, name="bin/link.py") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"bin/link.py [] {tmp_path}"
    assert lines[1].startswith(f"{tmp_path}/bin/link.py ")


def test_a_module_runs_as_python_m_does(run, tmp_path, capsys):
    assert run(FACTS, "-m", name="script", is_module=True) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"{tmp_path}/script.py ['-m'] {tmp_path}",
        f"{tmp_path}/script.py  script True",
    ]


@pytest.mark.parametrize("name", ["runnable", "runnable.__main__"])
def test_a_package_runs_by_its_main(run, tmp_path, capsys, name: str):
    (tmp_path / "runnable").mkdir()
    (tmp_path / "runnable" / "__init__.py").write_text("print('package')")
    (tmp_path / "runnable" / "__main__.py").write_text(FACTS)
    assert run("", name=name, is_module=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "package"
    assert lines[2] == f"{tmp_path}/runnable/__main__.py runnable runnable.__main__ True"
    assert "runnable" not in sys.modules


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_a_folder_and_an_archive_run_by_their_main(run, tmp_path, capsys, kind: str):
    place = tmp_path / kind
    if kind == "folder":
        place.mkdir()
        (place / "__main__.py").write_text(FACTS)
    else:
        with zipfile.ZipFile(place, "w") as archive:
            archive.writestr("__main__.py", FACTS)
    assert run("", "x", name=kind) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{kind} ['x'] {place}"
    assert lines[1] == f"{place}/__main__.py  __main__ {kind == 'folder'}"


def test_nothing_is_rewritten_if_asked(run, capsys):
    assert run(FACTS, rewrite=False) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("False")
    with pytest.raises(UsageError, match="needs no packages"):
        run(FACTS, rewrite=False, packages=["a"])


def test_the_environment_is_that_of_a_single_process(run, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    code = """
        import os, socket
        print(*(os.environ[n] for n in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")))
        with socket.socket() as probe:
            probe.bind((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        print("TORCHELASTIC_RUN_ID" in os.environ)
    """
    assert run(code) == 0
    assert capsys.readouterr().out == "0 0 1 1\nFalse\n"


@pytest.mark.parametrize(
    ("code", "status", "printed"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(True)", 1, ""),
        ("import sys; sys.exit('text')", 1, "text\n"),
        ("raise SystemExit(['a'])", 1, "['a']\n"),
    ],
)
def test_the_status_is_the_scripts(run, capsys, code: str, status: int, printed: str):
    assert run(code) == status
    assert capsys.readouterr().err == printed


FAILING = """
import torch
from concurrent.futures import Future

def call(x):
    try:
        {}["missing"]
    except KeyError as error:
        raise ValueError("wrong") from error

call(torch.ones(2))
"""


def test_a_traceback_has_the_users_frames_only(run, tmp_path, capsys):
    assert run(FAILING) == 1
    said = capsys.readouterr().err
    files = [line.split('"')[1] for line in said.splitlines() if line.startswith("  File")]
    assert files == [f"{tmp_path}/script.py"] * 3
    assert said.startswith("Traceback (most recent call last):")
    assert said.endswith("ValueError: wrong\n")
    assert run(FAILING, full_traceback=True) == 1
    assert "tpuport/compat/runner/run.py" in capsys.readouterr().err


def test_a_syntax_error_has_no_frames(run, tmp_path, capsys):
    assert run("def f(:\n") == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f'  File "{tmp_path}/script.py", line 1'
    assert said[-1].startswith("SyntaxError")


def test_an_error_of_a_program_shows_its_message(run, capsys):
    code = "import tpuport\nraise tpuport.PortError('no', file='a.py', line=3, remedy='stop')"
    assert run(code) == 1
    assert capsys.readouterr().err.endswith("PortError: a.py:3: no\nWhat to do: stop\n")


def test_an_interrupt_ends_with_130(run, capsys):
    assert run("raise KeyboardInterrupt") == 130
    assert capsys.readouterr().err.endswith("KeyboardInterrupt\n")


def test_the_scripts_own_excepthook_is_asked(run, capsys):
    assert run("import sys; sys.excepthook = lambda *e: print('hook', e[0].__name__)\n1 / 0") == 1
    assert capsys.readouterr().out == "hook ZeroDivisionError\n"
    assert run("import sys; sys.excepthook = lambda: None\n1 / 0") == 1
    said = capsys.readouterr().err
    assert "TypeError" in said
    assert "ZeroDivisionError" in said


@pytest.mark.parametrize(
    ("name", "is_module", "message"),
    [
        ("nothing.py", False, "There is no file nothing.py to run"),
        ("empty", False, "The folder empty has no __main__.py"),
        ("nothing", True, "There is no module nothing to run"),
        ("nothing.more", True, "There is no module nothing.more to run"),
        ("xml", True, "The package xml has no __main__ to run"),
        ("sys", True, "The module sys has no Python code"),
    ],
)
def test_what_cannot_be_run_is_a_wrong_call(run, tmp_path, name, is_module, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=message):
        run("", name=name, is_module=is_module)


def test_what_a_package_fails_to_import_is_its_own_error(run, tmp_path, capsys):
    (tmp_path / "failing_pack").mkdir()
    (tmp_path / "failing_pack" / "__init__.py").write_text("import not_there_at_all\n")
    assert run("", name="failing_pack.x", is_module=True) == 1
    said = capsys.readouterr().err
    assert "failing_pack/__init__.py" in said
    assert "\nModuleNotFoundError: No module named 'not_there_at_all'\n" in said


SPAWNING = """
import json, pickle, sys
import torch
import torch.multiprocessing as mp

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x).square().mean()

def work(rank, seed):
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    net, x = Net().to(device), torch.randn(4, 3).to(device)
    torch.distributed.init_process_group("nccl", "tcp://127.0.0.1:1", rank=rank, world_size=1)
    loss = net(x)
    loss.backward()
    values = [loss.item(), *net.linear.weight.grad.cpu().flatten().tolist()]
    from tpuport.compat.emulated.settings import active
    programs = [program.model for program in active().report.programs]
    with open(sys.argv[1], "w") as file:
        json.dump([values, device.type, programs, active().eager, active().rtol], file)

if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Net()))) is Net
    mp.spawn(work, args=(5,), nprocs=torch.cuda.device_count(), join=False)
"""


def test_what_the_script_spawns_is_ported_and_waited_for(run, tmp_path):
    assert run(SPAWNING, "found.json", eager=("Other",), rtol=1e-3, verify=False) == 0
    values, device, programs, eager, rtol = json.loads(Path("found.json").read_text())
    torch.manual_seed(5)
    linear, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    loss = linear(x).square().mean()
    loss.backward()
    assert linear.weight.grad is not None
    torch.testing.assert_close(values, [loss.item(), *linear.weight.grad.flatten().tolist()])
    assert (device, programs, eager, rtol) == ("cuda", ["Net"], ["Other"], 1e-3)


@pytest.mark.parametrize(
    ("target", "ported"),
    [(textwrap.dedent, True), (None, True), (_worker_loop, False), (_process_worker, False)],
)
def test_workers_of_loaders_and_pools_run_plain_python(target, ported: bool):
    process = multiprocessing.get_context("spawn").Process(target=target)
    assert is_ported(process) is ported


# The trace.


@pytest.mark.parametrize("ending", ["", "raise ValueError"])
def test_a_trace_is_taken_however_the_script_ends(run, tmp_path, ending: str):
    import jax

    code = "import jax\njax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))).block_until_ready()\n"
    assert run(code + ending, profile=tmp_path / "made" / "trace") == bool(ending)
    (found,) = (tmp_path / "made" / "trace").glob("plugins/profile/*/*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(found))
    events = [e.name for plane in data.planes for line in plane.lines for e in line.events]
    assert any("jit" in name.lower() for name in events)
    # Another one can be taken.
    jax.profiler.start_trace(str(tmp_path / "again"))
    jax.profiler.stop_trace()


def test_a_trace_needs_a_folder(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"Traces cannot be written to .*file/x: Not a"):
        run("", profile=tmp_path / "file" / "x")


def test_compiled_programs_are_kept_where_it_is_asked(run, tmp_path):
    code = "import jax\njax.jit(lambda x: x @ x)(jax.numpy.ones((64, 64))).block_until_ready()\n"
    assert run(code, cache_dir=str(tmp_path / "programs")) == 0
    assert list((tmp_path / "programs").glob("*-cache"))


def test_equal_programs_are_compiled_once(run, monkeypatch):
    monkeypatch.setattr("tpuport.aot.cache.program_memory._SECONDS", 0.0)
    code = """
    import jax, torch

    loaded, x = [], torch.ones(2, 4, device="cuda")
    jax.monitoring.register_event_listener(lambda name, **_: loaded.append(name))
    for _ in range(3):
        block = torch.nn.Linear(4, 4).cuda()
        torch.testing.assert_close(block(x).cpu(), block.cpu()(x.cpu()))
    assert loaded.count("/jax/compilation_cache/cache_hits") >= 2
    """
    assert run(code) == 0


def test_an_error_is_explained_where_there_is_more_to_say(run, capsys):
    code = "import jax\njax.jit(lambda x: x if x > 0 else -x)(1.0)\n"
    assert run(code) == 1
    said = capsys.readouterr().err
    assert "TracerBoolConversionError" in said
    assert "tpuport explains (traced-value): " in said


# The command.


def test_the_command_line_is_passed_on(monkeypatch, tmp_path):
    given = {}

    def run(program, **options):
        given.update(options, program=program)
        return 5

    monkeypatch.setattr("tpuport.compat.runner.run.run", run)
    options = "--package a --package b --path c --absent d --eager E --program F.g --no-verify"
    more = f"--rtol 0.1 --no-port --profile {tmp_path} --cache-dir d -m name --package x -m -- y"
    options += " --report r.html --quiet"
    result = CliRunner().invoke(app, ["run", *options.split(), *more.split()])
    assert result.exit_code == 5
    assert given == {
        "program": RunTarget("name", True, ["--package", "x", "-m", "--", "y"]),
        "packages": ["a", "b"],
        "paths": [Path("c")],
        "rewrite": True,
        "profile": tmp_path,
        "cache_dir": "d",
        "report": Path("r.html"),
        "full_traceback": False,
        "quiet": True,
        "absent": ["d"],
        "eager": ["E"],
        "fallback": None,
        "methods": ["F.g"],
        "verify": False,
        "rtol": 0.1,
        "port_modules": False,
    }
    # What `porting` does not know it takes for the setting of a shim.
    known = {**signature(porting).parameters, **signature(run_program).parameters}
    assert given.keys() <= known.keys()


@pytest.mark.parametrize(
    ("given", "taken"),
    [("--lr 3", ["--lr", "3"]), ("-- --lr 3", ["--lr", "3"]), ("a -- b", ["a", "--", "b"])],
)
def test_dashes_in_front_of_the_options_of_a_script_are_none_of_them(given, taken, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "tpuport.compat.runner.run.run", lambda program, **_: seen.append(program.arguments)
    )
    CliRunner().invoke(app, ["run", "train.py", *given.split()])
    assert seen == [taken]


def test_a_wrong_call_is_one_line():
    result = CliRunner().invoke(app, ["run", "nothing.py"])
    assert (result.exit_code, result.stderr) == (2, "There is no file nothing.py to run.\n")
    assert CliRunner().invoke(app, ["run"]).exit_code == 2


ENDING = """
import atexit, sys, threading
atexit.register(print, "at exit")

def wait():
    threading.Event().wait()

threading.Thread(target=wait, name="writer").start()
print(sys.argv[1:])
sys.exit(3)
"""


def test_a_stuck_thread_does_not_keep_the_command_alive(tmp_path):
    (tmp_path / "script.py").write_text(ENDING)
    command = [sys.executable, "-c", "from tpuport.cli.app import app; app()", "run"]
    done = subprocess.run(
        [*command, "--", str(tmp_path / "script.py"), "--help", "--", "x"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "['--help', '--', 'x']\nat exit\n")
    assert "left thread 'writer' at" in done.stderr
    assert "script.py:6 in wait" in done.stderr


def test_the_report_is_written_also_if_the_script_fails(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import torch\nnet = torch.nn.Linear(2, 2).cuda()\n"
        "net(torch.ones(1, 2, device='cuda'))\nraise SystemExit(4)\n"
    )
    report = tmp_path / "run.txt"
    assert run_program(RunTarget(str(script)), report=report, ends_process=False) == 4
    assert report.read_text().startswith("1 program\n  Linear: agrees")
    with pytest.raises(UsageError, match=r"\.json, \.html or \.txt"):
        run_program(RunTarget(str(script)), report=tmp_path / "run.pdf", ends_process=False)
