"""What the recorder calls the parameters of a script."""

import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tpuport.verify import processes
from tpuport.verify.compare import Recording, _apart, interface
from tpuport.verify.processes import EAGER, VerifiedScript
from tpuport.verify.recorder import StepRecorder, WrittenPaths, called_here

pytestmark = pytest.mark.usefixtures("only_new_objects")


def test_names_are_those_of_the_whole_model(tmp_path: Path) -> None:
    """A port holds copies and proxies of the modules that it runs as programs."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    copy: Any = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    part: Any = torch.nn.Linear(2, 3)
    for name, parameter in model.named_parameters():
        place, _, last = name.partition(".")
        setattr(copy[int(place)], last, parameter)
    part.weight = model[0].weight
    outer: Any = torch.nn.Module()
    outer.net = model
    wrapper: Any = torch.nn.Module()  # it may be there in one of two runs
    wrapper.module = torch.nn.Module()
    wrapper.module.module = outer
    proxy = weakref.proxy(model)
    recorder = StepRecorder(tmp_path, "trained", 1)
    recorder.before_step(torch.optim.SGD(model.parameters()))
    expected = {"net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"}
    assert set(recorder.names.values()) == expected
    running = {name for name in recorder.buffers() if "running" in name}
    assert running == {"net.1.running_mean", "net.1.running_var"}
    del copy, part, proxy, wrapper


def test_a_sparse_gradient_is_told_from_a_dense_one(tmp_path: Path) -> None:
    """Optimizers treat them differently, and rounding is added to both."""
    for kind in ("sparse", "dense", "disturbed"):
        (tmp_path / kind).mkdir()
        table = torch.nn.Embedding(4, 2, sparse=kind != "dense")
        table(torch.tensor([1, 3, 1])).sum().backward()
        recorder = StepRecorder(tmp_path / kind, "trained", 1, disturbed=kind == "disturbed")
        recorder.before_step(torch.optim.SGD(table.parameters()))
        recorder.finish()
    sparse, dense, disturbed = (
        Recording(tmp_path / kind) for kind in ("sparse", "dense", "disturbed")
    )
    (problem,) = interface(sparse, dense).checks[0].problems
    assert "sparse" in problem
    (mine,), (other,) = sparse.part("gradient").values(), dense.part("gradient").values()
    assert mine.tolist() == other.tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]
    assert 0 < (mine - next(iter(disturbed.part("gradient").values()))).abs().max() < 1e-4


@pytest.mark.parametrize("grows", [False, True])
def test_modules_that_a_call_puts_around_the_model_name_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    """torchdiffeq makes one in each call: eager PyTorch drops it, and a port's program holds it."""
    recorder = StepRecorder(tmp_path, "trained", 1)
    init = torch.optim.Optimizer.__init__
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", recorder.noting(init))
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    around = torch.nn.Sequential(model)
    if grows:  # what the optimizer is given later has no name but that of what is there later
        around.append(torch.nn.Linear(3, 1))
        optimizer.add_param_group({"params": around[1].parameters()})
    recorder.before_step(optimizer)
    later = {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert set(recorder.names.values()) == (later if grows else {"weight", "bias"})


def test_an_optimizer_that_stands_for_another_is_the_same(tmp_path: Path) -> None:
    """Lightning makes one with the same groups, and both may make the step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    alias = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    alias.__dict__ = dict(vars(optimizer))
    recorder = StepRecorder(tmp_path, "trained", 9)
    for one in (optimizer, alias):
        recorder.before_step(one)
    for one in (optimizer, alias):
        recorder.after_step(one)
    assert (recorder.optimizers, recorder.counts) == ([optimizer], [1])


def test_the_same_infinity_is_no_difference() -> None:
    infinite = torch.tensor([float("inf"), 1.0])
    assert _apart(infinite, infinite.clone(), infinite.double() - infinite.double()) == 0.0
    assert not _apart(infinite, -infinite, infinite.double() - infinite.double()) == 0.0


def test_what_somebody_else_writes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and empty folders are moved or removed only if the run itself made them."""
    (tmp_path / "train.py").write_text("")
    (tmp_path / "log.txt").write_text("before")
    (out := tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)

    def run_guarded(command: Any, **_: Any) -> int:
        settings = json.loads(Path(command[-2]).read_text())
        written = WrittenPaths(Path(settings["folder"]) / settings["written"])
        for name in ("ours", "ours/part", "theirs"):
            Path(name).mkdir()
        for name in ("ours", "ours/part"):
            written.watch("os.mkdir", (name, 0o777, -1))
        for name in ("ours.pt", "theirs.pt", "log.txt", "ours/tmp.pt", "ours/theirs.pt"):
            Path(name).write_text(name)
            wanted = os.O_RDONLY if "theirs" in name else os.O_WRONLY | os.O_CREAT
            written.watch("open", (name, "", wanted))
        written.watch("os.rename", ("ours", "last", -1, -1))
        Path("ours").rename("last")
        return 0

    monkeypatch.setattr(processes, "run_guarded", run_guarded)
    ended = processes.run(VerifiedScript(Path("train.py")), EAGER, out)
    files = out / EAGER / "files"
    moved = {str(p.relative_to(files)) for p in files.rglob("*") if p.is_file()}
    assert moved == {"ours.pt", "last/tmp.pt", "log.txt"}
    assert (ended.overwritten, sorted(ended.left)) == (
        ("log.txt",),
        ["last/theirs.pt", "theirs.pt"],
    )
    stay = {str(p) for p in Path().rglob("*") if "out" not in p.parts}
    assert stay == {"train.py", "log.txt", "theirs", "theirs.pt", "last", "last/theirs.pt"}


def test_options_that_imports_need_are_for_both_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import not_installed")
    monkeypatch.chdir(tmp_path)
    options = ("--absent=not_installed", "--eager=Net", "--absent", "another", "--no-verify")
    (out := tmp_path / "out").mkdir()
    commands: list[list[str]] = []

    def run_guarded(command: Any, **_: Any) -> int:
        commands.append(command[command.index("run") + 1 : -3] if "run" in command else command)
        return 0

    monkeypatch.setattr(processes, "run_guarded", run_guarded)
    for side in (EAGER, processes.PORTED):
        processes.run(VerifiedScript(script, options=options), side, out)
    eager, ported = commands
    shared = ["--absent=not_installed", "--absent", "another"]
    assert eager == ["--quiet", "--no-port", "--no-rewrite", *shared]
    assert ported == ["--quiet", "--path", str(tmp_path), *options]


def test_one_process_that_a_script_spawns_runs_here() -> None:
    calls: list[Any] = []
    spawn = called_here(lambda *args: calls.append(args))
    assert spawn(lambda rank, name: calls.append((rank, name)), ("a",), nprocs=1) is None
    assert calls == [(0, "a")]
    spawn(sys.exit, nprocs=1)  # of the process, with status 0
    with pytest.raises(SystemExit):
        spawn(lambda rank: sys.exit(3))
    spawn(print, (), nprocs=2)
    spawn(print, (), 1, join=False)
    assert calls[1:] == [
        (print, (), 2, True, False, "spawn"),
        (print, (), 1, False, False, "spawn"),
    ]
