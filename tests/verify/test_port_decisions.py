"""The decisions of a port's programs, which `tpuport verify` takes over instead of a search.

A number is planted on either side of a kink, where code sees that it is traced: that is rounding. A
fault of the same size or less, planted beside it, is none.
"""

import contextlib
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import tpuport
from tests import planted_kinks
from tests.planted_kinks import is_traced, two_layers, with_fault
from tpuport.cli.app import app
from tpuport.compat.emulated.settings import active
from tpuport.model.parity.decisions import decisions
from tpuport.model.parity.turned import KeptArrays, ToldDecisions
from tpuport.verify import port_decisions, report, rounding
from tpuport.verify.compare import Limits, Recording, numbers
from tpuport.verify.draws import NOTED
from tpuport.verify.left_gradients import LEFT
from tpuport.verify.port_decisions import (
    FOLDER,
    KEPT,
    KeptFiles,
    PortDecisions,
    save_ties,
    stored,
)
from tpuport.verify.processes import FinishedRun, VerifiedScript
from tpuport.verify.recorder import EnoughSteps, StepRecorder

# Makes a module and the loss of one step of its training.
Script = Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]]


pytestmark = pytest.mark.usefixtures("only_new_objects")


class Net(nn.Module):
    """Two layers of which the numbers between are near kinks, and a fault if asked for."""

    def __init__(self, *kinks: tuple[Any, float], fault: str = "", size: float = 1e-8) -> None:
        super().__init__()
        self.first, self.second = two_layers()
        self.kinks, self.fault, self.size = kinks, fault, size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fault = self.fault if is_traced(x) else ""
        h, total = self.first(x), torch.zeros(())
        for row, (function, point) in enumerate(self.kinks):
            near, moved = torch.zeros_like(h), torch.zeros_like(h)
            margin = max(self.size, abs(point) * 2**-23)
            g = h.roll(row, 0)
            near[row, 2] = point + (-margin if is_traced(x) else margin)
            moved[row, 2] = 1.0
            moved[5, 4] = 1.0  # which is zero exactly
            g = g - moved * g.detach() + near
            total = total + with_fault(function, g, fault)
        return self.second(total)


class Images(nn.Module):
    """A window of two numbers that are largest but for rounding, of which either may be."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(2, 3, 3, padding=1), pool
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
                parameter.copy_(values / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv(x)
        moved, near = torch.zeros_like(h), torch.zeros_like(h)
        moved[1, 2, 2, 2:4] = 1.0
        near[1, 2, 2, 2], near[1, 2, 2, 3] = 4.0, 4.0 + (-4e-7 if is_traced(x) else 4e-7) * 2
        return self.pool(h - moved * h.detach() + near)


def training(make: Callable[[], nn.Module], shape: tuple[int, ...] = (16, 12)) -> Script:
    def script() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        net, generator = make().cuda(), torch.Generator().manual_seed(1)

        def loss() -> torch.Tensor:
            return net(torch.randn(*shape, generator=generator).cuda()).square().mean()

        return net, loss

    return script


@contextlib.contextmanager
def around(settings: dict[str, Any]) -> Iterator[None]:
    """Enter what a run has around its script."""
    with contextlib.ExitStack() as stack:
        for name in settings["around"]:
            module, _, function = name.partition(":")
            entered = getattr(importlib.import_module(module), function)(settings)
            stack.enter_context(entered)
        yield


class InThisProcess:
    """Trains a module as `processes.run` runs a script, and counts the runs."""

    def __init__(self, script: Script, steps: int) -> None:
        self.script, self.steps, self.runs = script, steps, 0

    def __call__(
        self, what: Any, side: str, out: Path, settings: Any = None, seconds: Any = None
    ) -> FinishedRun:
        del what, seconds
        self.runs += 1
        folder = out / side
        folder.mkdir()
        (folder / "files").mkdir()
        wanted = {"around": [], "disturbed": side == "disturbed", "optimizers": 0}
        wanted |= {**(settings or {}), "folder": str(folder)}
        recorder = StepRecorder(
            *(folder, "trained", self.steps),
            disturbed=wanted["disturbed"],
            optimizers=wanted["optimizers"],
        )
        with (
            contextlib.suppress(EnoughSteps),
            tpuport.porting(port_modules=side == "ported"),
            around(wanted),
        ):
            self.train(recorder)
        recorder.finish()
        return FinishedRun(folder, 0, seconds=0.1)

    def train(self, recorder: StepRecorder) -> None:
        torch.manual_seed(0)
        net, loss_of = self.script()
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
        while True:
            optimizer.zero_grad()
            loss = loss_of()
            recorder.since_step.append(float(loss.detach()))
            loss.backward()
            recorder.before_step(optimizer)
            optimizer.step()
            recorder.after_step(optimizer)


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Compare a training with its port; return the stages, notes, reason, and number of runs."""

    def verify(script: Script, steps: int = 1) -> Any:
        run, limits = InThisProcess(script, steps), Limits()
        for module in (report, rounding):
            monkeypatch.setattr(module, "run", run)
        what = VerifiedScript(Path("train.py"))
        eager = run(what, "eager", tmp_path)
        ported = run(what, "ported", tmp_path, {"around": [NOTED, LEFT, KEPT]})
        what, eager, settings, _ = report._on_same_numbers(what, eager, ported, tmp_path)
        assert not numbers(Recording(eager.folder), Recording(ported.folder), 1e-4).passed
        before = run.runs
        found = report._compared(what, eager, ported, tmp_path, limits, settings, 600.0)
        return *found, run.runs - before

    return verify


# Two for the first step (in float64, and with the port's decisions), two for all: as the first one,
# and with rounding added.
RUNS = 4
KINKS = {
    **planted_kinks.KINKS,
    "checkpoint": (lambda h: checkpoint(F.relu, h, use_reentrant=False), 0.0),
}


@pytest.mark.parametrize("name", KINKS)
def test_a_decision_that_rounding_turned_is_taken_as_the_port_did(verified, name):
    """Two runs tell the first step: in float64, and with the port's decisions."""
    stages, notes, undecided, runs = verified(training(lambda: Net(KINKS[name])))
    assert stages[1].passed, stages[1].checks
    assert not any(check.is_rounding for check in stages[1].checks)
    assert undecided == ""
    assert runs == RUNS
    assert any("element 2 of" in note and "[16, 32]" in note for note in notes)


@pytest.mark.parametrize(
    "pool",
    [
        lambda h: F.max_pool2d(h, 2),
        lambda h: F.max_pool2d(h, 3, 2, 1),
        lambda h: h.amax((2, 3)),
        lambda h: -(-h).amin((2, 3)),
    ],
)
def test_a_window_has_the_largest_number_that_the_port_has(verified, pool):
    stages, _, undecided, runs = verified(training(lambda: Images(pool), (2, 2, 8, 8)))
    assert stages[1].passed, stages[1].checks
    assert (undecided, runs) == ("", RUNS)


def test_all_of_many_decisions_are_taken(verified):
    """More than a search turns."""
    kinks = [KINKS[name] for name in ("relu", "leaky_relu", "abs", "clamp")] * 4
    assert len(kinks) > rounding._MOST_OPEN
    stages, notes, _, runs = verified(training(lambda: Net(*kinks)))
    assert stages[1].passed, stages[1].checks
    assert runs == RUNS
    assert any(f"and {len(kinks) - 3} more" in note for note in notes)


# What a port may do wrong, by the function that it does it in.
FAULTS = {
    "relu": ["scaled gradient", "mask of the next row", "gradient at zero"],
    "leaky_relu": ["wrong slope"],
    "relu6": ["no upper bound"],
}


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults]
)
def test_a_fault_beside_a_turned_decision_is_found(verified, name, fault):
    stages, notes, undecided, _ = verified(training(lambda: Net(KINKS[name], fault=fault)))
    assert not stages[1].passed
    assert undecided == ""
    # A mask that is none of the function's own tells nothing.
    shown = any("element 2 of" in note and note.endswith("still differ.") for note in notes)
    assert shown is (fault != "no upper bound")
    if fault == "scaled gradient":  # what the kink does is no part of what is shown
        assert 0.5e-3 < stages[1].checks[1].error < 2e-3


@pytest.mark.parametrize("size", [1e-5, 1e-4])
def test_a_number_further_from_a_kink_than_rounding_reaches_is_on_its_side(verified, size):
    stages, notes, undecided, _ = verified(training(lambda: Net(KINKS["relu"], size=size)))
    assert not stages[1].passed
    assert (notes, undecided) == ([], "")


def test_a_script_takes_them_in_all_steps(verified):
    stages, notes, undecided, runs = verified(training(lambda: Net(KINKS["relu"])), 3)
    assert [stage.passed for stage in stages] == [True] * 3, stages[2].checks
    assert (undecided, runs) == ("", RUNS + 3)
    assert len([note for note in notes if "element 2 of relu[16, 32]" in note]) == 2


@pytest.mark.parametrize("fault", ["", "scaled gradient"])
def test_they_are_taken_beside_the_random_numbers_of_the_port(verified, fault):
    """Two programs: the one that draws, and the one that decides."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Dropout(0.25), Net(KINKS["relu"], fault=fault))

    stages, _, undecided, runs = verified(training(net), 2)
    assert stages[1].passed is not bool(fault), stages[1].checks
    assert undecided == ""
    assert fault or runs == RUNS + 3


def later(change: Callable[[Any], None]) -> Script:
    """Train a net that a script changes after its first step."""

    def script() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        net, first_loss = training(lambda: Net(KINKS["relu"]))()
        steps = []

        def loss() -> torch.Tensor:
            if steps:
                change(net)
            steps.append(1)
            return first_loss()

        return net, loss

    return script


def test_further_steps_may_need_none(verified):
    def change(net: Net) -> None:
        net.kinks = ((torch.sin, 0.0),)

    stages, notes, undecided, runs = verified(later(change), 3)
    assert [stage.passed for stage in stages] == [True] * 3, stages[2].checks
    assert (undecided, runs) == ("", RUNS)
    assert len([note for note in notes if "other side of a kink" in note]) == 1


def test_a_fault_in_a_later_step_is_found(verified):
    def change(net: Net) -> None:
        net.fault = "mask of the next row"

    stages, _, undecided, _ = verified(later(change), 3)
    assert [stage.passed for stage in stages] == [True, True, False]
    assert undecided == ""


def test_what_no_program_tells_is_searched_for(verified):
    """A ReLU of the script's own, behind the module."""

    def script() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        net = Net(KINKS["relu"]).cuda()

        def loss() -> torch.Tensor:
            porting = active()
            assert porting is not None
            h = net(torch.randn(16, 12, generator=torch.Generator().manual_seed(1)).cuda())
            moved, near = torch.zeros_like(h), torch.zeros_like(h)
            moved[7, 1], near[7, 1] = 1.0, -1e-8 if porting.port_modules else 1e-8
            return F.relu(h - moved * h.detach() + near).mean()

        return net, loss

    stages, notes, _, runs = verified(script)
    assert stages[1].passed, stages[1].checks
    assert runs > 4
    assert any("element 2 of relu[16, 32]" in note for note in notes)
    assert any("element 29 of relu[16, 4]" in note for note in notes)


@pytest.mark.parametrize(("apart", "told"), [(1e-6, 1), (1e-3, None)])
def test_nothing_is_taken_where_runs_have_drifted_apart(tmp_path, apart, told):
    """One number of a call is open, or a tenth of them: then the port tells nothing."""
    x = torch.linspace(-0.1, 0.1, 2048).reshape(32, 64)
    x[0, 0] = 1e-9
    relu = torch.ops.aten.relu.default
    made = decisions(relu, (x,), {}, lambda tensor: tensor.double())
    assert made is not None
    save_ties(tmp_path, {})
    exact = {"op": str(relu), "shape": [32, 64], "samples": (made.samples + apart).tolist()}
    port = PortDecisions(tmp_path / FOLDER, tmp_path, [exact])
    port._told = ToldDecisions(KeptArrays([jnp.asarray((x > 1e-8).numpy())]))
    taken = port.taken(0, relu, x, made)
    assert (None if taken is None else len(taken.told)) == told
    assert taken is None or taken.turned.tolist() == [0]


def test_kept_arrays_are_written_as_far_as_there_is_room(tmp_path):
    """Masks first, as bits; a call of which nothing fits has no file."""
    mask, numbers = jnp.arange(1000).reshape(10, 100) % 3 == 0, jnp.linspace(0, 1, 1000)
    files = KeptFiles(tmp_path / FOLDER, 2 * 4000)
    for arrays in (
        [mask, numbers, jnp.ones(())],
        [numbers],
        [],
        [numbers.astype(jnp.bfloat16), mask],
    ):
        files.take(arrays)
        files.next()
    files.next()  # of a call that keeps nothing
    found = [stored(tmp_path / FOLDER, number) for number in range(5)]
    assert [[one.shape for one in call] for call in found] == [
        *([(10, 100), (1000,)], [], [], [(10, 100)], []),
    ]
    assert np.array_equal(np.asarray(found[0][0]), np.asarray(mask))
    assert np.array_equal(np.asarray(found[0][1]), np.asarray(numbers))
    assert found[0][0].dtype == np.bool_
    written = sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir())
    assert written < 2 * 4000


def test_a_full_disk_ends_what_is_known(tmp_path, monkeypatch):
    """A file that is there in part says nothing."""

    def full(parts: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    files, mask = KeptFiles(tmp_path / FOLDER), jnp.arange(1000) % 3 == 0
    monkeypatch.setattr(port_decisions, "save_file", full)
    files.take([mask])
    files.next()
    monkeypatch.undo()
    files.take([mask])
    files.next()
    assert list((tmp_path / FOLDER).iterdir()) == []
    assert [stored(tmp_path / FOLDER, number) for number in range(2)] == [[], []]


SCRIPT = """
import torch
from torch import nn
from tpuport.tracing.core.tensor import TracedTensor

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(40, 8), nn.Linear(8, 1)

    def forward(self, x):
        h, traced = self.first(x), isinstance(x, TracedTensor)
        moved, near = torch.zeros_like(h), torch.zeros_like(h)
        moved[3, 2], near[3, 2] = 1.0, -1e-8 if traced else 1e-8
        h = h - moved * h.detach() + near
        return self.second(h.relu() + (FAULT * (h - h.detach()) if traced else 0))

torch.manual_seed(0)
net = Net().cuda()
optimizer = torch.optim.SGD(net.parameters(), 1e-2)
for step in range(3):
    net(torch.randn(16, 40).cuda()).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow  # half a minute; the tests above run the same lines in one process
@pytest.mark.parametrize(("fault", "verdict"), [("0", "equal"), ("1e-3", "differs")])
def test_the_command_takes_them(tmp_path, monkeypatch, fault, verdict):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT.replace("FAULT", fault))
    result = CliRunner().invoke(app, ["verify", "train.py", "--json", "--steps=1"])
    found = json.loads(result.stdout)
    assert found["verdict"] == verdict, found["stages"]
    if verdict == "equal":
        assert any("element 26 of relu[16, 8]" in note for note in found["notes"])
    # What the programs kept is large, and of no use afterwards.
    assert not Path("verify-train", "ported", FOLDER).exists()
