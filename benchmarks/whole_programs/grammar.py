"""The grammar of random modules, from fragments.txt, and the text around their statements."""

import re
from pathlib import Path

_TEXT = (Path(__file__).parent / "fragments.txt").read_text(encoding="utf-8")


def _section(name: str) -> str:
    found = re.search(rf"^\[{name}\]\n(.*?)\n*(?=^\[|\Z)", _TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def _statements(name: str) -> tuple[str, ...]:
    return tuple(_section(name).split("\n\n"))


# Expressions by kind. A leaf fills a gap at the greatest depth.
LEAVES = {
    kind: tuple(_section(f"leaves of {kind}").splitlines())
    for kind in re.findall(r"^\[leaves of (.*)\]$", _TEXT, re.MULTILINE)
}
DEEPER = {kind: tuple(_section(kind).splitlines()) for kind in LEAVES if f"\n[{kind}]\n" in _TEXT}
START, RETURNS = tuple(_section("start").splitlines()), _statements("returns")
# Statements: those without a block, those with one, and those that only a loop holds.
SIMPLE, BLOCKS, LEAVING = map(_statements, ("simple", "blocks", "leaving"))

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


class Cache:
    def __init__(self):
        self.k, self.rows = None, []

    def add(self, e):
        self.k = e if self.k is None else torch.cat([self.k, e])
        return self.k

    def push(self, e):
        self.rows.append(e)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.bn = nn.BatchNorm1d(4)
        self.emb = nn.Embedding(4, 4)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("steps", torch.tensor(0))
        self.count, self.scale, self.flag = 0, 0.5, False
        self.history, self.seen = [], {}
        self.cache, self.last, self.best = None, 1, 0.0

    def block(self, x):
        return self.lin(x).relu()

    def counted(self, x):
        self.count += 1
        return x

    def noted(self, x):
        self.total += x.detach().sum()
        return x

"""
FORWARD = """\
    def forward(self, x, y, m, k):
"""
