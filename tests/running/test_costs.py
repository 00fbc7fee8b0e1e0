"""`tpuport run` says at its end what cost time, and which option would help."""

import textwrap
from pathlib import Path

import pytest

from tpuport.compat.runner.run import RunTarget
from tpuport.compat.runner.run import run as run_program


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """Runs a script and returns what is on standard error."""
    monkeypatch.chdir(tmp_path)

    def call(source: str, **options) -> list[str]:
        Path("script.py").write_text(textwrap.dedent(source))
        status = run_program(RunTarget("script.py"), ends_process=False, **options)
        lines = capsys.readouterr().err.splitlines()
        return lines if status == 0 else [f"status {status}"]

    return call


SAMPLER = """
import torch

class Planner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def sample(self, x):
        for _ in range(20):
            x = self.net(x)
        return x

class Kept(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x.cpu().numpy().sum() * x)

planner = Planner().cuda()
for rows in (1, 2, 3):
    with torch.no_grad():
        planner.sample(torch.ones(rows, 2).cuda())
Kept().cuda()(torch.ones(1, 2).cuda())
"""


def test_the_end_names_what_cost_time_and_what_would_help(said):
    lines = said(SAMPLER, eager=["Kept"])
    assert all(line.startswith("tpuport run: ") for line in lines)
    first, retraced, host, looped, saving = (line.partition(": ")[2] for line in lines)
    assert first.startswith("2 ported modules, 2 retraces: ")
    assert retraced == (
        "Linear: 2 retraces, 2 of them for args[0]: float32[2, 2] -> float32[up to 4, 2]"
    )
    assert host == "in eager PyTorch on the CPU: Kept (--eager)"
    assert looped == ("Linear was called 61 times, by Planner.sample: try --program Planner.sample")
    assert "--cache-dir" in saving
    assert "--no-verify" in saving


def test_an_input_that_grows_has_a_way_out(said):
    source = """
    import torch
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()).cuda()
    with torch.no_grad():
        for rows in range(1, 11):
            net(torch.ones(rows, 2).cuda())
    """
    assert any(line.endswith("; --eager Sequential compiles nothing") for line in said(source))
    assert said(source, eager=["Linear"]) == []


def test_the_loop_is_one_program_with_the_option_that_is_named(said):
    lines = said(SAMPLER, eager=["Kept"], methods=["Planner.sample"])
    assert not any("try --program" in line for line in lines)


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("import torch\ntorch.ones(2).cuda()", {}),
        (SAMPLER, {"eager": ["Kept"], "quiet": True}),
    ],
)
def test_nothing_is_said_if_nothing_was_ported_or_none_is_wanted(said, source, options):
    assert said(source, **options) == []


@pytest.mark.filterwarnings("ignore:Outer is not one program")
def test_a_call_that_is_no_program_is_named(said):
    source = """
    import torch

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.inner(torch.from_numpy(x.cpu().numpy()).cuda())

    Outer().cuda()(torch.ones(1, 2).cuda())
    """
    assert "in eager PyTorch on the CPU: Outer, but for its submodules" in str(said(source))


@pytest.mark.filterwarnings("ignore:Outer is not one program")
def test_a_method_that_was_refused_is_not_proposed(said):
    source = """
    import torch

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(20))

        def forward(self, x):
            for layer in self.layers:
                x = torch.from_numpy(layer(x).detach().cpu().numpy()).cuda()
            return x

    Outer().cuda()(torch.ones(1, 2).cuda())
    """
    lines = said(source)
    assert any("but for its submodules" in line for line in lines)
    assert not any("--program" in line for line in lines)


def test_a_loop_is_not_seen_in_single_calls(said):
    source = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 2)

        def step(self, x):
            return self.net(x)

    net = Net().cuda()
    for _ in range(20):
        net.step(torch.ones(1, 2).cuda())
    """
    assert not any("--program" in line for line in said(source))
