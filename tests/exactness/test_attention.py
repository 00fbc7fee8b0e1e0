"""Scaled-dot-product attention gives what PyTorch gives, fully masked rows included, in value and
gradient.

Contents:
    CALLS     boolean and float masks with rows that see nothing, causal with more queries than
              keys, grouped heads, scale, bfloat16, other ranks; nn.MultiheadAttention and encoder
              layers with padded batches
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.exactness.plain_torchax import PlainTorchax
from tests.exactness.scenario import (
    Scenario,
    against_torchax,
    by_tpuport,
    check_calls,
    check_gradients,
    normal,
)

Q, K, V = (normal(2, 4, 5, 8, seed=s) for s in (1, 2, 3))
NAN = "a fully masked row gives NaN"
HIDDEN = torch.ones(2, 1, 5, 5, dtype=torch.bool)
HIDDEN[0, :, :2] = False
HIDDEN[1, :, 4, 1:] = False


def _bias() -> torch.Tensor:
    return torch.zeros(2, 1, 5, 5).masked_fill(~HIDDEN, float("-inf"))


def _attend(**options: Any) -> Any:
    return lambda: lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def _with_mask(make: Any, **options: Any) -> Any:
    """The mask is traced: it is computed from an argument."""
    return lambda: (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=make(m), **options)
    )


def _left_padded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> Any:
    """Causal attention over left-padded prompts, the way generation pads them."""
    size = q.shape[2]
    places = torch.arange(size)
    real = places[None, :] >= (size - lengths)[:, None]
    mask = real[:, None, None, :] & (places[:, None] >= places[None, :])[None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Encoder(nn.Module):
    """A transformer encoder with a padding mask; one sample is all padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padded)


class Weights(nn.Module):
    """nn.MultiheadAttention with its weights, a causal mask, and a row of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            8, 2, batch_first=True, kdim=6, vdim=6, add_bias_kv=True
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor, padded: torch.Tensor) -> Any:
        return self.attention(x, y, y, key_padding_mask=padded, average_attn_weights=False)


PADDED = torch.tensor([[False, False, False, True, True], [False, True, True, True, True]])
ARGS = ((Q, K, V),)
CALLS = [
    Scenario("plain", _attend(), ARGS),
    Scenario("bool_mask", _attend(attn_mask=HIDDEN), ARGS, NAN),
    Scenario("traced_bool_mask", _with_mask(lambda m: m > 0), ((Q, K, V, HIDDEN.float()),), NAN),
    Scenario("float_mask", _attend(attn_mask=_bias()), ARGS, NAN),
    Scenario("traced_float_mask", _with_mask(lambda m: m), ((Q, K, V, _bias()),), NAN),
    Scenario(
        "large_negative_mask", _with_mask(lambda m: m.clamp_min(-3e38)), ((Q, K, V, _bias()),),
    ),
    Scenario("left_padded", lambda: _left_padded, ((Q, K, V, torch.tensor([5, 2])),), NAN),
    Scenario("nothing_visible", _attend(attn_mask=torch.zeros(5, 5, dtype=torch.bool)), ARGS, NAN),
    Scenario("causal", _attend(is_causal=True), ARGS),
    Scenario("causal_more_queries", _attend(is_causal=True), ((Q, K[:, :, :3], V[:, :, :3]),)),
    Scenario("causal_more_keys", _attend(is_causal=True), ((Q[:, :, :3], K, V),)),
    Scenario("causal_one_query", _attend(is_causal=True), ((Q[:, :, :1], K, V),)),
    Scenario("grouped", _attend(enable_gqa=True), ((Q, K[:, :2], V[:, :2]),)),
    Scenario(
        "grouped_causal_masked", _attend(enable_gqa=True, attn_mask=HIDDEN),
        ((Q, K[:, :1], V[:, :1]),), NAN,
    ),
    Scenario("scale", _attend(scale=0.3), ARGS),
    Scenario("rank_3", _attend(), ((Q[0], K[0], V[0]),)),
    Scenario("rank_5", _attend(attn_mask=HIDDEN), ((Q[None], K[None], V[None]),), NAN),
    Scenario("other_value_size", _attend(), ((Q, K, V[..., :3]),)),
    Scenario("mask_per_head", _attend(attn_mask=HIDDEN.expand(2, 4, 5, 5)), ARGS, NAN),
    Scenario("not_contiguous", lambda: lambda q, k, v: F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    ).transpose(1, 2), ARGS),
    Scenario(
        "bfloat16", _attend(attn_mask=HIDDEN),
        ((Q.bfloat16(), K.bfloat16(), V.bfloat16()),), NAN, rtol=4e-2,
    ),
    Scenario("encoder", Encoder, ((normal(2, 5, 8), PADDED),), None, rtol=1e-4),
    Scenario(
        "attention_weights", Weights, ((normal(2, 3, 8), normal(2, 5, 6), PADDED),), None,
        rtol=1e-4,
    ),
    Scenario(
        "softmax_of_hidden_rows",
        lambda: lambda s: torch.softmax(s.masked_fill(s > -9, float("-inf")), -1),
        ((Q,),), grads=False,
    ),
]  # fmt: skip


@pytest.mark.parametrize("scenario", [s for s in CALLS if s.grads], ids=str)
def test_value_and_gradient(scenario):
    check_gradients(scenario, by_tpuport)


@pytest.mark.parametrize("scenario", against_torchax(CALLS))
def test_value_and_gradient_under_plain_torchax(scenario):
    check_gradients(scenario, PlainTorchax)


def test_an_explicit_softmax_of_nothing_is_nan_as_in_eager():
    check_calls(next(s for s in CALLS if s.name == "softmax_of_hidden_rows"), by_tpuport)


def test_encoder_in_evaluation_takes_its_fast_path():
    scenario = Scenario("encoder", Encoder, ((normal(2, 5, 8), PADDED),), train=False, rtol=1e-4)
    with torch.no_grad():
        check_calls(scenario, by_tpuport)
