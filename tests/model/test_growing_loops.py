"""Loops over a range that make tensors longer: one program, equal to eager PyTorch."""

import copy
import importlib.util

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tests.model import growing_programs
from tpuport.tracing.control_flow import growing_loop


class Causal(nn.Module):
    """A tiny language model of one block, with positions, a causal mask and a window."""

    def __init__(self, window: int = 8, fused: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(window, 8)
        self.qkv, self.head, self.window, self.fused = (
            nn.Linear(8, 24),
            nn.Linear(8, 11),
            window,
            fused,
        )
        self.register_buffer("bias", torch.tril(torch.ones(1, 1, window, window)))

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        b, t = idx.size()
        x = self.tokens(idx) + self.places(torch.arange(0, t).unsqueeze(0))
        q, k, v = (y.view(b, t, 2, 4).transpose(1, 2) for y in self.qkv(x).split(8, dim=2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * 0.5
            att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            y = F.softmax(att, dim=-1) @ v
        return self.head(x + y.transpose(1, 2).contiguous().view(b, t, 8))

    @torch.no_grad()
    def generate(self, idx, n, sample=False):
        for _ in range(n):
            seen = idx if idx.size(1) <= self.window else idx[:, -self.window :]
            logits = self(seen)[:, -1, :] / 0.8
            values, _ = torch.topk(logits, 5)
            logits[logits < values[:, [-1]]] = -float("inf")
            probs = F.softmax(logits, dim=-1)
            if sample:
                found = torch.multinomial(probs, num_samples=1)
            else:
                _, found = torch.topk(probs, k=1, dim=-1)
            idx = torch.cat((idx, found), dim=1)
        return idx


def scans(ported) -> list[str]:
    return [line for line in str(ported.report).splitlines() if "with growing tensors" in line]


@pytest.mark.parametrize("fused", [True, False])
def test_generate_is_one_program_equal_to_eager(fused):
    torch.manual_seed(0)
    model = Causal(fused=fused).eval()
    ported = tpuport.convert(model, methods=("forward", "generate"))
    for n, rows in ((5, 3), (14, 2), (14, 2)):  # inside the window, and past it
        idx = torch.randint(0, 11, (2, rows))
        assert torch.equal(tpuport.to_torch(ported.generate(idx, n)), model.generate(idx, n))
    assert scans(ported)


def test_draws_are_those_of_the_unrolled_loop(monkeypatch):
    torch.manual_seed(0)
    model, idx = Causal().eval(), torch.randint(0, 11, (3, 2))

    def drawn():
        ported = tpuport.convert(model, methods=("generate",))

        @jax.jit  # op by op it is 313 programs
        def run(params, buffers, key):
            return ported.apply(params, buffers, key, idx, 12, True, method="generate")[0]

        return tpuport.to_torch(run(ported.params, ported.buffers, jax.random.key(3)))

    scanned = drawn()
    monkeypatch.setattr(growing_loop, "_FEWEST_ROUNDS", 99)
    assert torch.equal(scanned, drawn())


class Loops(nn.Module):
    """Hand-made loops; `scanned` are those that become one program."""

    scanned = (
        *("two", "rows", "indexed", "counted", "cached", "softened", "wide", "nested"),
        *("noted", "first", "past_is_none", "attribute", "items", "until", "ended"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0
        self.kept = None

    def two(self, x):
        k, v = x, x[:, :2] * 2
        for _ in range(6):
            step = torch.tanh(self.lin(k[-1:]))
            k = torch.cat([k, step], 0)
            v = torch.cat([v, step[:, :2] + v.mean(0, keepdim=True)], dim=0)
        return k, v

    def rows(self, x):
        for _ in range(5):
            x = torch.cat([x, torch.tanh(self.lin(x[-2:] + x.sum(0)))])
        return x

    def indexed(self, x):
        for i in range(1, 6):
            x = torch.cat([x, torch.tanh(x[-1:] * i + x[i : i + 1] + x[-i - 2])])
        return x

    def past(self, x):
        for i in range(2, 12, 2):  # a slice past the end gives no row
            x = torch.cat([x, torch.tanh(x[-1:] * i + x[i - 2 : i - 1])])
        return x

    def counted(self, x):
        n, total = 0, x.sum()
        for _ in range(5):
            n += 2
            total = total * 0.5 + x.mean() * n
            x = torch.cat([x, (x.amax(0, keepdim=True) + n + x.shape[0]) * 0.1])
        return x, n, total

    def cached(self, x):
        caches = [x, x * 2]
        for _ in range(5):
            q = caches[0][-1:]
            att = torch.softmax(q @ caches[0].T, -1) @ caches[1]
            caches = [torch.cat([caches[0], att]), torch.cat([caches[1], q - att])]
        return caches

    def softened(self, x):
        for _ in range(5):
            x = torch.cat([x, torch.log_softmax(self.lin(x), 0)[-1:], x.std(0, keepdim=True)], 0)
        return x

    def wide(self, x):
        for _ in range(4):
            x = torch.cat([x, (x.cumsum(1)[:, -1:] * 0.3).sin()], dim=1)
        return x

    def nested(self, x):
        for i in range(4):
            y = x[-1:]
            for _ in range(2):
                y = torch.tanh(self.lin(y)) + i
            x = torch.cat([y, x], 0)
        return x

    def prepended(self, x):
        for _ in range(5):
            x = torch.cat([torch.tanh(self.lin(x[:1])), x])
        return x

    def doubled(self, x):
        for _ in range(4):
            x = torch.cat([x, x * 0.5])
        return x

    def listed(self, x):
        found = []
        for _ in range(5):
            x = torch.cat([x, x[-1:] * 0.9])
            found.append(x.sum())
        return x, torch.stack(found)

    def iterated(self, x):
        numbers = iter([1.0, 2.0, 3.0, 4.0, 5.0])
        for _ in range(5):
            x = torch.cat([x, x[-1:] * next(numbers)])
        return x

    def closed(self, x):
        count = 0

        def tick():
            nonlocal count
            count += 1
            return count

        for _ in range(5):
            x = torch.cat([x, x[-1:] * tick()])
        return x

    def noted(self, x):
        self.calls = 0
        for _ in range(5):
            self.calls += 1
            x = torch.cat([x, x[-1:] * self.calls])
        return x

    def normed(self, x):
        for _ in range(5):
            x = torch.cat([x, self.norm(x)[-1:]])
        return x

    def aliased(self, x):
        last = x
        for _ in range(5):
            x = torch.cat([x, x[-1:] * 0.9])
            last = x[-1:]
        last += 1
        return x, last

    def written(self, x):
        y = start = x.clone()
        for _ in range(5):
            y += 1
            y = torch.cat([y, y[-1:] * 0.9])
        return y, start

    def large(self, x):
        n = 2**40
        for _ in range(5):
            n += 2**33
            x = torch.cat([x, x[-1:] * 0.9])
        return x, n

    def first(self, x):
        for i in range(5):
            if i == 0:
                x = x * 2
            x = torch.cat([x, x[-1:] * 0.9])
        return x


class MoreLoops(Loops):
    """Loops whose state is not only in their variables, or whose rounds are not counted."""

    def past_is_none(self, x):
        past, y = None, x
        for _ in range(5):
            past = y if past is None else torch.cat([past, y])
            y = torch.softmax(y[-1:] @ past.T, -1) @ past
        return y, past

    def attribute(self, x):
        self.kept = None
        for _ in range(5):
            self.remember(x[-1:])
            x = torch.cat([x, torch.tanh(self.kept.mean(0, keepdim=True))])
        return x, self.kept

    def remember(self, x):
        y = self.lin(x)
        self.kept = y if self.kept is None else torch.cat([self.kept, y])

    def items(self, x):
        caches, table = [(x, x * 2), (x * 3, x)], {"rows": x}
        y = x[-1:]
        for _ in range(5):
            for j, (k, v) in enumerate(caches):
                caches[j] = k, v = torch.cat([k, y]), torch.cat([v, y.tanh()])
                y = torch.softmax(y @ k.T, -1) @ v
            table["rows"] = torch.cat([table["rows"], y])
        return y, caches, table

    def until(self, x):
        n = 1
        while x.size(0) < 9 and n < 40:
            n += 2
            x = torch.cat([x, torch.tanh(self.lin(x[-1:]) * n)])
        return x, n

    def ended(self, x, low=-0.1):
        n, y = 0, x
        with torch.no_grad():
            for i in range(1, 12):
                n += 1
                y = torch.cat([y, torch.sin(y[-1:] * i + y.mean(0, keepdim=True))])
                if y[-1].sum() < low and i > 1:
                    break
        return y, n, y.shape[0]

    def ended_before(self, x):
        for _ in range(20):
            y = torch.sin(x[-1:] * 2)
            if y.sum() < -9:
                break
            x = torch.cat([x, y])
        return x


NO_LOOPS = ("remember", "ended_before")
MEMBERS = {**vars(Loops), **vars(MoreLoops)}
LOOPS = [n for n, v in MEMBERS.items() if callable(v) and n[0] != "_" and n not in NO_LOOPS]


@pytest.mark.parametrize("name", LOOPS)
def test_loop_equals_eager(name):
    torch.manual_seed(1)
    model = MoreLoops()
    ported = tpuport.convert(model, methods=tuple(LOOPS))
    for seed in (0, 1):
        torch.manual_seed(seed)
        x = torch.randn(3, 4)
        theirs = tpuport.to_torch(getattr(ported, name)(x))
        torch.testing.assert_close(theirs, getattr(model, name)(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        tpuport.to_torch(ported.buffers["norm.running_mean"]), model.norm.running_mean
    )
    if name in Loops.scanned:
        assert scans(ported), str(ported.report)


def test_a_loop_ends_where_eager_ends():
    torch.manual_seed(1)
    model = MoreLoops()
    ported = tpuport.convert(model, methods=("ended",))
    rounds = set()
    for seed in range(6):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        y, n, size = ported.ended(x)
        want = model.ended(x)
        torch.testing.assert_close(tpuport.to_torch(y), want[0])
        assert (n, size) == want[1:]
        rounds.add(n)
    assert len(rounds) > 2
    assert not ported.report.retraces


def test_an_end_before_the_tensor_grows_is_refused_at_its_line():
    ported = tpuport.convert(MoreLoops(), methods=("ended_before",))
    with pytest.raises(tpuport.PortError, match=r"(?s)TPU101.*if y.sum\(\) < -9:"):
        ported.ended_before(torch.randn(3, 4))


def check_program(seed, folder):
    """Compare a random loop with eager PyTorch, and return whether it is one scan."""
    path = folder / f"growing_{seed}.py"
    path.write_text(growing_programs.program(seed), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    torch.manual_seed(seed)
    model = made.M()
    with torch.set_grad_enabled(seed % 3 == 0):
        eager = copy.deepcopy(model)
        try:
            ported = tpuport.convert(model, methods=("go",), verify=False)
            for _ in range(3):
                x = torch.randn(3, 4)
                given, theirs = x.clone(), x.clone()
                got, want = tpuport.to_torch(ported.go(given)), eager.go(theirs)
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4, equal_nan=True)
                torch.testing.assert_close(given, theirs)
        except tpuport.PortError:
            return False
    return bool(scans(ported))


def test_random_loops(tmp_path):
    assert [check_program(seed, tmp_path) for seed in (0, 4, 26)] == [True, True, True]


@pytest.mark.slow
def test_many_random_loops(tmp_path):
    assert sum(check_program(seed, tmp_path) for seed in range(1000, 1100)) > 40


def test_gradient_of_a_growing_loop():
    torch.manual_seed(1)
    model, x = MoreLoops(), torch.randn(3, 4)
    for name in ("two", "rows", "softened"):
        ported = tpuport.convert(model, methods=(name,))

        def loss(params, ported=ported, name=name):
            out = ported.apply(params, ported.buffers, None, x, method=name)[0]
            return sum(
                (leaf._elem if hasattr(leaf, "_elem") else leaf).sum()
                for leaf in jax.tree.leaves(out)
            )

        found = jax.jit(jax.grad(loss))(ported.params)
        model.zero_grad()
        out = getattr(model, name)(x)
        sum(part.sum() for part in (out if isinstance(out, (list, tuple)) else [out])).backward()
        for key in ("lin.weight", "lin.bias"):
            expected = model.get_parameter(key).grad
            if expected is not None:
                torch.testing.assert_close(
                    tpuport.to_torch(found[key]), expected, rtol=1e-3, atol=1e-4
                )
        assert " scan[" in str(jax.make_jaxpr(loss)(ported.params))
