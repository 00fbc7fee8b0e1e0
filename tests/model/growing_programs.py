"""Random loops that make tensors longer, as the text of a module with one method `go`."""

import random

_HEAD = """import torch
from torch import nn


class Cache:
    def __init__(self):
        self.k = None


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.past, self.calls = nn.Linear(4, 4), None, 0

    def forward(self, x):
        y = torch.tanh(self.lin(x))
        self.past = y if self.past is None else torch.cat([self.past, y], 0)
        return torch.softmax(x[-1:] @ self.past.T, -1) @ self.past


class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.part, self.count = nn.Linear(4, 4), Part(), 0
        self.parts = nn.ModuleList([Part(), Part()])

    def go(self, x):
        n, c, k = 3, x.sum() * 0.01, x * 2
        found, past, table, caches, cache = [], None, {"k": x}, [(x, x * 2)], Cache()
        self.part.past, self.count = None, 0
        for part in self.parts:
            part.past = None
"""
_ROWS = (
    "x[-1:]", "x[:1]", "x.mean(0, keepdim=True)", "x.amax(0, keepdim=True)",
    "x[x.shape[0] - 1].unsqueeze(0)", "x.sum(0, keepdim=True) * 0.1", "x.flip(0)[:1]",
    "torch.softmax(x, 0).sum(0, keepdim=True)", "x[-2:].mean(0, keepdim=True)",
    "torch.softmax(x[-1:] @ x.T, -1) @ x", "x.cumsum(0)[-1:] * 0.1", "x.sort(0).values[-1:]",
    "x.var(0, keepdim=True)", "(x[-1:] if x.shape[0] <= 6 else x[-6:].mean(0, keepdim=True))",
    "torch.where(x > 0, x, -x).sum(0, keepdim=True).clamp(-2, 2)", "self.part(x[-1:])",
    "self.lin(x)[-1:]", "x[x.size(0) // 2 :][:1]", "x.max(0, keepdim=True).values",
)  # fmt: skip
_WRAPS = (
    "torch.tanh({})", "({}) * 0.5", "torch.sin({} + n)", "({} + c).tanh()", "self.lin({})",
    "{} / (n + 1)", "torch.nn.functional.gelu({})", "({}).cos()",
)  # fmt: skip
# Statements that come before the tensor grows: its new row is `y`.
_MORE = (
    ["n += 1"], ["n = n + 2"], ["c = c * 0.5 + x.mean()"],
    ["k = torch.cat([k, y], 0)"], ["k = torch.cat([y, k * 0.9])"],
    ["k = torch.cat([k, k[-1:] * 0.5, y], 0)"],
    ["past = y if past is None else torch.cat([past, y])", "y = y + past.mean(0, keepdim=True)"],
    ["table['k'] = torch.cat([table['k'], y])", "y = y + table['k'].amax(0, keepdim=True) * 0.1"],
    ["for j, (a, b) in enumerate(caches):", "    a = torch.cat([a, y])",
     "    b = torch.cat([b, y * 2])", "    caches[j] = (a, b)",
     "    y = torch.softmax(y @ a.T, -1) @ b"],
    ["caches = [(torch.cat([a, y]), torch.cat([b, y])) for a, b in caches]"],
    ["cache.k = y if cache.k is None else torch.cat([cache.k, y])", "y = y + cache.k[:1]"],
    ["for part in self.parts:", "    y = torch.tanh(y + part(y))"],
    ["self.count += 1", "y = y * self.count * 0.3"],
    ["found.append(x.sum())"], ["found.append(y)"],
    ["if y.sum() > 0:", "    y = y * 0.5"], ["if n > 5:", "    c = c + 1"],
    ["y = torch.cat([y, y * 2])"], ["x = x * 0.9"], ["x = x.clone(); x[0] = x[0] * 0.5"],
    ["y = torch.where(y > 0, y, y * 0.1)"], ["x.mul_(0.9)"], ["prev = x"],
)  # fmt: skip
_ENDS = (
    "c.sum() > 0.05", "(y > 0.3).all()", "y.sum() > 0 and n > 1", "not (y < 0.2).any()",
    "x.shape[0] > 8", "n > 6", "y.abs().max().item() < 0.1",
)  # fmt: skip


def program(seed: int) -> str:
    """Return the text of a module with one random loop."""
    r = random.Random(seed)
    rounds, first = r.randint(4, 8), r.choice((0, 0, 1, 3))
    step = r.choice((1, 1, 1, 2))
    kind = r.random()
    if kind < 0.65:
        head = f"for i in range({first}, {first + rounds * step}, {step}):"
    elif kind < 0.9:
        head = f"while x.size(0) < {3 + rounds}:"
    else:
        head = "while n < 12 and len(x) < 30:"
    body = []
    if head.startswith("for") and r.random() < 0.3:
        body.append(r.choice(("c = c + i", "if i == 0:\n    x = x * 2", "n = n + i % 2")))
    row = r.choice(_WRAPS).format(r.choice(_ROWS))
    if r.random() < 0.3:
        row += " + " + r.choice(_WRAPS).format(r.choice(_ROWS))
    body.append(f"y = {row}")
    for more in r.sample(_MORE, r.choice((0, 1, 1, 2, 3))):
        body += more
    body.append("x = torch.cat([y, x])" if r.random() < 0.1 else "x = torch.cat([x, y], dim=0)")
    if head.startswith("while n"):
        body.append(f"n += {r.choice((1, 2))}")
    if r.random() < 0.1:
        body.append("x = x * 0.9")
    if head.startswith("for") and r.random() < 0.4:
        body.append(f"if {r.choice(_ENDS)}:\n    break")
    lines = [" " * 12 + line for one in body for line in one.split("\n")]
    after = (
        "        kept = [t for t in (past, cache.k, self.part.past, self.parts[0].past)"
        " if t is not None]\n"
        "        return x, k, c, n, list(found), kept, table['k'], caches, self.count\n"
    )
    return _HEAD + " " * 8 + head + "\n" + "\n".join(lines) + "\n" + after
