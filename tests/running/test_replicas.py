"""`tpuport run --replicas N`: torch_xla's collectives among processes, and how a run ends."""

import copy
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from tpuport.cli.app import app
from tpuport.compat.emulated.replica_processes import run_replicas

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "replica_script.py"
TPUPORT = "from tpuport.cli.app import app; app()"


def command(*arguments: str | Path, size: int = 2) -> list[str]:
    return [sys.executable, "-c", TPUPORT, "run", "--replicas", str(size), *map(str, arguments)]


def run(folder: Path, *arguments: str | Path, size: int = 2) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        command(*arguments, size=size),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two replicas saved."""
    folder = tmp_path_factory.mktemp("replicas")
    done = run(folder, SCRIPT, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the master prints\n"
    assert torch.load(folder / "master.pt") == 0
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_collectives_have_torch_xlas_numbers(found):
    x = [torch.arange(4.0).view(2, 2) + 10 * rank for rank in range(2)]
    total, side = x[0] + x[1], torch.cat(x, -1)
    for rank, one in enumerate(found):
        other = 1 - rank
        wanted = {
            "sum": total,
            "or": torch.tensor([True, False]),
            "scaled": [total * 0.5, torch.full((3,), 1.5, dtype=torch.bfloat16)],
            "gathered": side,
            "own": x[rank],
            "scattered": total[rank : rank + 1] * 0.5,
            "to_all": torch.cat([x[0][rank : rank + 1], x[1][rank : rank + 1]], 1),
            "turned": x[other],
            "zeros": x[0] if rank == 1 else torch.zeros(2, 2),
            "root": x[1],
            # Of its own part of the gather, and of the maximum only where that is its own.
            "grad": 2 * x[rank] + (rank == 1),
            "mesh": [{"a": 0}, {"a": 1}],
            "payloads": [b"", b"\1"],
            "only": "cpu" if rank == 1 else None,
            "device": "xla:0",
            "turns": [rank],
            "numbers": [rank, 2, rank, rank == 0],
        }
        assert one["collectives"].keys() == wanted.keys()
        for name, value in wanted.items():
            got = one["collectives"][name]
            if isinstance(value, torch.Tensor) or name == "scaled":
                torch.testing.assert_close(got, value, rtol=0, atol=0, msg=name)
            else:
                assert got == value, name


def test_training_equals_that_of_the_whole_batch(found):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wanted = []
    for step in range(3):
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    for one in found:
        np.testing.assert_allclose(one["training"]["xm"], wanted, rtol=1e-5)
        np.testing.assert_allclose(one["training"]["ddp"], wanted, rtol=1e-5)


def accumulated(size: int) -> list:
    """What each of some replicas of DDP gets, from copies of the model in one process."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    copies = [copy.deepcopy(first) for _ in range(size)]
    found: list = [[] for _ in copies]
    for step in torch.randn(2, 2, 16, 3, generator=torch.Generator().manual_seed(0)):
        for one in copies[1:]:
            # The forward pass of the first part takes the buffers of replica 0.
            one[1].load_state_dict({**one[1].state_dict(), **dict(copies[0][1].named_buffers())})
        for half in range(2):
            for rank, one in enumerate(copies):
                one(step[half][rank::size]).pow(3).mean().backward()
            for params in zip(*(one.parameters() for one in copies), strict=True):
                mean = sum(param.grad for param in params) / size
                for param in params if half else ():
                    param.grad = mean.clone()
            for one, got in zip(copies, found, strict=True):
                got.append(one[0].weight.grad.clone())
        with torch.no_grad():
            for param in (param for one in copies for param in one.parameters()):
                param -= 0.1 * param.grad
                param.grad = None
    return [(got, one.state_dict()) for got, one in zip(found, copies, strict=True)]


def check_accumulation(found: list) -> None:
    for got, wanted in zip(found, accumulated(len(found)), strict=True):
        # Gradients of a cube through BatchNorm are sums that nearly cancel.
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_ddp_accumulates_without_a_sync_and_takes_buffers_of_the_first(found):
    check_accumulation([one["accumulation"] for one in found])


FOUR = """
import runpy, sys
import torch, torch.distributed as dist
import torch_xla.core.xla_model as xm, torch_xla.runtime as xr
one = runpy.run_path(sys.argv[1])
dist.init_process_group("xla", init_method="xla://")
rank, size, device = xr.global_ordinal(), xr.world_size(), xm.xla_device()
x = torch.arange(8.0, device=device).view(4, 2) * 10**rank
pairs = [[0, 3], [1, 2]]
found = {
    "accumulation": one["accumulation"](rank, size, device),
    "sum": xm.all_reduce("sum", x),
    "pair": xm.all_reduce("sum", x, groups=pairs),
    "part": xm.reduce_scatter("sum", x, 1.0, 0, size),
    "turned": xm.collective_permute(x, [[r, (r + 1) % 4] for r in range(4)]),
}
xm.save(found, f"{sys.argv[2]}/{rank}.pt", master_only=False)
"""


@pytest.mark.slow
def test_four_replicas(tmp_path):
    (tmp_path / "four.py").write_text(FOUR)
    done = run(tmp_path, "four.py", SCRIPT, tmp_path, size=4)
    assert done.returncode == 0, done.stderr
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(4)]
    check_accumulation([one["accumulation"] for one in found])
    x = torch.arange(8.0).view(4, 2)
    for rank, one in enumerate(found):
        assert torch.equal(one["sum"], x * 1111)
        assert torch.equal(one["pair"], x * (1001 if rank in (0, 3) else 110))
        assert torch.equal(one["part"], x[rank : rank + 1] * 1111)
        assert torch.equal(one["turned"], x * 10 ** ((rank - 1) % 4))


def test_a_group_of_torch_distributed_has_the_replicas(found):
    for one in found:
        group = one["group"]
        torch.testing.assert_close(group["sum"], torch.tensor([1.0, 3.0]))
        torch.testing.assert_close(
            group["parts"], [torch.tensor([1.0, 3.0]), torch.tensor([2.0, 6.0])]
        )
        assert group["names"] == ["replica 0", "replica 1"]
        assert group["backend"] == "xla"


FAULTY = """
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp

def main(rank):
    if rank == 1:
        raise ValueError("replica 1 is at fault")
    xm.rendezvous("never met")

xmp.spawn(main)
"""

SAID = {
    "group": r"PortError .*names the replicas \[\[0\], \[1, 2\]\], and there are 2",
    "parts": "PortError .*splits into 4 parts, and a group has 2 replicas",
    "divides": r"PortError .*splits dim 0 of \(3,\) into 2 parts",
    "shapes": r"PortError .*other shapes or dtypes.*\(2,\).*on replica 0.*\(3,\).*on replica 1",
    "order": "PortError .*replica 0 in xm.all_gather and replica 1 in xm.rendezvous",
    "spmd": "UsageError .*run without --replicas",
    "number": "UsageError .*the run has 2 replicas.*--replicas 8",
    "fsdp": "PortError .*xm.optimizer_step",
    "some": r"UsageError .*names the replicas \[0\], and there are 2",
}


def test_wrong_use_is_explained(found):
    wrong = found[0]["wrong"]
    assert wrong.keys() == SAID.keys()
    for name, said in SAID.items():
        assert re.search(said, wrong[name]), wrong[name]


# Below one fails that imports no torch.
@pytest.mark.slow
def test_an_error_ends_all(tmp_path):
    (tmp_path / "faulty.py").write_text(FAULTY)
    done = run(tmp_path, "faulty.py")
    assert done.returncode == 1
    assert "ValueError: replica 1 is at fault" in done.stderr
    assert done.stderr.count("Traceback") == 1
    assert "tpuport run: replica 1 of 2 ended with exit status 1" in done.stderr


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_launcher_around_it_is_refused(monkeypatch, tmp_path, replicas: str):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    (tmp_path / "train.py").write_text("raise AssertionError")
    given = ["run", "--replicas", replicas, str(tmp_path / "train.py")]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 2
    assert re.search(r"rank 1 of 4.*--replicas 4", " ".join(result.output.split()))


# Without torch: what matters here is which processes are left.
WAITS = """
import os, sys, threading, time
rank, size, pipe, folder = os.environ["TPUPORT_REPLICA"].split(":", 3)
def watch():
    os.read(int(pipe), 1)
    os._exit(1)
threading.Thread(target=watch, daemon=True).start()
open(f"{sys.argv[1]}/{rank}.pid", "w").write(str(os.getpid()))
if len(sys.argv) > 2 and rank == "1":
    sys.exit(int(sys.argv[2]))
time.sleep(60)
"""


def pids(folder: Path) -> list[int]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        texts = [path.read_text() for path in sorted(folder.glob("*.pid"))]
        if len(texts) == 2 and all(texts):
            return [int(text) for text in texts]
        time.sleep(0.02)
    raise AssertionError("the replicas did not start")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_failing_replica_ends_the_others(tmp_path, capfd):
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    assert run_replicas(2, [sys.executable, str(script), str(tmp_path), "7"]) == 7
    assert "replica 1 of 2 ended with exit status 7" in capfd.readouterr().err
    assert not any(map(is_alive, map(int, (p.read_text() or 0 for p in tmp_path.glob("*.pid")))))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_replicas_end_with_the_process_that_started_them(tmp_path, number):
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    code = (
        "import sys; from tpuport.compat.emulated.replica_processes import run_replicas;"
        "sys.exit(run_replicas(2, [sys.executable, *sys.argv[1:]]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(script), str(tmp_path)], env=environment
    )
    started = pids(tmp_path)
    parent.send_signal(number)
    assert parent.wait(20) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(map(is_alive, started)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_alive, started))
