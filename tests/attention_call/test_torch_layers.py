"""Layers of torch with attention, called as models call them: a kernel for each attention whose
weights nobody reads, equal to eager PyTorch in value and gradient.
"""

from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.attention_call.programs import KERNELS, gradient_program, of_scores_size

B, S, MEMORY, WIDTH, HEADS = 2, 40, 48, 8, 2


def padding(length: int, count: int) -> torch.Tensor:
    pad = torch.zeros(B, length, dtype=torch.bool)
    pad[1, -count:] = True
    return pad


def check(model: nn.Module, served: set[tuple[str, str]], *args: Any) -> None:
    """Compare outputs and gradients with eager, and look at the kernels and what they leave."""
    with tpuport.attention_options(**KERNELS["splash"]):
        ported = tpuport.convert(model, verify=False)
        ported.verify(*args)
        backward = gradient_program(ported, lambda out: (out**2).sum(), *args)
    assert ported.report.ok, ported.report
    assert {(call.kernel, call.mask) for call in ported.report.attention} == served
    # A mask that may hide all of a row is compared, which makes booleans in other shapes.
    scores = {(B, HEADS, S, S), (B * HEADS, S, S)} & {*of_scores_size(backward, S)}
    assert scores == set()


class SelfAttention(nn.Module):
    """Attention to oneself, one for each way to write the mask."""

    def __init__(self, batch_first: bool, need_weights: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.batch_first, self.need_weights = batch_first, need_weights
        self.attentions = nn.ModuleDict(
            {
                kind: nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
                for kind in ("none", "booleans", "numbers", "hint")
            }
        )

    def forward(self, x: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(S)
        masks = {"none": None, "booleans": causal < 0, "numbers": causal, "hint": causal}
        for kind, attention in self.attentions.items():
            out, _ = attention(
                *(x, x, x),
                key_padding_mask=pad,
                attn_mask=masks[kind],
                need_weights=self.need_weights,
                is_causal=kind == "hint",
            )
            x = x + out
        return x


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
@pytest.mark.parametrize("need_weights", [True, False])
# The layout changes transposes around the attention alone: the other two cases run all lines.
@pytest.mark.parametrize("batch_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_multihead_attention(batch_first: bool, need_weights: bool):
    served = {("splash", "padded keys"), ("splash", "causal, padded keys")}
    model = SelfAttention(batch_first, need_weights)
    check(model, served, torch.randn(B, S, WIDTH), padding(S, 7))


class Decodes(nn.Module):
    """A decoder with causal attention, padding of the target and of the memory."""

    def __init__(self, norm_first: bool, hint: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hint = hint
        layer = nn.TransformerDecoderLayer(
            *(WIDTH, HEADS, 12, 0.0), batch_first=True, norm_first=norm_first
        )
        self.decoder = nn.TransformerDecoder(layer, 2)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, *pads: torch.Tensor) -> torch.Tensor:
        return self.decoder(
            *(x, memory),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(S),
            tgt_is_causal=True if self.hint else None,
            tgt_key_padding_mask=pads[0],
            memory_key_padding_mask=pads[1],
        )


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
# The other order of norms, and no hint at a causal mask, run the same lines.
@pytest.mark.parametrize(
    ("norm_first", "hint"),
    [(False, True), *(pytest.param(*one, marks=pytest.mark.slow) for one in [(True, False)])],
)
def test_decoder_layers(norm_first: bool, hint: bool):
    served = {("splash", "padded keys"), ("splash", "causal, padded keys")}
    given = torch.randn(B, S, WIDTH), torch.randn(B, MEMORY, WIDTH)
    check(Decodes(norm_first, hint), served, *given, padding(S, 7), padding(MEMORY, 9))


class Detects(nn.Module):
    """Learned queries that attend to each other and to a picture, with positions added to both
    sides of the scores and not to the values, as a detector does.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries = nn.Embedding(S, WIDTH)
        self.among, self.across = (nn.MultiheadAttention(WIDTH, HEADS) for _ in range(2))

    def forward(self, x: torch.Tensor, at: torch.Tensor, pad: torch.Tensor) -> torch.Tensor:
        asked = self.queries.weight[:, None].expand(-1, B, -1)
        out = torch.zeros_like(asked)
        out = out + self.among(asked, asked, value=out + 1)[0]
        return out + self.across(out + asked, x + at, value=x, key_padding_mask=pad)[0]


def test_a_detector():
    given = torch.randn(MEMORY, B, WIDTH), torch.randn(MEMORY, 1, WIDTH)
    check(Detects(), {("splash", "none"), ("splash", "padded keys")}, *given, padding(MEMORY, 9))


class LastReturned(nn.Module):
    """Blocks that return their weights, of which the last one's are read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(4))
        self.blocks = nn.ModuleList(made)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = x
        for block in self.blocks:
            x, weights = block(x, x, x)
        return x, weights


@pytest.mark.parametrize("blocks", ["auto", "scan"])
def test_weights_that_only_the_last_layer_returns(blocks: Any):
    with tpuport.attention_options(**KERNELS["splash"]):
        ported = tpuport.convert(LastReturned(), blocks=blocks)
        ported(torch.randn(B, S, WIDTH))
    found = {(call.kernel, call.calls) for call in ported.report.attention}
    assert found == {("splash", 3), ("full", 1)}
