"""Dropout of attention's weights in a kernel: the numbers that the matrix of scores has dropped,
in value and gradient, as code writes it; and the draws after it are the same.
"""

from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tests.attention_call.programs import KERNELS, gradient_program, of_scores_size

pytestmark = pytest.mark.filterwarnings(
    "ignore::tpuport.kernels.attention.dispatch.AttentionWarning"
)

B, S, WIDTH, HEADS = 2, 40, 8, 2


def heads(x: torch.Tensor, count: int = HEADS) -> torch.Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class SelfAttention(nn.Module):
    """Projections around an attention; a dropout before and after it draws, too."""

    tril: torch.Tensor

    def __init__(self, kind: str, rate: float = 0.25) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.rate = kind, rate
        self.qkv = nn.Linear(WIDTH, WIDTH + 2 * WIDTH // (2 if kind == "grouped" else 1))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("tril", torch.tril(torch.ones(S, S)))

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        shared = HEADS // 2 if self.kind == "grouped" else HEADS
        q, k, v = self.drop(self.qkv(x)).split(
            [WIDTH, shared * WIDTH // HEADS, shared * WIDTH // HEADS], -1
        )
        q, k, v = heads(q), heads(k, shared), heads(v, shared)
        out = getattr(self, self.kind)(q, k, v, pad[:, None, None])
        return self.drop(out.transpose(1, 2).flatten(2))

    def causal(self, q: Any, k: Any, v: Any, pad: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate, is_causal=True)

    def padded(self, q: Any, k: Any, v: Any, pad: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=~pad, dropout_p=self.rate)

    def grouped(self, q: Any, k: Any, v: Any, pad: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate, enable_gqa=True)

    def by_hand(self, q: Any, k: Any, v: Any, pad: Any) -> Any:
        weights = (q @ k.mT / 2).masked_fill(pad, -1e30).softmax(-1)
        return F.dropout(weights, self.rate, self.training) @ v

    def of_a_buffer(self, q: Any, k: Any, v: Any, pad: Any) -> Any:
        scores = (q @ k.mT).masked_fill(self.tril == 0, float("-inf"))
        return torch.einsum("bhqk,bhkd->bhqd", F.dropout(scores.softmax(-1), self.rate), v)

    def joined(self, q: Any, k: Any, v: Any, pad: Any) -> Any:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        weights = F.dropout(torch.bmm(q, k.mT).softmax(-1), self.rate)
        return torch.bmm(weights, v).unflatten(0, (B, HEADS))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    pad = torch.zeros(B, S, dtype=torch.bool)
    pad[1, -9:] = True
    return torch.randn(B, S, WIDTH), pad


def check(model: nn.Module, *args: torch.Tensor) -> tpuport.PortedModel:
    """Compare outputs and gradients with eager PyTorch, which is given the same numbers."""
    with tpuport.attention_options(**KERNELS["splash"]):
        ported = tpuport.convert(model, verify=False)
        ported.verify(*args)
        backward = gradient_program(ported, lambda out: (out**2).sum(), *args)
    assert ported.report.ok, ported.report
    assert {call.kernel for call in ported.report.attention} == {"flash"}
    scores = {(B, HEADS, S, S), (B * HEADS, S, S)} & {*of_scores_size(backward, S)}
    assert scores == set()
    return ported


@pytest.mark.parametrize("kind", ["causal", "padded", "grouped", "by_hand", "joined"])
def test_a_kernel_drops_what_the_matrix_of_scores_drops(kind: str):
    check(SelfAttention(kind), *inputs())


def test_a_mask_that_is_compared_at_run_time():
    """Both sides of the comparison draw the same numbers."""
    model, args = SelfAttention("of_a_buffer"), inputs()
    with tpuport.attention_options(**KERNELS["splash"]):
        ported = tpuport.convert(model, verify=False)
        ported.verify(*args)
        (call,) = ported.report.attention
        assert call.reason.startswith("if the mask is causal")
        torch.manual_seed(3)
        first = tpuport.to_numpy(ported(*args))
    model.tril[3, 7] = 1  # causal no longer
    with tpuport.attention_options(**KERNELS["splash"]):
        other = tpuport.convert(model, verify=False)
        other.verify(*args)
        torch.manual_seed(3)
        second = tpuport.to_numpy(other(*args))
    assert ported.report.ok
    assert other.report.ok
    # The row that sees a key more differs; the others do by how the kernel and the matrix round.
    same = np.isclose(first, second, atol=1e-6).all((0, 2))
    assert same.sum() >= S - 1


def test_draws_afterwards_and_later_calls_are_the_same():
    model, args = SelfAttention("causal"), inputs()
    found = {}
    for name, options in {"flash": KERNELS["splash"], "full": {"kernel": "full"}}.items():
        with tpuport.attention_options(**options):
            ported = tpuport.convert(model, verify=False)
            torch.manual_seed(5)
            outs = [tpuport.to_numpy(ported(*args)) for _ in range(3)]
            found[name] = outs, torch.get_rng_state()
        assert {call.kernel for call in ported.report.attention} == {name}
    for one, other in zip(found["flash"][0], found["full"][0], strict=True):
        # The kernel sums over the keys in blocks.
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert not np.allclose(found["flash"][0][0], found["flash"][0][1])
    assert torch.equal(found["flash"][1], found["full"][1])


class Attends(nn.Module):
    """`nn.MultiheadAttention` with dropout and padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.25, batch_first=True)

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, key_padding_mask=pad, need_weights=False)[0]


class Encodes(nn.Module):
    """Layers of torch in training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, dropout=0.25, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        return self.layers(x, src_key_padding_mask=pad)


@pytest.mark.parametrize("make", [Attends, Encodes])
def test_layers_of_torch_in_training(make: Any):
    check(make().train(), *inputs())


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (lambda weights: weights.mT, "the weights are changed by mul after the softmax"),
        (
            lambda weights: weights.mT.contiguous(),
            "the weights are transposed before their dropout",
        ),
    ],
    ids=["in memory as before", "copied"],
)
def test_what_is_dropped_in_another_order_keeps_the_matrix(order: Any, reason: str):
    class Transposed(nn.Module):
        """The dropout is of keys by queries."""

        def forward(self, q: Any, k: Any, v: Any) -> Any:
            return F.dropout(order((q @ k.mT).softmax(-1)), 0.25).mT @ v

    q, k, v = torch.randn(3, B, HEADS, S, 4)
    with tpuport.attention_options(**KERNELS["splash"]):
        ported = tpuport.convert(Transposed())
        ported(q, k, v)
    assert ported.report.ok, ported.report
    (call,) = ported.report.attention
    assert (call.kernel, call.reason) == ("full", reason)


def test_all_weights_dropped_are_zeros_as_in_torch():
    q = torch.randn(B, HEADS, S, 4)
    with tpuport.attention_options(**KERNELS["splash"]):
        ported = tpuport.convert(
            lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=1.0), verify=False
        )
        out = tpuport.to_numpy(ported(q))
    assert not out.any()
    assert [call.reason for call in ported.report.attention] == ["dropout of all weights"]


def test_a_call_of_the_pure_function_takes_keys_of_any_kind():
    model, args = SelfAttention("causal"), inputs()
    with tpuport.attention_options(**KERNELS["splash"]):
        ported = tpuport.convert(model, verify=False)
        raw, typed = (
            ported.apply(ported.params, ported.buffers, key, *args)[0]
            for key in (jax.random.key_data(jax.random.key(2)), jax.random.key(2))
        )
    np.testing.assert_array_equal(tpuport.to_numpy(raw), tpuport.to_numpy(typed))
