"""Somebody's repository, what runs of it gave, and a call of the command."""

from typing import Any

from typer.testing import CliRunner

from tpuport.cli.app import app

TRAIN = """
import argparse
import torch
from torch import nn
from net import Net

open("touched", "w").close()
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
args = parser.parse_args()

def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), args.lr)
    for step in range(3):
        loss = net(torch.randn(4, 3).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

if __name__ == "__main__":
    main()
"""
NET = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        if x.sum() > 0:
            x = x * 2
        return self.linear(x)
"""
EQUAL: dict[str, Any] = {
    "failure": "",
    "programs": 1,
    "undecided": "",
    "passed": True,
    "stages": [
        {
            "name": "numbers",
            "passed": True,
            "checks": [
                {"what": "<script>", "count": 1, "error": 1e-7, "worst": "w", "limit": 1e-4}
                | {"passed": True}
            ],
        }
    ],
}


COMPILED = {
    "fits": True,
    "peak": 2**31,
    "model": "Net",
    "what": "training step",
    "memory": {"available": 2**34, "refused": 0},
    "estimate": {"parts": [{"seconds": 0.002}, {"seconds": 0.001}]},
}


def port(*args: Any) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["port", *map(str, args)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output if done.exit_code == 2 else done.stdout
