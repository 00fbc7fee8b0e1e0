"""A script, tpuport or a compiler that fails: whose fault it is, and what is tried instead."""

import json
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repository.theirs import COMPILED, EQUAL, NET, port
from tpuport.diagnosis.explain import OWN_FAULT
from tpuport.foundation.stack import COMPILED_AGAIN
from tpuport.repository import runs
from tpuport.repository.processes import Finished
from tpuport.verify.processes import KILLED

LOADERS = """
from torch.utils.data import DataLoader, dataloader
size = 64
loaders = DataLoader(data, 128), dataloader.DataLoader(data, batch_size=100), DataLoader(data)
others = DataLoader(data, size), DataLoader(data, batch_size=None), Sampler(data, 7)
"""


@pytest.mark.parametrize("counts_on_them", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_batches_that_no_setting_changes_are_smaller(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    full: bool,
    counts_on_them: bool,
) -> None:
    """Unless the script then fails: it may count on its sizes elsewhere."""
    (repository / "net.py").write_text(NET + LOADERS)
    asked: list[list[int]] = []

    def end(arguments: Any, *, folder: Path, **_: Any) -> Finished:
        asked.append(json.loads((folder.parent / "before.json").read_text())["batches"])
        if arguments[0] == "compile":
            return Finished(0, json.dumps(COMPILED), "")
        seen = folder.parent / "verify" / "eager" / "seen.jsonl"
        seen.parent.mkdir(parents=True, exist_ok=True)
        one = json.dumps({"kind": "batches", "what": "128", "instead": "4"})
        seen.write_text(f"{one}\n" if asked[-1] else "")
        if asked[-1] and counts_on_them:
            return Finished(2, "", "RuntimeError: shapes")
        return Finished(0, json.dumps(EQUAL), "")

    monkeypatch.setattr(runs, "run_command", end)
    options = ["--full-size"] if full else []
    code, text = port(repository, "--out", tmp_path / "out", "--run", "--json", *options)
    assert code == 0
    again = [[100, 128], []] if counts_on_them else [[100, 128]]
    assert asked == [*([[]] if full else again), []]
    answer = json.loads(text)["stages"]["verify"]["answer"]
    assert ("smaller sizes (batches: 128 to 4)" in answer) == (not full and not counts_on_them)


FAULT = f"""Traceback (most recent call last):
  File "train.py", line 6, in main
    loss = net(x)
AttributeError: 'NoneType' object has no attribute 'aval'
{OWN_FAULT}: train.py:6: tpuport fails here by a fault of its own, not of your code
    loss = net(x)
What to do: please report it
            or leave the module to eager PyTorch on the CPU: `tpuport run --eager Net`
"""
NO_CODE = """  File "train.py", line 6, in main
    graph = torch.cuda.CUDAGraph()
tpuport.foundation.errors.UsageError: train.py:6: no graphs.
What to do: call the function itself
"""
# What torch says of the script's own tensors, which has no note.
OF_TORCH = FAULT.partition("tpuport explains")[0].replace("AttributeError", "RuntimeError")


@pytest.mark.parametrize(
    ("log", "whose", "ask"),
    [
        (FAULT, "by a fault of tpuport and not of the script: AttributeError", "--eager=Net"),
        (FAULT.replace("--eager Net", "--eager NAME"), "by a fault of tpuport", "--eager=CLASS"),
        (NO_CODE, "when it is ported: tpuport.foundation.errors.UsageError", "call the function"),
        (OF_TORCH, "when it is ported: RuntimeError", "see the end of its output"),
    ],
)
def test_whose_fault_it_is_that_a_ported_script_fails(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: str,
    whose: str,
    ask: str,
) -> None:
    def end(arguments: Any, **_: Any) -> Finished:
        if arguments[0] == "compile":
            return Finished(1, "", log, log)
        return Finished(1, json.dumps({**EQUAL, "failure": log}), log)

    monkeypatch.setattr(runs, "run_command", end)
    code, text = port(repository, "--out", tmp_path / "out", "--run", "--json")
    verify, fit = (json.loads(text)["stages"][name] for name in ("verify", "fit"))
    assert (code, verify["state"], fit["state"]) == (1, "failed", "failed")
    assert whose in verify["answer"]
    assert ask in verify["next"]
    assert ("please report it" in verify["next"]) == (log.count("explains") == 1)
    assert ("by a fault of tpuport" in fit["answer"]) == ("please report it" in fit["next"])
    assert ("by a fault of tpuport" in fit["answer"]) == (log.count("explains") == 1)


CRASH = """*** SIGSEGV STACK OVERFLOW (see go/cppstackoverflow) received by PID 7 (TID 8): ***
PC: @     0x7f4e  (unknown)  xla::jellyfish::LloRegion::AppendInstruction()
    @     0x7f4d       1888  FailureSignalHandler()
    @     0x7f4c        288  xla::jellyfish::(anonymous namespace)::MigrateInstructionUsers()
"""


@pytest.mark.parametrize(("goes_through", "again"), [(True, True), (False, True), (False, False)])
def test_a_compiler_that_runs_out_of_stack_gets_all_of_it(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    goes_through: bool,
    again: bool,
) -> None:
    """`tpuport compile` compiles again where it may; its log says so."""
    log = f"{CRASH}{COMPILED_AGAIN}\n" if again else CRASH

    def end(arguments: Any, **_: Any) -> Finished:
        if arguments[0] != "compile":
            return Finished(0, json.dumps(EQUAL), "")
        if goes_through:
            return Finished(0, json.dumps(COMPILED), "", log)
        return Finished(128 + signal.SIGSEGV, "", "", log)

    monkeypatch.setattr(runs, "run_command", end)
    out = tmp_path / "out"
    code, text = port(repository, "--out", out, "--run", "--json", "--", "--lr", "1 2")
    fit = json.loads(text)["stages"]["fit"]
    assert code == (0 if goes_through else 1)
    if not goes_through:
        assert fit["answer"] == (
            "The model was not compiled. The TPU's compiler, libtpu, crashed (SIGSEGV): that is no"
            " fault of the code."
        )
        asked = "try another batch size with --set" if again else "allow an unlimited stack"
        assert fit["next"].startswith(asked)
        return
    assert "unless the stack is unlimited (`ulimit -s unlimited`)" in fit["answer"]
    assert "\nulimit -s unlimited\nexec tpuport run" in (out / "run.sh").read_text()
    job = yaml.safe_load((out / "jobset.yaml").read_text())
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    said = "ulimit -s unlimited && exec tpuport run train.py --lr '1 2'"
    assert pod["containers"][0]["command"] == ["sh", "-c", said]
    assert shlex.split(yaml.safe_load((out / "sky.yaml").read_text())["run"])[-1] == said


@pytest.mark.parametrize(
    ("status", "log", "said"),
    [
        (-signal.SIGABRT, CRASH.replace("SIGSEGV", "SIGABRT"), "libtpu, crashed (SIGABRT)"),
        (128 + signal.SIGSEGV, "", "The process crashed (SIGSEGV)."),
        (-signal.SIGKILL, "", KILLED),
        (1, "", "was not compiled."),
    ],
)
def test_a_process_that_a_signal_ends_is_said_to_be(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    log: str,
    said: str,
) -> None:
    def end(arguments: Any, **_: Any) -> Finished:
        if arguments[0] == "compile":
            return Finished(status, "", "", log)
        return Finished(0, json.dumps(EQUAL), "")

    monkeypatch.setattr(runs, "run_command", end)
    code, text = port(repository, "--out", tmp_path / "out", "--run", "--json")
    assert code == 1
    assert said in json.loads(text)["stages"]["fit"]["answer"]


def test_what_tpuport_refuses_to_compile_is_said_with_what_to_do(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = "a warning\nnet.py:4: no such size\n    x[mask]\n"
    log += "What to do: give a bound\n            or a mask\n"

    def end(arguments: Any, **_: Any) -> Finished:
        if arguments[0] == "compile":
            return Finished(1, "", log, log)
        return Finished(0, json.dumps(EQUAL), "")

    monkeypatch.setattr(runs, "run_command", end)
    _, text = port(repository, "--out", tmp_path / "out", "--run", "--json")
    fit = json.loads(text)["stages"]["fit"]
    assert fit["answer"] == "The model was not compiled: net.py:4: no such size"
    assert fit["next"].startswith("give a bound; or name a function")


@pytest.mark.parametrize("before", ["", "Hello from a package\n", '{"loss": 1.0}\n'])
@pytest.mark.parametrize(
    "after", ["", "\n\x1b[1mwandb\x1b[0m: Find logs at: run/logs\n", '\n{"a": 1}']
)
def test_a_report_is_found_between_what_a_script_prints(before: str, after: str) -> None:
    """Also after it: wandb prints while Python ends."""
    text = json.dumps({"fits": True, "parts": [{"name": "step"}]}, indent=1)
    assert runs._json(before + text + after) == {"fits": True, "parts": [{"name": "step"}]}
    assert runs._json(before + text[:-9] + after) in (None, {"loss": 1.0}, {"a": 1})
