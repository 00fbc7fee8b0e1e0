"""Random loops that make tensors longer, fill tensors row by row, or append to lists."""

import contextlib
import random
from collections.abc import Iterator
from unittest import mock

from benchmarks.whole_programs.programs import HOSTILE, Call, Node, Program
from tpuport.tracing.control_flow import loop_sources
from tpuport.tracing.core import loop_sites
from tpuport.tracing.dispatch import dispatch

# Over numbers, rows or parts; `t` is the number of the round.
_FOR = (
    "for t in range(5):", "for t in range(1, 6):", "for t in range(0, 10, 2):",
    "for t in range(6):", "for t in reversed(range(5)):", "for t in range(5, 0, -1):",
    "for t in range(n + 4):", "for t in range(len(x) + 2):", "for t, row in enumerate(r[:5]):",
    "for t, row in enumerate(x):", "for t, (row, col) in enumerate(zip(x, y)):",
    "for row in r[:5]:", "for _ in range(5):", "for t, row in zip(range(5), r):",
    "for t, row in enumerate(r[:5], 1):", "for row in r.unbind(0):", "for row in x.unbind(1):",
    "for row in torch.unbind(r[:6], dim=0):", "for t, row in enumerate(r.t().unbind(-1)):",
    "for row in r.split(2):", "for row in r.split(5):", "for row in torch.split(r, 3, dim=0):",
    "for row in r.chunk(4):", "for t, row in enumerate(r.chunk(6), start=2):",
    "for row in y.chunk(4, dim=1):", "for row, t in zip(r.unbind(0), range(2, 8)):",
    "for row, col in zip(r[:6], r.flip(0).unbind(0)):", "for row in r:", "for row in h.unbind(1):",
    "for t, (row, col) in enumerate(zip(r.split(2), r[1:]), 1):", "for row in k.repeat(3):",
    "for row, col in zip(r.split(1), flat):", "for row in out[1]:", "for row in flat.view(6, 2):",
)  # fmt: skip
# With what is last in their body.
_WHILE = (
    ("while len(h) < 9:", ""), ("while t > 0:", "t -= 1"), ("while t < 9:", "t += 2"),
    ("while h.size(0) < 12 and t < 20:", "t += 1"), ("while len(outs) < 5:", "outs.append(t)"),
    ("while s < 9 and t < 8:", "s = s + 1.5; t += 1"),
    ("while True:", "t += 1\nif t > 7:\n    break"),
)  # fmt: skip
# One new row each.
_ROWS = (
    "h[-1:]", "h[:1]", "h.mean(0, keepdim=True)", "h.amax(0, keepdim=True)", "r[t : t + 1]",
    "h[h.shape[0] - 1].unsqueeze(0)", "h.flip(0)[:1]", "h[-2:].mean(0, keepdim=True)",
    "torch.softmax(h[-1:] @ h.T, -1) @ h", "h.cumsum(0)[-1:] * 0.25", "h.sort(0).values[-1:]",
    "h.var(0, keepdim=True)", "torch.where(h > 0, h, -h).sum(0, keepdim=True).clamp(-2, 2)",
    "(h[-1:] if h.shape[0] <= 6 else h[-6:].mean(0, keepdim=True))", "self.lin(h)[-1:]",
    "self.block(h[-1:])", "self.norm(h[-1:])", "h[h.size(0) // 2 :][:1]", "x[-1:] + t", "g[-1:]",
    "F.scaled_dot_product_attention(h[None, -1:], h[None], h[None])[0]", "self.emb(k[:1])",
    "h[[-1]]", "h[k[:1]]", "h.narrow(0, len(h) - 1, 1)", "h[torch.arange(len(h)) == len(h) - 1]",
    "h.argmax(0, keepdim=True) * 0.5", "h.logsumexp(0, keepdim=True)", "h.tril()[-1:]",
    "h.roll(1, 0)[:1]", "h[m[0].long()][None]", "h.view(-1, 2, 2).flatten(1)[-1:]",
    "(h @ self.weight)[-1:, None].expand(1, 4)", "h.chunk(2)[0][:1]",
    "F.pad(h, (0, 0, 1, 0))[-1:]",
)  # fmt: skip
_WRAPS = (
    "torch.tanh({})", "({}) * 0.5", "({}) * 0.5 + n", "({} + s).tanh()", "self.lin({})", "{}",
    "({}) / (t + 1)", "F.silu({})", "({}).relu()", "({}) + len(h) * 0.125", "({}).clone()",
)  # fmt: skip
# What makes a tensor longer by the new row `e`.
_GROW = (
    "h = torch.cat([h, e])", "h = torch.cat([h, e], dim=0)", "h = torch.cat((h, e), 0)",
    "h = torch.cat([e, h])", "h = torch.cat([h, e, e * 2])", "h = torch.vstack([h, e])",
    "h = torch.cat([h, h[-1:], e])", "h, g = torch.cat([h, e]), torch.cat([g, e * 0.5])",
    "w = torch.cat([w, w[:, -1:] * 0.5], 1)", "g = torch.cat([g, e, g[:1]])",
    "h = torch.cat([h, e]); w = torch.cat([w, w.sum(1, keepdim=True) * 0.25], dim=-1)",
    "v = torch.cat([v, e.sum(-1)])", "h = torch.cat([h, e]); v = torch.cat([v, v[-1:] + 1])",
    "past = e if past is None else torch.cat([past, e])", "h = torch.cat([h, e]).contiguous()",
    "h = torch.cat([h[1:], e])", "ids = torch.cat([ids, h.argmax()[None] % 4])",
    "h = cache.add(e)", "cache.add(e); h = h + cache.k.mean(0)",
    "table['k'] = torch.cat([table['k'], e])", "caches = [torch.cat([c, e]) for c in caches]",
    "h = F.pad(h, (0, 0, 0, 1))",
    "for j, c in enumerate(caches):\n    caches[j] = torch.cat([c, e])\n    e = e + c[:1]",
    "self.cache = e if self.cache is None else torch.cat([self.cache, e])",
    "h = torch.cat([h, e.expand(2, 4)])", "h = torch.cat([h, h.new_zeros(1, 4)])", "p = p + (e,)",
    "h = torch.stack([*h, e[0]])", "x = torch.cat([x, e])",
)  # fmt: skip
_WRITE = (
    "out[:, t] = e", "out[t] = e[0]", "out[t, :2] = e[0, :2]", "out[:, t] += e",
    "out[-t - 1] = e[0]", "out[t].copy_(e[0])", "out[t : t + 1] = e",
    "out.select(1, t).fill_(1.5)", "out[:, t, 0] = s", "out[t] = out[t - 1] * 0.5 + e[0]",
    "out[t % 3, 1] = e[0]", "flat[t] = e.sum()", "out[0] = e[0]", "flat[t] = flat[:t].sum() + 1",
    "out[:, t].add_(e[0])", "mask[:, t] = e[0, 0] > 0", "out *= 0.5",
    "out.index_copy_(0, torch.tensor([t]), out[:1] + e)", "out[k, t] = e",
    "out[m.nonzero()[:, 0], t] = 1.0", "out[:, : t + 1] += e[:, None]", "view[t] = e[0]",
    "h = h.clone(); h[-1] = e[0]", "h.mul_(0.5)", "torch.add(out, e, out=out)",
    "out = out.index_fill(0, k, 0.5)", "self.total += e[0]", "self.total[t % 4] = s", "y[:1] = e",
    "out[:, len(h) % 5] = e", "g[-1] = e[0]", "cache.k = e * 2",
    "out[:, t] = out[:, t - 1] + e; view = out[:, 0]", "out.data[t] = e[0]", "out[t].zero_()",
)  # fmt: skip
_LIST = (
    "outs.append(e)", "outs.append(e * 2)", "outs.append(e[0])", "outs.append(h.sum())",
    "outs += [e]", "outs.append((e, s))", "outs.append(t)", "outs.append({'e': e * 1, 't': t})",
    "outs.append(h)", "outs.extend([e, e * 2])", "if m[0]:\n    outs.append(e)",
    "if t % 2 == 0:\n    outs.append(e)",
    "if e.sum() > 0:\n    outs.append(e)\nelse:\n    outs.append(e * 2)", "cache.rows.append(e)",
    "self.history.append(e)", "table['l'].append(e * 1)", "outs.append(e.argmax())",
    "more.append(e)", "more.append(e * 2); outs.append(e * 3)", "outs.insert(0, e)",
    "outs[-1:] = [e]", "rows[t % 2].append(e)", "outs.append(outs[-1] + e if outs else e)",
    "put(e * 2)", "cache.push(e)", "outs.append(out[t])", "outs.append([e * 1, [s]])",
    "more.append(h[-1]); outs.append(n)", "if s > 0:\n    more.append(t)", "outs.append(len(h))",
    "outs.append(torch.cat([*outs[-1:], e])[-1:])", "p = (*p, e)",
    "if len(outs) < 3:\n    outs.append(e)", "outs.append(e)\nif len(outs) > 2:\n    outs.pop(0)",
    "e = e + sum(outs[-2:]); outs.append(e)", "outs.append(e.detach())", "self.seen[t] = e.sum()",
    "table[t] = e", "more.append(w[:, -1])",
)  # fmt: skip
_MORE = (
    "n += 1", "n = n + 2", "s = s * 0.5 + h.mean()", "prev = h", "h = h * 0.5",
    "e = e + prev[:1] if prev is not None else e", "if s > 0:\n    e = e * 0.5",
    "if n > 3:\n    s = s + 1", "for u in range(2):\n    e = e * 0.5 + u",
    "e = torch.where(e > 0, e, e * 0.25)", "self.count += 1", "e = e * self.count",
    "n = n * 2 % 7", "for u in range(3):\n    h = torch.cat([h, h[-1:] * 0.5])",
    "if t == 0:\n    h = h * 2", "continue_ = t > 2", "e = e.detach()",
    "with torch.no_grad():\n    s = s + e.sum()", "s, prev = e.sum(), s",
    "e = e + out.sum() * 0.125", "if t == 1:\n    continue",
    "e = e + (past[-1:] if past is not None else 0)", "h, g = g, h", "b = b + len(h)",
    "e = self.counted(e)", "self.noted(e)", "if (e > 1).any():\n    e = e - 1", "e = step(e, t)",
    "self.last = t", "for u, c in enumerate(caches):\n    e = e + c[-1:] * u",
    "q = e if q is None else q + e", "s = float(t)", "assert len(h) < 99",
    "e = e + row if row is not None else e", "e = e.to(torch.float64).float()", "self.cache = e",
    "e = checkpoint(self.block, e, use_reentrant=False)", "e = Scaled.apply(e)", "x = x * 0.5",
    "d = len(h); e = e * d",
    "try:\n    e = e + outs[t]\nexcept (IndexError, TypeError, RuntimeError):\n    e = e * 0.5",
)  # fmt: skip
# What is done with the row of a round.
USES = (
    *("e = e + row.sum()", "e = e * 0.5 + row.mean()", "s = s + row.sum()", "s = s * row.amax()"),
    *("e = e + row.flatten()[:1]", "more.append(row.sum())", "outs.append(row * 2)", "prev = row"),
    "outs.append(row)", "row = row * 2; e = e + row.mean()", "row.mul_(0.5)", "row[..., :1] = 0.5",
    "r[-1] += 1; e = e + row.sum()", "r.mul_(0.5); s = row.sum()", "r = r * 0.5; s = row.sum()",
    "e = e if row is prev else e + row.sum()", "e = e + row.detach().sum()", "self.cache = row",
    "e = e + row.sum() * row.stride(0)", "e = e + row.storage_offset() * 0.1", "view = row",
    "table['row'] = row", "e = e + row.clone().mul_(2).sum()", "outs.append(row.clone())",
    "if row.sum() > 1:\n    e = e * 0.5", "row = row.clone(); row += 1; e = e + row.mean()",
    "with torch.no_grad():\n    row.add_(1)", "e = e + row.new_ones(()) * row.sum()",
    "outs.append(row.unsqueeze(0))", "e = e + (row.sum() if t != 2 else 0)",
    "if t == 3:\n    row.zero_()", "e = e + row.sum() * row.requires_grad",
    "e = e + (row.sum() if prev is None else prev.sum()); prev = row * 1",
    "try:\n    row += 1\nexcept RuntimeError:\n    e = e + row.sum()",
    "if row.sum() < 0:\n    continue", "h = h + row.mean(); e = e + row.sum()",
    "e = e + row.as_strided((1,), (1,))",
)  # fmt: skip
_ENDS = (
    "s > 0.25", "(e > 0.25).all()", "e.sum() > 0 and n > 1", "not (e < 0.25).any()", "len(h) > 7",
    "n > 6", "e.abs().max().item() < 0.25", "m[t % 3]", "t > 3", "h[-1].sum() > 1 or t > 4",
    "len(outs) > 3", "m.all()",
    "row is not None and row.sum() > 2",
)  # fmt: skip
_AFTER = (
    "h = h * 2", "h.mul_(2)", "outs[-1].mul_(2) if outs and torch.is_tensor(outs[-1]) else None",
    "g.add_(1)", "outs[0].add_(1) if outs and torch.is_tensor(outs[0]) else None", "out[0] += 1",
    "view.mul_(2)", "h[0] = 7.0", "n = n + len(outs)", "x.mul_(2)", "h = h[n:]", "h = h.view(-1)",
    "h = h[:, None] + h[None]", "out = out + len(h)", "h = torch.cat([h, x])", "h = h[-3:]",
    "s = s + h.shape[0] * n", "h = self.lin(h)", "h = h.softmax(0)",
    "try:\n    a = torch.stack(outs)\nexcept (TypeError, RuntimeError):\n    a = None",
    "try:\n    a = torch.cat(outs, 0)\nexcept (TypeError, RuntimeError, ValueError):\n    a = None",
    "a = torch.stack(more, 1) if more and torch.is_tensor(more[0]) else a", "cache.k = None",
    "e = prev", "r.mul_(2)", "s = s + row.sum() if row is not None else s",
)  # fmt: skip
_START = (
    "a, e, row, t = self.lin(x), None, None, {t}", "b, s, n = y.clone(), y.mean(), 1",
    "r = torch.arange(48.0).view(12, 4) * 0.125 + x[0, 0]",
    "g, prev, past, q, p = y * 1, None, None, None, ()", "h = {h}",
    "outs, more, rows = {outs}, [], [[], []]", "v, w, ids = y[0] * 1, x[:, :2] * 1, k * 1",
    "out, flat, mask = {out}, torch.zeros(12), torch.zeros(12, 12, dtype=torch.bool)",
    "view = out[0]", "cache, put = Cache(), outs.append",
    "table, caches = {{'k': x, 'l': []}}, [x, y * 2]",
    "def step(e, t):\n    return e * 0.5 + r[t]",
)  # fmt: skip
_FIRST = ("x * 1", "x", "self.lin(x)", "y", "x[:1]")
_FULL = (
    "torch.zeros(12, 12, 4)", "x.new_zeros(12, 12, 4)", "self.weight.expand(12, 12, 4).clone()",
    "torch.empty(12, 12, 4).fill_(0.5)",
)  # fmt: skip
_RETURN = (
    "return (a, b, e, h, g, v, w, s, n, p, q, ids, out, flat, mask, view, outs, more, rows, past,\n"
    "        prev if prev is not h else None, r, cache.k, cache.rows, table, caches{t})"
)


def program(seed: int) -> Program:
    """Return a module with one random loop, and what it is called with."""
    draw = random.Random(seed)
    last: list[str] = []
    if draw.random() < 0.7:
        head = draw.choice(_FOR)
    else:
        head, *last = draw.choice(_WHILE)
    row = draw.choice(_WRAPS).format(draw.choice(_ROWS))
    if draw.random() < 0.2:
        row += " + " + draw.choice(_WRAPS).format(draw.choice(_ROWS))
    does = [_GROW] if draw.random() < 0.6 else []
    does += [_WRITE] if draw.random() < 0.3 else []
    does += [_LIST] if draw.random() < 0.35 or not does else []
    body = [draw.choice(one) for one in does] + draw.sample(_MORE, draw.choice((0, 0, 1, 1, 2)))
    if "row" in head and draw.random() < 0.8:
        body += draw.sample(USES, draw.choice((1, 1, 2)))
    if draw.random() < 0.4:
        draw.shuffle(body)
    else:
        body.reverse()
    body = [f"e = {row}", *body]
    if draw.random() < 0.2:
        end = f"if {draw.choice(_ENDS)}:\n    break"
        body.insert(len(body) if draw.random() < 0.7 else draw.randrange(1, len(body) + 1), end)
    if draw.random() < 0.06:
        kept = [one for one in body if "continue" not in one]
        body = ["with torch.no_grad():", *("    " + _inner(one) for one in kept)]
    lines = [f"{head}", *("    " + _inner(one) for one in (*body, *filter(None, last)))]
    filled = {
        "t": draw.choice((1, 5, 6)),
        "h": draw.choice(_FIRST) if draw.random() < 0.98 else "x[:0]",
        "outs": draw.choice(("[]", "[]", "[]", "[y[:1]]")),
        "out": draw.choice(_FULL),
    }
    start = [one.format(**filled) for one in _START]
    after = draw.sample(_AFTER, draw.choice((0, 0, 0, 1, 1, 2)))
    end = _RETURN.format(t=", t" if draw.random() < 0.05 else "")
    kinds = ["ordinary", draw.choice(("ordinary", "ordinary", *HOSTILE))]
    parts = start, ["\n".join(lines), *after]
    first, rest = ([Node("statement", text) for text in part] for part in parts)
    calls = [Call(kind, draw.randrange(10**6)) for kind in kinds]
    return Program(seed, first, rest, end, calls, draw.random() < 0.5, draw.random() < 0.05)


def _inner(text: str) -> str:
    return text.replace("\n", "\n    ")


@contextlib.contextmanager
def rolled(*, short: bool = True) -> Iterator[None]:
    """Make loops of few rounds one program, too, if they are `short`."""
    with contextlib.ExitStack() as stack:
        if short:
            stack.enter_context(mock.patch.object(loop_sites, "_SAMPLES", 1))
            stack.enter_context(mock.patch.object(dispatch, "OPS_APART", 1))
            stack.enter_context(mock.patch.object(loop_sources, "_MANY_ROUNDS", 4))
        yield
