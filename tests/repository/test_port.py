"""`tpuport port`: from a folder to answers, patches and launch files, and nothing runs unasked."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repository.theirs import COMPILED, EQUAL, NET, TRAIN, port
from tpuport.repository import processes, runs
from tpuport.repository.processes import Finished
from tpuport.repository.scripts import find_scripts
from tpuport.verify.processes import KILLED, MORE_TIME, TRAINED

_OWN = Path(runs.__file__).parents[1] / "compat" / "device.py"
REFUSED = """  File "train.py", line 6, in main
    graph = torch.cuda.CUDAGraph()
tpuport.foundation.errors.UsageError: train.py:6: no graphs. What to do: call the function itself
"""
RAISED = f"""  File "train.py", line 6, in main
    x.cuda(3)
  File "{_OWN}", line 9, in cuda
    raise RuntimeError(ordinal)
RuntimeError: invalid device ordinal
"""
# What torch finds wrong with the script's own tensors, below a wrapper of ours.
PASSED_ON = RAISED.replace("raise RuntimeError(ordinal)", "return function(*args)")


def test_all_that_needs_no_execution(repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text = port(repository, "--out", out, "--json", "--", "--lr", "it's")
    found = json.loads(text)
    assert code == 0
    assert json.loads((out / "report.json").read_text()) == found
    assert not (Path.cwd() / "touched").exists()
    assert not (repository / "touched").exists()
    entry = found["stages"]["entry"]["result"]
    assert (entry["script"], entry["required"], entry["missing"]) == ("train.py", ["--lr"], [])
    launch = entry["launches"][0]
    assert launch == {
        "place": "README.md:2", "launcher": "python", "arguments": ["--lr", "0.1", "--device=cpu"]
    }  # fmt: skip
    assert [one["launcher"] for one in entry["launches"]] == ["python", "torchrun"]
    assert found["stages"]["verify"]["state"] == "not asked"
    assert found["stages"]["read"]["result"]["unread"][0].startswith("broken.py")
    places = [item["place"] for item in found["stages"]["read"]["result"]["todo"]]
    assert "net.py:10:9" in places
    assert [place for place in places if place.startswith("train.py")] == []
    # The patch applies.
    subprocess.run(["git", "init", "-q", repository], check=True)
    subprocess.run(["git", "apply", (out / "port.patch").resolve()], cwd=repository, check=True)
    assert "if x.sum() > 0" not in (repository / "net.py").read_text()
    # The launch files are what they say.
    job = yaml.safe_load((out / "jobset.yaml").read_text())
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    words = ["tpuport", "run", "train.py", "--lr", "it's"]
    assert pod["containers"][0]["command"] == words
    sky = yaml.safe_load((out / "sky.yaml").read_text())
    assert sky["resources"]["accelerators"] == "tpu-v6e-8"
    assert "train.py --lr 'it'\"'\"'s'" in sky["run"]
    for script in ("run.sh", "tpu_vm.sh"):
        subprocess.run(["sh", "-n", out / script], check=True)
    page = (out / "report.html").read_text()
    assert "<img src=x>" not in page
    assert "&lt;img src=x&gt;" in page


def test_only_a_program_has_no_autograd(repository: Path, tmp_path: Path) -> None:
    """The loop of a script calls `loss.backward()` under `tpuport run`; a module cannot."""
    inside = NET.replace("x = x * 2\n", "loss.backward()\n")
    (repository / "net.py").write_text(inside)
    _, text = port(repository, "--out", tmp_path / "out", "--json")
    todo = json.loads(text)["stages"]["read"]["result"]["todo"]
    assert [one["place"] for one in todo if one["code"] == "TPU419"] == ["net.py:11:13"]


@pytest.mark.parametrize("trained", [True, False])
def test_a_script_trains_if_its_comparison_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, trained: bool
) -> None:
    """What calls `backward()` may be in modules that only some arguments import."""
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / "run.py").write_text("if __name__ == '__main__':\n    print(1)\n")
    asked: list[bool] = []

    def end(arguments: Any, *, folder: Path, environment: Any, **_: Any) -> Finished:
        if arguments[0] == "compile":
            asked.append(json.loads(Path(environment[runs.SETTINGS]).read_text())["trains"])
            return Finished(0, json.dumps(COMPILED), "")
        side = folder.parent / "verify" / "eager"
        side.mkdir(parents=True)
        if trained:
            (side / TRAINED).touch()
        return Finished(0, json.dumps(EQUAL), "")

    monkeypatch.setattr(runs, "run_command", end)
    assert port(tmp_path / "repo", "--out", tmp_path / "out", "--run")[0] == 0
    assert asked == [trained]


def test_launch_files_leave_made_up_values_to_a_person(repository: Path, tmp_path: Path) -> None:
    script = repository / "train.py"
    needs = 'parser.add_argument("--data", required=True, help="it\'s $HOME | fake | `x`")\n'
    script.write_text(TRAIN.replace("args = ", f"{needs}args = ", 1))
    out = tmp_path / "out"
    code, text = port(repository, "--out", out, "--json")
    assert code == 0
    found = json.loads(text)
    assert "--data" in found["stages"]["entry"]["result"]["arguments"]["full"]
    assert found["next_steps"][0].startswith("entry: fill in data (one of")
    for file in ("run.sh", "jobset.yaml", "sky.yaml"):
        text = (out / file).read_text()
        assert "FILL_IN_DATA" in text
        assert "made-up" not in text.replace("compared with made-up-data", "")
    sky = yaml.safe_load((out / "sky.yaml").read_text())
    assert sky["run"].endswith("train.py --lr 0.1 --data FILL_IN_DATA")
    yaml.safe_load((out / "jobset.yaml").read_text())
    # It stops without a value, and takes one.
    (tmp_path / "tpuport").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "tpuport").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["sh", out / "run.sh"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "Fill in data" in ended.stderr
    env["FILL_IN_DATA"] = "my data"
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["run", "train.py", "--lr", "0.1", "--data", "my data"]


def test_stages_are_done_once(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    calls: list[Any] = []

    def ended(arguments: Any, **options: Any) -> Finished:
        calls.append((arguments, options["folder"]))
        # What takes minutes, and may be stopped, comes after what does not.
        assert (tmp_path / "out" / "run.sh").is_file()
        assert "run.sh" in json.loads((tmp_path / "out" / "report.json").read_text())["files"]
        found = COMPILED if arguments[0] == "compile" else EQUAL
        return Finished(0, f"the script prints\n{json.dumps(found)}", "")

    monkeypatch.setattr(runs, "run_command", ended)
    options = [".", "--out", tmp_path / "out", "--run", "--json", "--", "--lr", "0.1"]
    code, text = port(*options)
    assert code == 0
    assert json.loads(text)["stages"]["verify"]["state"] == "done"
    assert json.loads(text)["slice_name"] == "v6e-1"
    answer = json.loads(text)["stages"]["fit"]["answer"]
    assert "Net, training step: fits v6e-1" in answer
    assert "2.0 GiB a chip, about 3.0 ms a step" in answer
    assert [runs._tenths(x, "about ") for x in (0.06, 0.049)] == ["about 0.1", "less than 0.1"]
    (arguments, folder), (compiling, _) = calls
    assert arguments[0] == "verify"
    assert arguments[-3:] == ["--", "--lr", "0.1"]
    assert compiling[:2] == ["compile", "tpuport.repository.capture:program"]
    # In a copy, so that the repository stays as it is.
    assert folder == (tmp_path / "out" / "work" / "copy").resolve()
    assert (folder / "net.py").read_text() == NET
    page = (tmp_path / "out" / "report.html").read_text()
    assert "&lt;script&gt;" in page
    assert "but for rounding" not in page
    assert port(*options) == (code, text)
    assert len(calls) == 2
    (repository / "net.py").write_text(NET + "\n")
    assert port(*options)[0] == 0
    assert len(calls) == 4


def test_two_calls_at_a_time_need_two_folders(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, told = tmp_path / "out", []

    def ended(arguments: Any, **_: Any) -> Finished:
        told.append(port(repository, "--out", out))
        return Finished(0, json.dumps(COMPILED if arguments[0] == "compile" else EQUAL), "")

    monkeypatch.setattr(runs, "run_command", ended)
    options = ["--run", "--", "--lr", "0.1"]
    assert port(repository, "--out", out, *options)[0] == 0
    assert [code for code, _ in told] == [2, 2]
    assert "Another call of" in told[0][1]
    assert port(repository, "--out", out, *options)[0] == 0  # it did not stay locked


def test_a_folder_has_nothing_of_an_earlier_call(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is about what was asked for last."""
    out = tmp_path / "out"

    def ended(arguments: Any, **options: Any) -> Finished:
        if arguments[0] != "compile":
            return Finished(0, json.dumps(EQUAL), "")
        Path(arguments[arguments.index("--out") + 1]).write_text("page")
        return Finished(0, json.dumps(COMPILED), "")

    monkeypatch.setattr(runs, "run_command", ended)
    port(repository, "--out", out, "--run", "--", "--lr", "0.1")
    assert "compile.html" in json.loads((out / "report.json").read_text())["files"]
    assert (out / "compile.html").is_file()
    _, text = port(repository, "--out", out, "--json", "--", "--lr", "0.2")
    assert "compile.html" not in json.loads(text)["files"]
    assert not (out / "compile.html").exists()
    other = tmp_path / "another"
    other.mkdir()
    (other / "library.py").write_text("ONE = 1\n")
    port(other, "--out", out, "--json")
    left = {path.name for path in out.iterdir()} - {"work", ".report.lock"}
    assert left == set(json.loads((out / "report.json").read_text())["files"])


def test_what_only_rounding_allows_is_said(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = {**EQUAL["stages"][0]["checks"][0], "error": 1e-2}
    rounded = {**EQUAL, "stages": [{**EQUAL["stages"][0], "checks": [check]}]}

    def end(arguments: Any, **_: Any) -> Finished:
        found = COMPILED if arguments[0] == "compile" else rounded
        return Finished(0, json.dumps(found), "")

    monkeypatch.setattr(runs, "run_command", end)
    code, text = port(repository, "--out", tmp_path / "out", "--run", "--json")
    assert code == 0
    assert (
        "equal eager PyTorch's but for rounding" in json.loads(text)["stages"]["verify"]["answer"]
    )
    assert "<td>equal but for rounding</td>" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("ended", "state", "answer"),
    [
        (Finished(None, "", "still"), "needs you", "did not make 3 steps in 15 minutes"),
        (Finished(2, "", "error"), "needs you", "fails in eager PyTorch"),
        (
            Finished(2, "", "ModuleNotFoundError: No module named 'zarr.core'"),
            "needs you",
            "fails in eager PyTorch, before anything is ported: ModuleNotFoundError",
        ),
        (
            Finished(2, "", REFUSED),
            "needs you",
            "stops the script before anything is ported: tpuport.",
        ),
        (
            Finished(2, "", RAISED),
            "needs you",
            "tpuport, which stands in for CUDA, stops the script",
        ),
        (Finished(2, "", PASSED_ON), "needs you", "The script fails in eager PyTorch"),
        (Finished(2, "", f"3 steps\n{KILLED}"), "needs you", "ported. It was killed: most likely"),
        (Finished(1, json.dumps({"failure": "boom"}), ""), "failed", "fails when it is ported"),
        (
            Finished(1, json.dumps({**EQUAL, "passed": False, "programs": 0}), ""),
            "needs you",
            "The script ends by itself before it trains",
        ),
        (
            Finished(
                1,
                json.dumps(
                    {**EQUAL, "passed": False, "within": "losses within 2e-3", "notes": ["<note>"]}
                    | {"undecided": f"no time; {MORE_TIME}"}
                ),
                "",
            ),
            "needs you",
            "The port has losses within 2e-3 of eager PyTorch; could not be told from rounding: no",
        ),
        (
            Finished(
                1,
                json.dumps({**EQUAL, "passed": False, "within": "-", "undecided": "elsewhere"}),
                "",
            ),
            "needs you",
            "could not be told from rounding: elsewhere",
        ),
        (
            Finished(
                1,
                json.dumps({**EQUAL, "passed": False, "within": "", "undecided": "all NaN"}),
                "",
            ),
            "needs you",
            "which says nothing: all NaN",
        ),
        (
            Finished(1, json.dumps({**EQUAL, "passed": False}), ""),
            "failed",
            "differs from eager PyTorch",
        ),
    ],
)
def test_what_a_run_came_to(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ended: Finished,
    state: str,
    answer: str,
) -> None:
    def end(arguments: Any, **_: Any) -> Finished:
        return Finished(0, json.dumps(COMPILED), "") if arguments[0] == "compile" else ended

    monkeypatch.setattr(runs, "run_command", end)
    code, text = port(repository, "--out", tmp_path / "out", "--run", "--json")
    found = json.loads(text)["stages"]["verify"]
    assert (code, found["state"]) == ({"needs you": 4, "failed": 1}[state], state)
    assert answer in found["answer"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert ("&lt;note&gt;" in page) == ("no time" in page) == ("no time" in ended.output)
    if "zarr" in ended.tail:
        assert found["next"] == "`pip install zarr`"
    elif ended.tail == REFUSED:
        assert found["next"] == "call the function itself"
    elif ended.tail == RAISED:
        assert "please report it" in found["next"]
    elif "undecided" in ended.output:
        assert ("--minutes" in found["next"]) == (MORE_TIME in found["answer"])
    elif KILLED in ended.tail:
        assert found["next"].startswith("give the script smaller sizes")
    elif "eager PyTorch, before" in found["answer"]:
        assert "README.md:2 starts it with `--lr 0.1 --device=cpu`" in found["next"]


@pytest.mark.parametrize(("minutes", "stopped"), [(None, 15), (2, 2), (30, 30)])
def test_a_verdict_comes_before_the_comparison_is_stopped(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    minutes: int | None,
    stopped: int,
) -> None:
    calls: dict[str, tuple[Any, float]] = {}

    def end(arguments: Any, *, seconds: float, **_: Any) -> Finished:
        calls[arguments[0]] = arguments, seconds
        return Finished(0, json.dumps(COMPILED if arguments[0] == "compile" else EQUAL), "")

    monkeypatch.setattr(runs, "run_command", end)
    options = [] if minutes is None else [f"--minutes={minutes}"]
    assert port(repository, "--out", tmp_path / "out", "--run", *options)[0] == 0
    arguments, seconds = calls["verify"]
    searched = next(float(a.partition("=")[2]) for a in arguments if a.startswith("--minutes="))
    assert seconds == calls["compile"][1] == 60 * stopped
    most = 0.95 * (minutes or 5)
    assert most - 0.5 < searched <= most


def test_wrong_calls(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    for options, message in [
        ((repository, "--out", tmp_path / "full"), "holds other files"),
        ((repository, "--out", tmp_path / "full" / "mine" / "a"), "cannot be written to (Not a"),
        ((tmp_path / "none", "--out", tmp_path / "a"), "no folder or script"),
        ((repository, "--entry", "none.py", "--out", tmp_path / "a"), "no script none.py"),
        ((repository, "--for", "v9z-8", "--out", tmp_path / "a"), "no TPU topology 'v9z-8'"),
        ((repository, "--set", "rate=1", "--out", tmp_path / "a"), "--set rate: the script has lr"),
        ((repository, "--set", "lr", "--out", tmp_path / "a"), "--set takes NAME=VALUE; got lr"),
    ]:
        code, text = port(*options)
        assert code == 2
        assert message in text
    (tmp_path / "empty").mkdir()
    code, text = port(tmp_path / "empty", "--out", tmp_path / "b")
    assert code == 4
    assert "There is no Python file here" in text


def test_an_option_of_the_script_is_told_its_place(repository: Path, tmp_path: Path) -> None:
    options = (repository, "--out", tmp_path / "out")
    for words in (["--lr", "1"], ["--lr=1"]):
        code, text = port(*options, *words)
        said = " ".join(text.replace("│", " ").split())
        assert code == 2
        assert "Options of the script go after --, as in `-- --lr`" in said
    code, text = port(*options, "--lr", "1", "--", "--batch", "3")
    assert code == 2
    assert "after --" not in text


def test_a_line_that_starts_a_script_otherwise_is_shown(tmp_path: Path) -> None:
    """A script that requires nothing starts without arguments."""
    root = tmp_path / "repo"
    root.mkdir()
    (root / "train.py").write_text(TRAIN.replace("required=True", "default=1.0"))
    (root / "net.py").write_text(NET)
    (root / "README.md").write_text("```\npython train.py --lr 0.1\n```\n")
    _, text = port(root, "--out", tmp_path / "out", "--json")
    said = "Here it starts without arguments; README.md:2 starts it with `--lr 0.1`"
    assert said in json.loads(text)["stages"]["entry"]["answer"]
    _, text = port(root, "--out", tmp_path / "out", "--json", "--", "--lr", "2")
    assert "without arguments" not in json.loads(text)["stages"]["entry"]["answer"]


def test_entry_points(tmp_path: Path) -> None:
    sources = {
        "setup.py": "if __name__ == '__main__': pass",
        "engine.py": "def epoch(loss):\n    loss.backward()",
        "begin.py": "from engine import epoch\nif __name__ == '__main__': pass",
        "lib.py": "import torch, not_installed_anywhere, torch.utils.tensorboard",
        "finetune.py": """
            import lib
            for step in range(3):
                loss.backward()
            """,
        "predict.py": """
            import argparse, torch
            parser = argparse.ArgumentParser()
            parser.add_argument("image")
            parser.add_argument("extra", nargs="?")
            parser.add_argument("-w", "--weights", required=True)
            if __name__ == "__main__":
                pass
            """,
        "tests/test_training.py": "loss.backward()\nif __name__ == '__main__': pass",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    files = [tmp_path / name for name in sources]
    found = find_scripts(tmp_path, files)
    names = ["finetune.py", "begin.py", "predict.py", "tests/test_training.py"]
    assert [(one.path, one.trains) for one in found] == [(n, n != "predict.py") for n in names]
    assert "not_installed_anywhere" in found[0].missing
    assert {"tensorboard", "torch"} <= set(found[0].packages)
    assert found[2].required == ("image", "--weights")


def test_packages_that_are_imported_in_functions(tmp_path: Path) -> None:
    """Those that the script comes to in any case are missing; others only may be."""
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import own
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                import absent_types
            try:
                import absent_guarded
            except ImportError:
                pass

            def build():
                import absent_in_build
                with open("x"):
                    from absent_in_with.sub import thing

            def main():
                model = build()
                if model:
                    import absent_in_condition
                loss.backward()
                def inner():
                    import absent_in_inner

            def unused():
                import absent_unused

            if __name__ == "__main__":
                import absent_in_main_part
                main()
            """
        )
    )
    (tmp_path / "own.py").write_text(
        "def load():\n    import absent_own, helper\n    return 1\n"
        "if __name__ == '__main__':\n    import absent_of_other_script\n"
    )
    (tmp_path / "helper.py").touch()
    entry = find_scripts(tmp_path, sorted(tmp_path.glob("*.py")))[0]
    assert entry.path == "train.py"
    assert entry.missing == ("absent_in_build", "absent_in_main_part", "absent_in_with")
    assert entry.maybe_missing == (
        *("absent_in_condition", "absent_in_inner", "absent_of_other_script"),
        *("absent_own", "absent_unused"),
    )


def test_packages_that_modules_import_which_are_imported_in_some_cases(tmp_path: Path) -> None:
    """All are named at once: those of packages around a module, and of modules in a package."""
    files = {
        "run.py": """
            import models
            if args.task == "one":
                from tasks.one import Task
            else:
                from tasks import two
            if __name__ == "__main__":
                loss.backward()
            """,
        "models/__init__.py": "from .nets import deep",
        "models/nets/__init__.py": "import absent_of_nets",
        "models/nets/deep.py": "from ...run import x\nfrom ..base import Base",
        "models/base.py": "import absent_of_base",
        "tasks/__init__.py": "import absent_of_tasks",
        "tasks/one.py": "import absent_of_one, helper\nfrom absent_from import name",
        "tasks/two.py": "import absent_of_two",
        "helper.py": "def f():\n    import absent_of_helper",
        "other.py": "import absent_of_other",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    entry = find_scripts(tmp_path, sorted(tmp_path.rglob("*.py")))[0]
    assert entry.path == "run.py"
    assert entry.missing == ("absent_of_base", "absent_of_nets")
    assert entry.maybe_missing == (
        *("absent_from", "absent_of_helper", "absent_of_one", "absent_of_tasks", "absent_of_two"),
    )


def test_packages_for_cuda_are_not_missing(tmp_path: Path) -> None:
    """`tpuport run` has some, and an import finds a stand-in for the others."""
    text = (
        "import flash_attn, torch_xla, triton.language, absent_here\nfor x in y:\n    z.backward()"
    )
    (tmp_path / "train.py").write_text(text)
    assert find_scripts(tmp_path, [tmp_path / "train.py"])[0].missing == ("absent_here",)


STRAYS = {
    "fork": "os.fork() or time.sleep(600)",
    "fork in a session": "os.fork() or (os.setsid(), time.sleep(600))",
    "daemon": "os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(600))",
    "spawned worker": "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])",
    "server": "threading.Thread(target=socket.create_server(('127.0.0.1', 0)).accept).start()",
}


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find strays")
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "waits"])
@pytest.mark.parametrize("stray", STRAYS)
def test_no_stray_of_a_script_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stray: str, ends: bool
) -> None:
    """Whether the script ends before its time or not."""
    start = "import os, socket, subprocess, sys, threading, time\n"
    end = "os._exit(0)" if ends else "time.sleep(600)"
    code = f"{start}{STRAYS[stray]}\ntime.sleep(0.2)\n{end}"
    monkeypatch.setattr(processes, "_TPUPORT", (sys.executable, "-c", code))
    name = f"TPUPORT_TEST_{os.getpid()}"
    began = time.monotonic()
    ended = processes.run_command(
        [],
        folder=tmp_path,
        log=tmp_path / "log",
        seconds=20 if ends else 1,
        environment={name: "1"},
    )
    assert time.monotonic() - began < 15
    assert ended.status == (0 if ends else None), ended.tail
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{name}=1".encode() in (process / "environ").read_bytes().split(b"\0"):
                left.append(process.name)
    assert left == []


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc to find strays")
def test_nothing_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that never ends is stopped, with children that left its group."""
    code = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
open(sys.argv[1], "w").write(" ".join(str(c.pid) for c in children))
print("begun", file=sys.stderr, flush=True)
time.sleep(600)
"""
    monkeypatch.setattr(processes, "_TPUPORT", (sys.executable, "-c", code))
    pids = tmp_path / "pids"
    began = time.monotonic()
    ended = processes.run_command([str(pids)], folder=tmp_path, log=tmp_path / "log", seconds=2)
    assert time.monotonic() - began < 30
    assert ended.status is None
    assert ended.tail == "begun"
    for pid in map(int, pids.read_text().split()):
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.slow
def test_a_training_script_for_real(repository: Path, tmp_path: Path) -> None:
    """`test_stages_are_done_once` has the same with the result of the run made up."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "from tpuport.cli.app import app; app()", "port"]
    out = tmp_path / "out"
    options = [repository, "--out", out, "--run", "--steps", "3", "--", "--lr", "0.1"]
    done = subprocess.run([*command, *options], env=env, check=False, capture_output=True)
    found = json.loads((out / "report.json").read_text())["stages"]["verify"]
    assert done.returncode == 0, found
    assert found["answer"].startswith("Losses, gradients, parameters and states of 3 steps equal")
    assert not (repository / "touched").exists()
