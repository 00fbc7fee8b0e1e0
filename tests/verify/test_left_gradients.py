"""Gradients that a ported run leaves to the comparison of the runs."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tpuport
from tpuport.cli.app import app
from tpuport.foundation.errors import ParityError
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.verify.left_gradients import left_to_comparison

SCRIPT = """
import torch
from torch import nn
from tpuport.tracing.core.tensor import TracedTensor

class Line(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y + 0.01 * (y - y.detach()) if isinstance(x, TracedTensor) else y

torch.manual_seed(0)
net = Line(4, 2).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
net(torch.randn(3, 4).cuda()).square().mean().backward()
optimizer.step()
"""


class Faulty(nn.Linear):
    """A layer of which the traced value or the traced gradient is wrong."""

    def __init__(self, value: float, gradient: float) -> None:
        super().__init__(4, 2)
        self.value, self.slope = value, gradient

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer."""
        y = super().forward(input)
        if not isinstance(input, TracedTensor):
            return y
        return y * (1 + self.value) + self.slope * (y - y.detach())


def first_call(layer: nn.Module) -> None:
    with tpuport.porting():
        layer.cuda()(torch.ones(3, 4).cuda()).sum().backward()


def test_a_first_call_compares_values_only_where_something_else_compares_gradients():
    with left_to_comparison({}):
        first_call(Faulty(0.0, 0.01))
        with pytest.raises(ParityError, match="output differs"):
            first_call(Faulty(0.01, 0.0))
    with pytest.raises(ParityError, match=r"grad\.(bias|weight) differs"):
        first_call(Faulty(0.0, 0.01))


def test_the_comparison_finds_a_wrong_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    result = CliRunner().invoke(app, ["verify", "train.py", "--json", "--steps=1"])
    found = json.loads(result.stdout)
    assert not found["failure"]
    stages = {stage["name"]: stage for stage in found["stages"]}
    losses, gradients = stages["numbers"]["checks"]
    assert not losses["problems"]
    assert any(problem.startswith("weight: ") for problem in gradients["problems"])
    assert found["verdict"] == "differs"
