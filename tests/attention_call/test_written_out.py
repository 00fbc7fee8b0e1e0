"""Attention that is written out: found in any spelling, equal to eager PyTorch in value and
gradient, and left alone where it is not quite attention.
"""

import linecache
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tpuport
from tests.attention_call.programs import KERNELS, gradient_program, of_scores_size

pytestmark = pytest.mark.filterwarnings(
    "ignore::tpuport.kernels.attention.dispatch.AttentionWarning"
)

B, H, S, D = 2, 2, 24, 4
INF = float("inf")
Form = Callable[..., torch.Tensor]


class Parts:
    """What forms read besides queries, keys and values."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.tril = torch.tril(torch.ones(S, S))
        self.causal = torch.full((S, S), -INF).triu(1)
        self.bias = torch.randn(H, S, S)
        self.pad = torch.zeros(B, S, dtype=torch.bool)
        self.pad[1, -5:] = True
        self.per_head = torch.rand(H, 1, 1) + 0.5
        self.integers = torch.tril(torch.ones(S, S, dtype=torch.long))


def merged(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(B * H, S, D)


def rows(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, sequence, size] as [batch, sequence, heads, size]."""
    return x.transpose(1, 2)


def kt(k: torch.Tensor) -> torch.Tensor:
    return k.transpose(-2, -1)


def by_hand(scores: torch.Tensor) -> torch.Tensor:
    power = torch.exp(scores - scores.amax(-1, keepdim=True))
    return power / power.sum(-1, keepdim=True)


def capped(scores: torch.Tensor) -> torch.Tensor:
    return torch.tanh(scores / 5.0) * 5.0


FOUND: dict[str, Form] = {
    "plain": lambda q, k, v, p: (q @ kt(k)).softmax(-1) @ v,
    "scale after": lambda q, k, v, p: F.softmax(q @ kt(k) * D**-0.5, -1) @ v,
    "scale before": lambda q, k, v, p: F.softmax((q * D**-0.5) @ kt(k), -1) @ v,
    "divided": lambda q, k, v, p: F.softmax(q @ kt(k) / math.sqrt(D), dim=-1) @ v,
    "learned scale before": lambda q, k, v, p: ((q * p.per_head) @ kt(k)).softmax(-1) @ v,
    "einsum": lambda q, k, v, p: torch.einsum(
        "bhqk,bhkd->bqhd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v
    ).transpose(1, 2),
    "einsum of rows": lambda q, k, v, p: rows(
        torch.einsum(
            "bhqk,bkhd->bqhd",
            torch.einsum("bqhd,bkhd->bhqk", rows(q), rows(k)).softmax(-1),
            rows(v),
        )
    ),
    "bmm": lambda q, k, v, p: torch.bmm(
        torch.bmm(merged(q), kt(merged(k))).softmax(-1), merged(v)
    ).view(B, H, S, D),
    "baddbmm": lambda q, k, v, p: (
        torch.baddbmm(
            p.bias.repeat(B, 1, 1), merged(q), kt(merged(k)), beta=1.0, alpha=0.5
        ).softmax(-1)
        @ merged(v)
    ).view(B, H, S, D),
    "bias": lambda q, k, v, p: (q @ kt(k) + p.bias).softmax(-1) @ v,
    "bias first": lambda q, k, v, p: (p.bias + q @ kt(k)).softmax(-1) @ v,
    "bias, then scale": lambda q, k, v, p: ((q @ kt(k) + p.bias) * 0.5).softmax(-1) @ v,
    "less a bias": lambda q, k, v, p: (q @ kt(k) - p.bias).softmax(-1) @ v,
    "added causal": lambda q, k, v, p: (q @ kt(k) + p.causal).softmax(-1) @ v,
    "filled": lambda q, k, v, p: (q @ kt(k)).masked_fill(p.tril[:S, :S] == 0, -INF).softmax(-1) @ v,
    "filled, -1e9": lambda q, k, v, p: (q @ kt(k)).masked_fill(p.tril == 0, -1e9).softmax(-1) @ v,
    "where": lambda q, k, v, p: (
        torch.where(p.tril.bool(), q @ kt(k), torch.finfo(q.dtype).min).softmax(-1) @ v
    ),
    "padding": lambda q, k, v, p: (
        (q @ kt(k)).masked_fill(p.pad[:, None, None], -INF).softmax(-1) @ v
    ),
    "padding, -1e4": lambda q, k, v, p: (
        (q @ kt(k)).masked_fill(p.pad[:, None, None], -1e4).softmax(-1) @ v
    ),
    "padding, added": lambda q, k, v, p: (
        (q @ kt(k) + p.pad[:, None, None] * torch.finfo(q.dtype).min).softmax(-1) @ v
    ),
    "bias, padding, -1e4": lambda q, k, v, p: (
        (q @ kt(k) + p.bias).masked_fill(p.pad[:, None, None], -1e4).softmax(-1) @ v
    ),
    "bias, causal, -1": lambda q, k, v, p: (
        torch.where(p.tril.bool(), q @ kt(k) * 0.5 + p.bias, -1.0).softmax(-1) @ v
    ),
    "added causal, padding, lowest": lambda q, k, v, p: (
        (q @ kt(k) + p.causal)
        .masked_fill(p.pad[:, None, None], torch.finfo(q.dtype).min)
        .softmax(-1)
        @ v
    ),
    "padding and causal": lambda q, k, v, p: (
        ((q @ kt(k)) + p.causal).masked_fill(p.pad[:, None, None], -INF).softmax(-1) @ v
    ),
    "of merged heads": lambda q, k, v, p: (
        (
            (
                (merged(q) @ kt(merged(k))).view(B, H, S, S).masked_fill(p.pad[:, None, None], -INF)
            ).view(B * H, S, S)
        )
        .softmax(-1)
        .view(B, H, S, S)
        @ v
    ),
    "capped": lambda q, k, v, p: capped(q @ kt(k) * 0.7).softmax(-1) @ v,
    "float32 and back": lambda q, k, v, p: (
        (q @ kt(k)).softmax(-1, dtype=torch.float32).to(q.dtype) @ v
    ),
    "by hand": lambda q, k, v, p: by_hand(q @ kt(k)) @ v,
    "of keys first": lambda q, k, v, p: kt(k @ kt(q)).softmax(-1) @ v,
    # A product of a batch of one drops its dim.
    "a batch of one": lambda q, k, v, p: torch.cat(
        [(q[i : i + 1] @ kt(k[i : i + 1])).softmax(-1) @ v[i : i + 1] for i in range(B)]
    ),
    "a batch of one, biased": lambda q, k, v, p: torch.cat(
        [
            torch.einsum(
                "bhqk,bhkd->bhqd", (q[i:][:1] @ kt(k[i:][:1]) + p.bias).softmax(-1), v[i:][:1]
            )
            for i in range(B)
        ]
    ),
    "values first": lambda q, k, v, p: kt(kt(v) @ kt((q @ kt(k)).softmax(-1))),
}


class Attends(torch.nn.Module):
    """Each form, of its own queries, keys and values."""

    def __init__(self, forms: dict[str, Form]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.forms = forms
        self.parts = Parts()
        for name, value in vars(self.parts).items():
            self.register_buffer(f"part_{name}", value)
        self.qkv = torch.nn.Parameter(torch.randn(len(forms), 3, 1, H, 1, D))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for name in vars(self.parts):
            setattr(self.parts, name, getattr(self, f"part_{name}"))
        made = zip(self.forms.items(), self.qkv, strict=True)
        return {name: form(*(x * w).unbind(), self.parts) for (name, form), w in made}


def inputs() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(3, B, H, S, D)


def total(out: Any) -> Any:
    weights = np.random.default_rng(0).normal(size=(B, H, S, D)).astype("float32")
    return sum(
        (one * (weights if hasattr(one, "at") else torch.tensor(weights))).sum()
        for one in out.values()
    )


def compared(model: torch.nn.Module, x: torch.Tensor, kernel: str) -> tpuport.PortedModel:
    """Check values and gradients against eager PyTorch, NaN included."""
    out = model(x)
    grads = torch.autograd.grad(total(out), list(model.parameters()))
    with tpuport.attention_options(**KERNELS[kernel]):
        ported = tpuport.convert(model, verify=False)
        for name, one in ported(x).items():
            wanted = out[name].detach().numpy()
            np.testing.assert_allclose(tpuport.to_numpy(one), wanted, 1e-4, 1e-5, err_msg=name)

        def loss(params: Any) -> Any:
            return total(ported.apply(params, ported.buffers, jax.random.key(0), x)[0])

        found = jax.jit(jax.grad(loss))(ported.params)
    for (name, _), wanted in zip(model.named_parameters(), grads, strict=True):
        np.testing.assert_allclose(found[name], wanted.numpy(), 2e-4, 1e-4, err_msg=name)
    return ported


def test_forms_are_found():
    model, x = Attends(FOUND), inputs()
    ported = compared(model, x, "blockwise")
    left = {(a.line, a.reason) for a in ported.report.attention if a.kernel == "full"}
    assert left == set()
    # Two forms are two attentions, one for each example.
    assert sum(a.calls for a in ported.report.attention) == len(FOUND) + 2


NOT_FOUND: dict[str, Form] = {
    "over another dim": lambda q, k, v, p: (q @ kt(k)).softmax(-2) @ v,
    "over heads": lambda q, k, v, p: (q @ kt(k)).softmax(1) @ v,
    "values by another dim": lambda q, k, v, p: kt((q @ kt(k)).softmax(-1)) @ v,
    "masked after": lambda q, k, v, p: ((q @ kt(k)).softmax(-1) * p.tril) @ v,
    "filled after": lambda q, k, v, p: (q @ kt(k)).softmax(-1).masked_fill(p.tril == 0, 0) @ v,
    "talking heads": lambda q, k, v, p: (
        torch.einsum("bhqk,hg->bgqk", q @ kt(k), p.bias[:, :H, 0]).softmax(-1) @ v
    ),
    "a sum of two": lambda q, k, v, p: (
        ((q @ kt(k)).softmax(-1) - 0.5 * (k @ kt(q)).softmax(-1)) @ v
    ),
    "of two products": lambda q, k, v, p: (q @ kt(k) + v @ kt(k)).softmax(-1) @ v,
    "of a square": lambda q, k, v, p: (q @ kt(k)).square().softmax(-1) @ v,
    "integer mask times": lambda q, k, v, p: ((q @ kt(k)) * p.integers).softmax(-1) @ v,
    "negative scale": lambda q, k, v, p: (q @ kt(k) * -0.5).softmax(-1) @ v,
    "learned scale after": lambda q, k, v, p: (q @ kt(k) * p.per_head).softmax(-1) @ v,
    "detached scores": lambda q, k, v, p: (q @ kt(k)).detach().softmax(-1) @ v,
    "detached weights": lambda q, k, v, p: (q @ kt(k)).softmax(-1).detach() @ v,
    "rows of another": lambda q, k, v, p: (
        (lambda s: torch.exp(s - s.amax(-1, keepdim=True)) / torch.exp(s).sum(-1, keepdim=True))(
            q @ kt(k)
        )
        @ v
    ),
    "normalised by columns": lambda q, k, v, p: (
        (lambda e: e / e.sum(-1)[:, :, None, :])(torch.exp(q @ kt(k))) @ v
    ),
    "softmax twice": lambda q, k, v, p: (q @ kt(k)).softmax(-1).softmax(-1) @ v,
    "read twice": lambda q, k, v, p: (lambda w: w @ v + (w @ k).square())((q @ kt(k)).softmax(-1)),
    "averaged": lambda q, k, v, p: (lambda w: w @ v + w.mean((1, 3))[:, None, :, None])(
        (q @ kt(k)).softmax(-1)
    ),
    "scores read": lambda q, k, v, p: (lambda s: s.softmax(-1) @ v + s.mean(-1, keepdim=True))(
        q @ kt(k)
    ),
    "mask of the scores": lambda q, k, v, p: (
        lambda s: s.masked_fill(s < s.mean(-1, keepdim=True), -INF).softmax(-1) @ v
    )(q @ kt(k)),
}


def test_near_misses_stay():
    ported = compared(Attends(NOT_FOUND), inputs(), "blockwise")
    assert {a.kernel for a in ported.report.attention} == {"full"}


def never(p: Parts) -> torch.Tensor:
    """True where no query of the second example sees any key."""
    return torch.tensor([False, True])[:, None, None, None].expand(B, 1, 1, S) | p.pad[0, 0]


HIDDEN_ROWS: dict[str, Form] = {
    "filled": lambda q, k, v, p: (q @ kt(k)).masked_fill(never(p), -INF).softmax(-1) @ v,
    "added": lambda q, k, v, p: (
        (q @ kt(k) + torch.zeros(B, 1, 1, S).masked_fill(never(p), -INF)).softmax(-1) @ v
    ),
    "bias, -1e9": lambda q, k, v, p: (
        (q @ kt(k) + p.bias).masked_fill(never(p), -1e9).softmax(-1) @ v
    ),
    # Only the last query of the second example sees nothing at all: others see what is filled.
    "added, and a finite fill": lambda q, k, v, p: (
        (q @ kt(k) + torch.zeros(B, 1, 1, S).masked_fill(never(p), -INF))
        .masked_fill(p.tril == 0, -1e4)
        .softmax(-1)
        @ v
    ),
    "plus infinity, and a finite fill": lambda q, k, v, p: (
        (q @ kt(k) + torch.zeros(B, 1, 1, S).masked_fill(never(p), INF))
        .masked_fill(p.tril == 0, -1e4)
        .softmax(-1)
        @ v
    ),
    "-1e9": lambda q, k, v, p: (q @ kt(k)).masked_fill(never(p), -1e9).softmax(-1) @ v,
    "lowest": lambda q, k, v, p: (
        (q @ kt(k)).masked_fill(never(p), torch.finfo(q.dtype).min).softmax(-1) @ v
    ),
    "lowest, added": lambda q, k, v, p: (
        (q @ kt(k) + never(p) * torch.finfo(q.dtype).min).softmax(-1) @ v
    ),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_see_nothing(kernel: str):
    ported = compared(Attends(HIDDEN_ROWS), inputs(), kernel)
    assert "full" not in {a.kernel for a in ported.report.attention}


PRODUCTS: list[Form] = [
    lambda q, k: q @ kt(k),
    lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k),
    lambda q, k: torch.bmm(merged(q), kt(merged(k))).view(B, H, S, S),
    lambda q, k: kt(torch.matmul(k, kt(q))),
    lambda q, k: torch.einsum("bihd,bjhd->bhij", rows(q), rows(k)),
]
CHANGES: list[Form] = [
    lambda s, p: s * 0.3,
    lambda s, p: s / 1.7,
    lambda s, p: s + p.bias,
    lambda s, p: s - p.bias[:1],
    lambda s, p: p.causal + s,
    lambda s, p: s.masked_fill(p.tril == 0, -INF),
    lambda s, p: torch.where(p.integers.bool(), s, -INF),
    lambda s, p: s.masked_fill(p.pad[:, None, None], -INF),
    lambda s, p: s.to(torch.float32),
    lambda s, p: s.reshape(B * H, S, S).reshape(B, H, S, S),
]
SOFTMAXES: list[Form] = [
    lambda s: s.softmax(-1),
    lambda s: F.softmax(s, dim=3, dtype=torch.float32).type_as(s),
    by_hand,
]
LAST: list[Form] = [
    lambda w, v: w @ v,
    lambda w, v: torch.einsum("bhij,bhjd->bhid", w, v),
    lambda w, v: torch.bmm(w.flatten(0, 1), merged(v)).unflatten(0, (B, H)),
    lambda w, v: torch.einsum("bhij,bjhd->bihd", w, rows(v)).transpose(1, 2),
]


def random_form(rng: Any) -> Form:
    first, softmax, last = (some[rng.integers(len(some))] for some in (PRODUCTS, SOFTMAXES, LAST))
    changes = [CHANGES[i] for i in rng.integers(len(CHANGES), size=rng.integers(5))]

    def form(q: Any, k: Any, v: Any, parts: Parts) -> torch.Tensor:
        scores = first(q, k)
        for change in changes:
            scores = change(scores, parts)
        return last(softmax(scores), v)

    return form


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 9))]
)
def test_random_forms(seed: int):
    rng = np.random.default_rng(seed)
    ported = compared(Attends({str(n): random_form(rng) for n in range(12)}), inputs(), "blockwise")
    assert "full" not in {a.kernel for a in ported.report.attention}


class Layers(torch.nn.Module):
    """Layers that are alike, with a mask that they share."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return self.layers(x, src_key_padding_mask=pad)


@pytest.mark.parametrize("blocks", ["unroll", "scan"])
def test_repeated_layers(blocks: Any):
    model, x, pad = Layers(), torch.randn(B, 40, 8), torch.zeros(B, 40, dtype=torch.bool)
    pad[1, -9:] = True
    with tpuport.attention_options(**KERNELS["splash"]):
        ported = tpuport.convert(model, verify=False, blocks=blocks)
        ported.verify(x, pad)
        backward = gradient_program(ported, lambda out: out.sum(), x, pad)
    assert ported.report.ok, ported.report
    found = {(call.kernel, call.mask, call.calls) for call in ported.report.attention}
    assert found == {("splash", "padded keys", 3)}
    assert of_scores_size(backward, 40) == []


class Dropped(torch.nn.Module):
    """Attention with dropout of the weights."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.dropout((q @ kt(k)).softmax(-1), 0.25, True) @ v


def test_dropout_of_the_weights():
    q, k = torch.zeros(2, B, H, S, D)
    v = torch.eye(S).expand(B, H, S, S)
    with tpuport.attention_options(**KERNELS["blockwise"]):
        ported = tpuport.convert(Dropped(), verify=False)
        kept = tpuport.to_numpy(ported(q, k, v)) * S
    assert [call.kernel for call in ported.report.attention] == ["blockwise"]
    np.testing.assert_allclose(np.unique(kept.round(4)), [0, 1.3333], rtol=1e-4)
    assert 0.7 < (kept > 0).mean() < 0.8
    with tpuport.attention_options(kernel="blockwise"):
        ported.verify(q, k, v)
    assert ported.report.ok, ported.report


class Returned(torch.nn.Module):
    """Attention that returns its weights, or their mean over heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x)


def test_returned_weights_are_computed():
    with tpuport.attention_options(interpret=True):
        ported = tpuport.convert(Returned())
        ported(torch.randn(B, 40, 8))
    (call,) = ported.report.attention
    assert call.kernel == "full"
    assert "reads the weights, too" in call.reason
    assert call.file == __file__
    assert "self.attention(x, x, x)" in linecache.getline(call.file, call.line)


def test_bfloat16_is_closer_to_float64():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, H, 64, 16).to(torch.bfloat16)
    exact = (4 * q.double() @ kt(k.double())).softmax(-1) @ v.double()
    written = lambda q, k, v: (4 * q @ kt(k)).softmax(-1) @ v  # noqa: E731
    with tpuport.attention_options(**KERNELS["blockwise"]):
        ported = tpuport.convert(written, verify=False)
        ours = torch.from_numpy(tpuport.to_numpy(ported(q, k, v)).astype("float64"))
    assert [call.kernel for call in ported.report.attention] == ["blockwise"]
    assert (ours - exact).abs().max() <= (written(q, k, v).double() - exact).abs().max()
