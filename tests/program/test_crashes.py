"""libtpu that ends the process: another one goes on, or says what to do."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_TARGET = """
import os, resource, signal

def make():
    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    print("stack", soft, flush=True)
    if soft != resource.RLIM_INFINITY or {always}:
        os.kill(os.getpid(), signal.SIGSEGV)
"""
_EXPLAINED = """
import os, signal
from tpuport.aot.crashes import crash_explained
with crash_explained():
    pass
print("left", flush=True)
with crash_explained():
    {end}
"""
_ATTACHED = """
import sys
from tpuport.foundation.guarded import run_attached
run_attached([sys.executable, "-c", {code!r}])
"""
_WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs signals")
_ANY = resource.getrlimit(resource.RLIMIT_STACK)[1] == resource.RLIM_INFINITY


def _run(command: list[str], folder: Path, stack: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Python with a limit of the stack, such as `-Ss 8192`."""
    shell = f'ulimit -c 0 {stack}; exec "$@"'
    words = ["bash", "-c", shell, "bash", sys.executable, *command]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not _ANY, reason="the hard limit of the stack is finite here")
@pytest.mark.parametrize("always", [False, True])
def test_a_command_that_crashes_compiles_again_with_all_of_the_stack(
    tmp_path: Path, *, always: bool
) -> None:
    (tmp_path / "own.py").write_text(_TARGET.format(always=always))
    command = ["-m", "tpuport", "compile", "own.py:make", "-t", "v6e-1"]
    done = _run(command, tmp_path, "-Ss 8192")
    assert done.stdout == f"stack {8192 * 1024}\nstack -1\n"
    assert done.returncode == (128 + signal.SIGSEGV if always else 2)
    assert done.stderr.count("compiling again with a stack without a limit") == 1
    assert ("crashed (SIGSEGV) again. What to do" in done.stderr) == always
    assert ("returned a NoneType: expected (model, inputs)" in done.stderr) != always


def test_a_command_that_may_have_no_more_stack_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(_TARGET.format(always=True))
    command = ["-m", "tpuport", "compile", "own.py:make", "-t", "v6e-1"]
    done = _run(command, tmp_path, "-s 8192")
    assert done.stdout == f"stack {8192 * 1024}\n"
    assert done.returncode == 128 + signal.SIGSEGV
    assert "What to do: allow a stack without a limit" in done.stderr


@pytest.mark.parametrize(
    ("end", "stack", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "-Ss 8192", True),
        ("raise SystemExit(3)", "-Ss 8192", False),
        pytest.param(
            *("os.kill(os.getpid(), signal.SIGSEGV)", "-Ss unlimited", False),
            marks=pytest.mark.skipif(not _ANY, reason="the hard limit is finite here"),
        ),
    ],
)
def test_what_to_do_about_a_crash_is_said_in_a_script_too(
    tmp_path: Path, end: str, stack: str, *, said: bool
) -> None:
    done = _run(["-c", _EXPLAINED.format(end=end)], tmp_path, stack)
    assert done.stdout == "left\n"
    assert done.returncode != 0
    assert done.stderr.count("start it from a shell after `ulimit -s unlimited`") == said


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_what_runs_on_this_terminal_ends_with_its_process() -> None:
    words = [sys.executable, "-c", _ATTACHED.format(code=_WAITS)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = Path("/proc", process.stdout.readline().strip(), "stat")
        there = child.exists()
        process.kill()
    until = time.monotonic() + 20
    while (runs := _runs(child)) and time.monotonic() < until:
        time.sleep(0.05)
    assert there
    assert not runs


def _runs(stat: Path) -> bool:
    try:
        return stat.read_text().split()[2] != "Z"
    except OSError:
        return False
