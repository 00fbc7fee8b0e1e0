"""`tpuport verify`: two runs of a script agree, and every planted difference is found."""

import json
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import tpuport
from tpuport.cli.app import app
from tpuport.verify import report, rounding
from tpuport.verify.compare import (
    Comparison,
    Limits,
    Recording,
    Stage,
    behaviour,
    interface,
    missed_elsewhere,
    numbers,
)
from tpuport.verify.files import compare_files
from tpuport.verify.kinks import Kinks
from tpuport.verify.processes import FinishedRun, VerifiedScript
from tpuport.verify.recorder import StepRecorder

TRAIN = """
import subprocess
import sys
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = self.norm(self.conv(x)).relu().mean(-1)
        if h.mean() > 10:  # a branch on a value
            h = h / 2
        return self.head(h)

torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
net = Net().to(device)
optimizer = torch.optim.AdamW(net.parameters(), float(sys.argv[1]))
for step in range(30):
    x = torch.randn(4, 2, 8).to(device)
    y = torch.randint(0, 3, (4,)).to(device)
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1:
        torch.save(net.state_dict(), "out.pt")
        np.save("out.npy", net.head.weight.detach().cpu().numpy())
        subprocess.run(["touch", "other.pt"])  # as somebody else may, meanwhile
"""
GAN = """
import os
import torch
from torch import nn

generator = nn.Linear(3, 4).cuda()
critic = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).cuda()
optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (critic, generator)]
planted = os.path.exists(MARK) and os.path.getsize(MARK) == 1  # in the second run only
with open(MARK, "a") as mark:
    mark.write("x")
for step in range(3):
    real, z = torch.randn(6, 4).cuda(), torch.randn(6, 3).cuda()
    for index, optimizer in enumerate(optimizers):
        optimizer.zero_grad()
        fake = critic(generator(z)).mean()
        loss = fake - critic(real).mean() if index == 0 else -fake
        (loss * (1.01 if planted and step == 1 else 1)).backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a script that was verified, and the command's result."""
    folder = tmp_path_factory.mktemp("verify")
    (folder / "train.py").write_text(TRAIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # set, nothing would be left
        options = ["--steps=3", "--report=report.html", "--plain"]
        command = ["verify", "train.py", *options, "--", "0.01"]
        return folder, CliRunner().invoke(app, command)


def test_a_script_that_agrees(verified):
    folder, result = verified
    assert result.exit_code == 0, result.output
    assert "differs" not in result.output
    found = json.loads((folder / "verify-train" / "verify.json").read_text())
    assert found["passed"]
    counts = {c["what"]: c["count"] for stage in found["stages"] for c in stage["checks"]}
    assert found["programs"] == 3
    assert counts == {
        "optimizers, parameters": 6,
        "values at the start": 6,
        "losses of step 1": 1,
        "gradients of step 1": 6,
        "losses of all steps": 3,
        "parameters at the end": 6,
        "buffers at the end": 3,
        "optimizers at the end": 18,
        "written files": 2,
    }
    assert "gradients of step 1" in (folder / "report.html").read_text()
    # What the runs wrote is in the folder of the results, and nowhere else.
    there = {path.name for path in folder.iterdir()}
    assert there == {"train.py", "report.html", "verify-train", "other.pt"}
    assert any("not compared: other.pt." in note for note in found["notes"])


def edit_tensors(folder: Path, key: str, change: Any) -> None:
    path = folder / "tensors.safetensors"
    tensors = load_file(path)
    name = next(n for n in tensors if n.startswith(key))
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, path)


def edit_record(folder: Path, change: Any) -> None:
    record = json.loads((folder / "record.json").read_text())
    change(record)
    (folder / "record.json").write_text(json.dumps(record))


def slower(record: dict[str, Any]) -> None:
    record["optimizers"][0]["groups"][0]["lr"] = 0.02


def later_loss(record: dict[str, Any]) -> None:
    record["losses"][2][0] *= 1.1


def first_loss(record: dict[str, Any]) -> None:
    record["losses"][0][0] *= 1.001


def one_more_backward(record: dict[str, Any]) -> None:
    record["losses"][1] *= 2


PLANTED = [
    ("interface", "lr", lambda f: edit_record(f, slower)),
    ("interface", "head.bias", lambda f: edit_tensors(f, "start/0.5", lambda t: t[:2])),
    ("interface", "conv.weight: ", lambda f: edit_tensors(f, "start/0.0", lambda t: t + 1e-3)),
    ("numbers", "step 1: ", lambda f: edit_record(f, first_loss)),
    (
        "numbers",
        "head.weight: 1.0e-03",
        lambda f: edit_tensors(f, "gradient/0.4", lambda t: t * 1.001),
    ),
    ("numbers", "nan", lambda f: edit_tensors(f, "gradient/0.4", lambda t: t * float("nan"))),
    ("behaviour", "step 3: ", lambda f: edit_record(f, later_loss)),
    ("behaviour", "backward() is called 3 times", lambda f: edit_record(f, one_more_backward)),
    ("behaviour", "head.weight: ", lambda f: edit_tensors(f, "end/0.4", lambda t: t + 1e-2)),
    (
        "behaviour",
        "norm.running_var",
        lambda f: edit_tensors(f, "buffer/norm.running_var", lambda t: t * 2),
    ),
    (
        "behaviour",
        "exp_avg",
        lambda f: edit_tensors(f, "state/0.4/head.weight/exp_avg", lambda t: t * 2),
    ),
    (
        "behaviour",
        "out.npy",
        lambda f: np.save(f / "files" / "out.npy", np.ones((3, 4), np.float32)),
    ),
    ("behaviour", "out.pt", lambda f: (f / "files" / "out.pt").unlink()),
]


@pytest.mark.parametrize(("stage", "named", "plant"), PLANTED)
def test_a_planted_difference_is_found(verified, tmp_path, stage, named, plant):
    results = verified[0] / "verify-train"
    shutil.copytree(results / "ported", tmp_path / "ported")
    plant(tmp_path / "ported")
    eager, other = Recording(results / "eager"), Recording(tmp_path / "ported")
    # Compared with itself, eager PyTorch shows how much rounding may do: nothing here.
    stages = {s.name: s for s in (interface(eager, other), numbers(eager, other, 1e-4))}
    stages["behaviour"] = behaviour(eager, other, 1e-3, Recording(results / "disturbed"))
    assert not stages[stage].passed
    assert any(named in problem for c in stages[stage].checks for problem in c.problems)


def test_rounding_of_a_gradient_that_is_zero_is_no_difference(verified):
    """The bias before a batch norm: Adam moves it by the sign of its rounding."""
    results = verified[0] / "verify-train"
    eager, ported = Recording(results / "eager"), Recording(results / "ported")
    assert not behaviour(eager, ported, 1e-3).passed
    assert behaviour(eager, ported, 1e-3, Recording(results / "disturbed")).passed


def test_it_is_none_where_eager_drew_other_numbers_either(verified, monkeypatch):
    results = verified[0] / "verify-train"
    eager, ported, disturbed = (
        FinishedRun(results / side, 0, ()) for side in ("eager", "ported", "disturbed")
    )
    monkeypatch.setattr(rounding, "run", lambda *given, **options: disturbed)
    what = VerifiedScript(Path("train.py"))
    stages, notes, undecided = report._compared(what, eager, ported, results, Limits(), None, 60)
    assert [stage.passed for stage in stages] == [True] * 3
    assert (notes, undecided) == ([], "")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["none.py"], "There is no file none.py"),
        (["fails.py", "--plain"], "fails in eager PyTorch (exit status 1)"),
        (["fails.py", "--out=other"], "other holds other files"),
    ],
)
def test_a_wrong_call(tmp_path, monkeypatch, command, message):
    monkeypatch.chdir(tmp_path)
    Path("fails.py").write_text("raise ValueError('mine')")
    Path("other").mkdir()
    Path("other/precious.txt").write_text("")
    result = CliRunner().invoke(app, ["verify", *command])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert Path("other/precious.txt").exists()
    assert "precious" not in result.output


@pytest.mark.slow  # test_a_planted_difference_is_found compares the same things
def test_a_script_with_two_optimizers_and_a_planted_difference(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    Path("gan.py").write_text(textwrap.dedent(GAN).replace("MARK", repr(str(tmp_path / "mark"))))
    result = CliRunner().invoke(app, ["verify", "gan.py", "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [s["passed"] for s in found["stages"]] == [True, True, False]
    assert "step 3: " in str(found["stages"][2]["checks"][0]["problems"])
    assert "The script ended after 3 steps." in found["notes"]
    result = CliRunner().invoke(app, ["verify", "gan.py", "--json"])
    assert result.exit_code == 0, result.output


def test_a_file_with_a_whole_module_is_compared_without_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Net(torch.nn.Linear):
        pass

    script = types.ModuleType("their_script")
    script.Net = Net  # pyright: ignore[reportAttributeAccessIssue]
    Net.__module__, Net.__qualname__ = "their_script", "Net"
    monkeypatch.setitem(sys.modules, "their_script", script)
    net = Net(2, 3)
    for side, added in (("eager", 0.0), ("ported", 0.25)):
        (tmp_path / side).mkdir()
        with torch.no_grad():
            net.bias.fill_(1.0).add_(added)
        torch.save({"net": net, "step": 3}, tmp_path / side / "model.pt")
    monkeypatch.delitem(sys.modules, "their_script")
    found = compare_files(tmp_path / "eager", tmp_path / "ported")
    assert found.problems == []
    assert found.errors == [("model.pt", pytest.approx(0.25))]
    assert "their_script" not in sys.modules


@pytest.fixture
def verify_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Verify a script whose second run may have a fault: its file MARK says which run it is."""

    def run(name: str, text: str, fault: Any, *options: str) -> Any:
        work = tmp_path / "work"
        work.mkdir()
        monkeypatch.chdir(work)
        text = text.replace("MARK", repr(str(tmp_path / "mark"))).replace("FAULT", repr(fault))
        Path(name).write_text(text)
        result = CliRunner().invoke(app, ["verify", name, "--json", *options])
        return json.loads(result.stdout)

    return run


# One number before the LeakyReLU is nearer to its kink than rounding: in the second run, which
# stands for a port, it is on the other side.
KINK = """
import os
import torch
from torch import nn

if torch.cuda.is_available():  # something is ported
    nn.Linear(2, 2).cuda()(torch.ones(1, 2).cuda())
torch.manual_seed(0)
first, second = nn.Linear(40, 8), nn.Linear(8, 1)
optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 1e-2)
second_run = os.path.exists(MARK) and os.path.getsize(MARK) == 1
with open(MARK, "a") as mark:
    mark.write("x")
for step in range(2):
    h = first(torch.randn(16, 40))
    if step == 0:
        moved, near = torch.zeros_like(h), torch.zeros_like(h)
        moved[3, 2] = h[3, 2].detach()
        near[3, 2] = -1e-8 if second_run else 1e-8
        h = (h - moved) + near
    loss = second(nn.functional.leaky_relu(h, 0.2)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if step == 0 and second_run and FAULT:
        with torch.no_grad():
            first.weight.grad[FAULT] *= 1.05
    optimizer.step()
"""


# It runs the script twice and then with roundings, for half a minute; the test of kinks below is
# near it. Without a fault the same lines run.
@pytest.mark.parametrize(
    "fault",
    [pytest.param(None, marks=pytest.mark.covered), pytest.param(5, marks=pytest.mark.slow)],
)
def test_a_decision_that_rounding_turned_is_no_difference(verify_text, fault):
    """And a true difference of the same size in another row is one, beside it."""
    found = verify_text("kink.py", KINK, fault, "--plain", "--steps=2")
    eager, ported = (Recording(Path("verify-kink") / side) for side in ("eager", "ported"))
    assert not numbers(eager, ported, 1e-4).passed
    assert found["passed"] is (fault is None)
    if fault is None:
        assert any("element 26 of leaky_relu[16, 8]" in note for note in found["notes"])
        assert [path.name for path in Path("verify-kink").iterdir() if path.is_dir()]
    else:
        assert not found["stages"][1]["passed"]
    assert not list(Path("verify-kink").glob("rounding-*"))


KINKS = [
    (torch.relu, 0.0),
    (lambda x: torch.nn.functional.leaky_relu(x, 0.3), 0.0),
    (torch.nn.functional.relu6, 6.0),
    (lambda x: torch.nn.functional.relu6(x * 1, inplace=True), 6.0),
    (lambda x: x.clamp(-0.5, 0.5), 0.5),
    (lambda x: torch.where(x > 0.25, x * 2, x), 0.25),
    (torch.abs, 0.0),
]


@pytest.mark.parametrize(("function", "point"), KINKS)
def test_a_turned_decision_of_a_kink(function, point):
    x = torch.randn(4, 5)
    x[1, 2] = point + 1e-6
    other = x.clone()
    other[1, 2] = point - 1e-6
    want = torch.autograd.functional.jacobian(lambda v: function(v).sum(), other)
    free = torch.autograd.functional.jacobian(lambda v: function(v).sum(), x)
    assert not torch.equal(want, free)

    def turned(value):
        with Kinks({0: [7]}) as mode:
            out = function(value * 1)
        assert [near[0] for near in mode.calls[0]["near"][:1]] == [7]
        return out.sum()

    assert torch.equal(torch.autograd.functional.jacobian(turned, x), want)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.max_pool2d(x, 2),
        lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1),
        lambda x: x.amax((1, 2, 3)),
        lambda x: x.flatten(1).max(1).values,
    ],
)
def test_a_turned_decision_of_a_window(function):
    x = torch.randperm(128).reshape(2, 1, 8, 8).float()
    x[1, 0, 4, 4], x[1, 0, 5, 5] = 200.0, 200.0 + 1e-4
    other = x.clone()
    other[1, 0, 4, 4] = 200.0 + 2e-4
    want = torch.autograd.functional.jacobian(lambda v: function(v).sum(), other)
    with Kinks({}) as mode:
        function(x.clone().requires_grad_())
    position = mode.calls[0]["near"][0][0]

    def turned(value):
        with Kinks({0: [position]}):
            out = function(value * 1)
        return out.sum()

    assert torch.equal(torch.autograd.functional.jacobian(turned, x), want)


# Models that draw in their forward, or in a method that the port is told of, and a script that
# draws beside them. In the second run, the ported one, the noise of one may be another one.
NOISE = """
import os
import torch
from torch import nn

class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.code, self.back = nn.Linear(6, 8), nn.Linear(4, 6)
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        mean, spread = self.code(self.drop(x)).chunk(2, -1)
        noise = torch.randn_like(mean) * (1.05 if second_run and FAULT == "VAE" else 1.0)
        return self.back(mean + noise * (spread / 2).exp()), mean, spread

class DDPM(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6))
        self.register_buffer("kept", torch.linspace(0.99, 0.1, 20).cumprod(0))

    def loss(self, x):
        t = torch.randint(0, 20 - (second_run and FAULT == "DDPM"), (len(x),), device=x.device)
        noise, kept = torch.randn_like(x), self.kept[t][:, None]
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return (self.net(torch.cat([noisy, t[:, None] / 20], 1)) - noise).square().mean()

second_run = os.path.exists(MARK) and os.path.getsize(MARK) == 1
with open(MARK, "a") as mark:
    mark.write("x")
torch.manual_seed(0)
vae, ddpm = VAE().cuda(), DDPM().cuda()
optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (vae, ddpm)]
for step in range(3):
    x = torch.rand(8, 6, device="cuda")
    out, mean, spread = vae(x)
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
    losses = [nn.functional.mse_loss(out, x) + divergence, ddpm.loss(torch.randn(8, 6).cuda())]
    for loss, optimizer in zip(losses, optimizers):
        optimizer.zero_grad()
        loss.backward()
    for optimizer in optimizers:
        optimizer.step()
"""


# Without a fault the same lines run.
@pytest.mark.parametrize(
    "fault", ["", *(pytest.param(name, marks=pytest.mark.slow) for name in ("VAE", "DDPM"))]
)
def test_eager_draws_what_the_programs_of_all_calls_draw(verify_text, fault):
    named = "--run-option=--program=DDPM.loss"
    found = verify_text("noise.py", NOISE, fault, "--steps=3", named)
    assert any("drew the random numbers" in note for note in found["notes"])
    assert found["passed"] is not bool(fault), found["stages"]
    plain, same, ported = (
        Recording(Path("verify-noise") / side) for side in ("eager", "replayed", "ported")
    )
    assert plain.losses != same.losses
    if not fault:
        assert np.allclose(np.array(same.losses[-1]), np.array(ported.losses[-1]), rtol=1e-4)


def test_names_come_from_the_module_that_holds_most(tmp_path) -> None:
    """A module that holds a part of the trained one, as the port has them, names nothing."""
    layers = nn.Linear(2, 2), nn.BatchNorm1d(2)
    agent = nn.ModuleDict({"actor": nn.Sequential(*layers)})
    part = nn.Sequential(*layers)
    recorder = StepRecorder(tmp_path, "trained", 1)
    begun = nn.Linear.__new__(nn.Linear)  # as one is before `super().__init__()`
    recorder.name(torch.optim.SGD(agent.parameters(), 0.1))
    del begun
    assert set(recorder.names.values()) == {name for name, _ in agent.named_parameters()}
    assert recorder.buffers().keys() == dict(agent.named_buffers()).keys()
    assert len(part) == 2


class LossOfALibrary(torch.Tensor):
    """A subclass with no more than a name, as MONAI's MetaTensor is one."""


def test_a_backward_in_a_trace_is_not_recorded(tmp_path) -> None:
    recorder = StepRecorder(tmp_path, "trained", 1)
    backward = recorder.recorded(lambda *_: None)

    class TrainsItself(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            backward(x.sum())
            return x

    tpuport.convert(TrainsItself(), verify=False)(torch.ones(3))
    assert recorder.since_step == []
    backward(torch.ones(3).sum())
    backward(torch.ones(2).as_subclass(LossOfALibrary).sum())
    assert recorder.since_step == [3.0, 2.0]


def test_a_script_that_does_not_use_cuda_is_not_verified(verify_text) -> None:
    text = KINK.replace("torch.cuda.is_available()", "False").replace("1e-8", "1e-3")
    text = text.replace("-1e-3 if second_run else ", "")
    found = verify_text("kink.py", text, None, "--plain", "--steps=2")
    assert [stage["passed"] for stage in found["stages"]] == [True] * 3
    assert (found["passed"], found["programs"]) == (False, 0)
    assert any("Nothing was ported" in note for note in found["notes"])


def test_equality_that_says_nothing_is_no_verdict(capsys) -> None:
    stages = [Stage(name, [Comparison("losses")]) for name in report.STAGES]
    found = report.Verification("t.py", 1, 0, stages, "", [], ".", 1, "every loss is NaN")
    assert (found.verdict, found.passed, found.within) == ("undecided", False, "")
    found.show(Console())
    assert "undecided: every loss is NaN" in capsys.readouterr().out


class FakeRecording(Recording):
    """What a run of one gradient recorded."""

    def __init__(self, *gradients: torch.Tensor) -> None:
        self.gradient, self.losses = gradients[0], [[1.0]]
        self.named = {f"weight {i}": gradient for i, gradient in enumerate(gradients)}

    def part(self, kind: str) -> dict[str, torch.Tensor]:
        """Return the gradients."""
        return self.named


@pytest.mark.parametrize(("apart", "expected"), [(1e-3, 5e-4), (3e-3, None)])
def test_what_eager_misses_in_another_tensor(apart: float, expected: float | None) -> None:
    wide = torch.ones(3, dtype=torch.float64)
    truth = FakeRecording(wide, wide)
    eager = FakeRecording((wide + 1e-7).float(), (wide + 5e-4).float())
    ported = FakeRecording((wide + apart).float(), wide.float())
    for one in (eager, ported):  # the dtypes of a run in float64 are those of the script, too
        one.named = {name: value.double() for name, value in one.named.items()}
    missed = numbers(truth, eager, 1e-4)
    assert not numbers(truth, ported, 1e-4, missed).passed
    found = missed_elsewhere(truth, ported, missed)
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-3))


@pytest.mark.parametrize(
    ("port", "exact", "passed"),
    [
        (-2e-8, 1e-17, True),
        (-2e-8, None, False),
        (1e-4, 1e-17, False),
        (1e-4, 2e-4, False),  # the run in float64 drew other numbers
    ],
)
def test_a_start_that_is_zero_but_for_rounding(
    port: float, exact: float | None, passed: bool
) -> None:
    """As the mean of what is centred, which Glow's ActNorm takes from its first batch."""

    def started(value: float) -> FakeRecording:
        made = FakeRecording(torch.ones(3), torch.full((2,), value))
        made.record = {"optimizers": [], "steps": [], "moved": []}
        return made

    wide = None if exact is None else started(exact)
    assert interface(started(1e-8), started(port), 1e-4, wide).passed is passed


# One statistic of the first batch is zero but for rounding, which the second run takes in another
# order.
START = """
import os
import torch
from torch import nn

if torch.cuda.is_available():  # something is ported
    nn.Linear(2, 2).cuda()(torch.ones(1, 2).cuda())
torch.manual_seed(0)
layer = nn.Linear(40, 8)
optimizer = torch.optim.SGD(layer.parameters(), 1e-2)
second_run = os.path.exists(MARK) and os.path.getsize(MARK) == 1
with open(MARK, "a") as mark:
    mark.write("x")
for step in range(2):
    x = torch.randn(64, 40)
    if step == 0:
        with torch.no_grad():
            centred = layer(x) - layer(x).mean(0)
            rows = centred.flip(0).cumsum(0)[-1] if second_run else centred.sum(0)
            layer.bias.copy_(rows / 64 + (FAULT if second_run else 0.0))
    loss = layer(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


# test_a_start_that_is_zero_but_for_rounding decides by the same numbers.
@pytest.mark.slow
@pytest.mark.parametrize("fault", [0.0, 1e-4])
def test_a_start_that_a_script_computes(verify_text, fault):
    found = verify_text("start.py", START, fault, "--plain", "--steps=2")
    eager, ported = (Recording(Path("verify-start") / side) for side in ("eager", "ported"))
    assert not interface(eager, ported, 1e-4).passed
    assert found["stages"][0]["passed"] is (fault == 0)


@pytest.mark.parametrize(
    ("flipped", "fault", "explained", "undecided"),
    [
        (10, 0.0, True, False),
        (10, 2.0, False, False),
        (20, 0.0, False, True),
        (20, 1e3, False, False),
    ],
)
def test_decisions_that_were_not_turned_may_be_why(
    tmp_path: Path, flipped: int, fault: float, explained: bool, undecided: bool
) -> None:
    """Each moves one number; a fault that all of them together could not make is one."""
    base = torch.zeros(21)
    base[20] = 5.0

    def moved(decisions: Sequence[rounding.OpenDecision]) -> FakeRecording:
        gradient = base.clone()
        gradient[[one.position for one in decisions]] = 1.0
        return FakeRecording(gradient)

    found = [rounding.OpenDecision(0, i, 1, 1e-8, 1e-7, "relu[20]") for i in range(flipped)]
    ported = moved(found)
    ported.gradient[20] += fault

    def compare(reference: Recording) -> Stage:
        check = Comparison("gradients of step 1", limit=1e-4)
        check.add("weight", float((reference.part("")["weight 0"] - ported.gradient).abs().max()))
        return Stage("numbers", [check])

    what = VerifiedScript(tmp_path / "train.py")
    search = rounding.Rounding(
        *(what, tmp_path, FakeRecording(base), ported, Limits(), {}), seconds=60.0, longest=0.0
    )
    result = search._search(FakeRecording(base), found, moved, compare, "gradient")
    assert (result is not None) is explained
    assert bool(search.why_not) is undecided
    if undecided:
        assert "20 decisions are open to it, of which the 12 likeliest" in search.why_not


def test_a_difference_for_which_there_was_no_time_is_neither(verify_text, monkeypatch) -> None:
    monkeypatch.setattr(report, "_LEAST_ROUNDING_S", 0.0)
    monkeypatch.setattr(rounding, "_SLOWER", 0.01)
    found = verify_text("kink.py", KINK, None, "--plain", "--steps=2", "--minutes=0.01")
    assert (found["passed"], found["failure"], found["verdict"]) == (False, "", "undecided")
    assert "would take more than 0 seconds" in found["undecided"]
    assert found["within"].startswith("gradients of step 1 within ")

    what, results = VerifiedScript(Path("kink.py"), plain=True), Path("verify-kink")
    eager, ported = (FinishedRun(results / side, 0, seconds=9.0) for side in ("eager", "ported"))

    def compared(seconds: float) -> str:
        stages, _, why = report._compared(what, eager, ported, results, Limits(), {}, seconds)
        assert not stages[1].passed
        return why

    # A run that has begun is stopped.
    monkeypatch.setattr(rounding, "_SLOWER", 0.0)
    assert "a run of it was stopped" in compared(0.5)
    # What is no matter of size is a difference, whatever the time.
    edit_record(results / "ported", lambda record: record["losses"][0].append(1.0))
    assert compared(0.0) == ""
