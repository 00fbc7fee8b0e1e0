"""Random loops that append to lists, over a range or rows, for the judge of whole programs."""

import random

from benchmarks.whole_programs import loops
from benchmarks.whole_programs.programs import HOSTILE, Call, Node, Program

_HEADS = (
    *("t in range(7)", "t in range(1, 8)", "t in range(0, 12, 2)", "t in reversed(range(6))"),
    *("t in range(6, -1, -1)", "t in range(n + 5)", "t, row in enumerate(r[:7])"),
    *("t, row in enumerate(r[:6].unbind(0), 1)", "t, (row, col) in enumerate(zip(r[:7], r[2:]))"),
    *("t, row in enumerate(r.split(2))", "t, row in zip(range(7), r.chunk(5))"),
    *("t, row in enumerate((r * 2).unbind(1), 1)", "t, row in enumerate((r * 8).long()[:6])"),
    *("t, row in zip(range(7), r.bfloat16())", "t, row in enumerate(r.detach()[:7])"),
    *("t, row in enumerate(x.unbind(-1))", "t, row in enumerate(torch.split(r[:6], 1), start=2)"),
)
_STATES = (
    "h = torch.tanh(self.lin(h) + x)", "h = h * 0.5 + x[:, :1]", "h = torch.where(h > 0, h, x)",
    "h = h + r[t % 3] if False else h + r[t]", "h = self.norm(h) + t", "h, g = g, h * 0.5",
    "h = h * 0.9; g = g + h.mean()", "h = h.clone(); h[0] = h[0] * 0.5", "h.mul_(0.5)",
    "h = h * r[t].sum()", "n = n + 2; h = h * 0.5 + n", "h = h if t < 2 else h * 0.5",
    "if t % 2 == 0:\n    h = h * 0.5", "if h.sum() > 0:\n    h = h * 0.5\nelse:\n    h = h - 1",
    "s = s + h.sum()", "h = F.relu(h)", "h = h.detach() if t == 0 else h", "g = h * r[-t - 1]",
    "with torch.no_grad():\n    g = g + h", "self.count += 1", "self.total += 1",
    "h = self.bn(h + x)", "d['h'] = h", "h = h * outs[-1].mean() if outs else h", "prev = h",
    "q = h * 2", "g = h", "h = scan(h, t)", "self.cache = h * 2",
    "for u in range(2):\n    h = h * 0.9", "r = r * 0.5", "h = h[:, [1, 0, 2, 3]]",
    "k = (k + 1) % 3", "h = h + self.emb(k)[: len(h)]", "h = h + len(outs)",
    "s = s * 0.5 if m[0] else s + 1", "x = x * 1.0", "h = h.t().t()",
)  # fmt: skip
_ITEMS = (
    "outs.append(h)", "outs.append(h * 2)", "outs.append(h.unsqueeze(1))", "outs.append(h[0])",
    "outs.append(h.sum())", "outs.append((h, s))", "outs.append(t)", "outs.append(t * 2 + 1)",
    "outs.append({'h': h * 1, 't': t})", "outs.append(h.detach())", "outs.append(x[:, 0])",
    "outs.append(h.argmax(-1))", "outs.append(h > 0)", "outs += [h]", "outs.extend([h, g * 2])",
    "if t % 2 == 0:\n    outs.append(h)",
    "if m[0]:\n    outs.append(h)\nelse:\n    outs.append(g * 1)",
    "outs.append(h); more.append(h)", "more.append(g + 1); outs.append(s)", "outs.insert(0, h)",
    "outs.append(h.t())", "outs.append(n)", "self.history.append(t)",
    "d.setdefault('l', []).append(h * 1)", "outs.append(h.to(torch.bfloat16))", "outs.append(g)",
    "outs.append(None); more.append(h * 3)", "outs.append(h.clone())", "outs.append(k)",
    "outs.append(h); outs.append(h * 2)", "outs.append(r)",
    "h = outs[t] + h if len(outs) > t else h; outs.append(h)", "outs.append(h if m[1] else g)",
    "append(h * 2)", "outs.append([h * 1, [s]])", "outs.append(h.view(-1))",
    "outs.append(h[:, 1:])",
)  # fmt: skip
_AFTER = (
    "h = h * 2", "h.mul_(2)", "outs[-1].mul_(2) if torch.is_tensor(outs[-1]) else None",
    "outs[0].add_(1) if torch.is_tensor(outs[0]) else None", "g.add_(1)", "outs.reverse()",
    "outs = outs[::2]", "x.mul_(2)", "outs.pop()", "more = more + outs", "a = a + 1",
    "h[0] = 7.0", "outs = [o * 2 if torch.is_tensor(o) else o for o in outs]",
    "n = n + len(outs)",
)  # fmt: skip
_JOINED = (
    "torch.stack([o for o in outs if torch.is_tensor(o)])", "torch.stack(outs, 1)",
    "torch.cat(outs, 0)", "torch.cat(outs, -1)", "torch.stack(more, dim=-1)",
    "torch.stack(outs[1:])", "torch.stack([h, *outs])", "torch.cat([*outs, h, *outs])",
    "sum(outs)", "torch.stack(outs[::-1])", "torch.stack(outs[:-1], 1)",
    "torch.stack([h, *outs[2:]], 1)",
)  # fmt: skip


def program(seed: int) -> Program:
    """Return a module with one random loop, and what it is called with."""
    draw = random.Random(seed)
    head = draw.choice(_HEADS)
    body = draw.sample(_STATES, draw.choice((1, 1, 2, 2, 3)))
    body += draw.sample(_ITEMS, draw.choice((1, 1, 1, 2)))
    if "row" in head:
        body += draw.sample(loops.USES, draw.choice((1, 1, 2)))
    if draw.random() < 0.3:
        draw.shuffle(body)
    if draw.random() < 0.07:
        body.append(
            draw.choice(
                ("if h.sum() > 30:\n    break", "if t > 4:\n    break", "if m[1]:\n    continue")
            )
        )
    lines = [
        "r = torch.arange(40.0).view(10, 4) * 0.05 + x.mean()",
        draw.choice(("h = torch.zeros_like(x)", "h = x * 1", "h = self.lin(x)", "h = x")),
        "g, prev, q = y * 1, None, None",
        draw.choice(("outs, more = [], []", "outs, more = [], []", "outs, more = [x * 3], []")),
        "d, append = {}, outs.append",
        "e, view, table = x[:1] * 1, None, d",
        "def scan(h, t):\n    return h * 0.5 + r[t]",
        f"for {head}:\n" + "\n".join("    " + line for one in body for line in one.split("\n")),
        *draw.sample(_AFTER, draw.choice((0, 0, 1, 2))),
    ]
    if draw.random() < 0.6:
        tried = f"try:\n    a = {draw.choice(_JOINED)}"
        lines.append(f"{tried}\nexcept (TypeError, RuntimeError, IndexError):\n    a = None")
    end = "return a, b, e, h, g, r, s, n, outs, more, d, prev, q"
    kinds = [draw.choice(("ordinary", "ordinary", *HOSTILE)) for _ in range(2)]
    start = ["a = self.lin(x)", "b, s, n = y.clone(), y.mean(), 1"]
    nodes = [[Node("statement", text) for text in part] for part in (start, lines)]
    calls = [Call(kind, draw.randrange(10**6)) for kind in kinds]
    return Program(seed, *nodes, end, calls, draw.random() < 0.5, draw.random() < 0.1)
