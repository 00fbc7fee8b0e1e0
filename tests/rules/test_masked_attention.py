"""Attention with rows that attend to nothing: zeros, with gradients that are numbers."""

import pytest
import torch
import torch.nn.functional as F

from tpuport import ops
from tpuport.rules._apply import find
from tpuport.rules.masked_attention import MaskedAttention
from tpuport.source.rewrite.finding import Severity
from tpuport.testing import equivalence

X = torch.randn(2, 3, 5, 4)
LENGTHS = torch.tensor([3, 5])
VALID = (torch.arange(5) < LENGTHS[:, None])[:, None, :, None]
PAIRS = VALID & VALID.transpose(-1, -2)
MASKS = {
    "boolean": PAIRS,
    "added": torch.zeros(2, 1, 5, 5).masked_fill(~PAIRS, float("-inf")),
    "of one row": torch.tensor([[False, False, False, False, False]]),
    "of keys": torch.tensor([True, True, False, True, True])[None],
    "full": torch.ones(5, 5, dtype=torch.bool),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_program_gives_what_pytorch_gives(mask: torch.Tensor):
    def function(x: torch.Tensor, mask: torch.Tensor):
        return (
            ops.attention(x, x * 2, x + 1, attn_mask=mask),
            ops.attention(x, x * 2, x + 1, mask, 0.0, False, scale=0.3),
            ops.attention(x, x, x),
        )

    equivalence.check_plain(function, function, [(X, mask)])


def test_gradients_of_rows_without_keys_are_zero():
    import jax
    import torchax
    from torchax import interop

    def loss(x: torch.Tensor, mask: torch.Tensor):
        return ops.attention(x, x, x, attn_mask=mask).square().sum()

    x = X.clone().requires_grad_()
    loss(x, PAIRS).backward()
    with torchax.default_env():
        gradient = jax.jit(jax.grad(interop.jax_view(loss)))
        got = interop.call_jax(gradient, X.to("jax"), PAIRS.to("jax")).cpu()
    assert x.grad is not None
    assert torch.allclose(got, x.grad, atol=1e-5)


def test_plain_torchax_alone_gives_nan():
    got = equivalence.plain_jit(lambda x, m: F.scaled_dot_product_attention(x, x, x, m), (X, PAIRS))
    assert got.isnan().any()


def test_only_a_mask_that_is_surely_boolean_is_shown():
    source = """\
import torch
import torch.nn.functional as F


def forward(x: torch.Tensor, bias: torch.Tensor, mask: torch.BoolTensor):
    y = F.scaled_dot_product_attention(x, x, x, attn_mask=bias > 0)
    return F.scaled_dot_product_attention(y, y, y, attn_mask=bias)
"""
    found = [(f.line, f.severity) for f in find(source, rules=[MaskedAttention])]
    assert found == [(6, Severity.SILENT), (7, Severity.NOTE)]


@pytest.mark.parametrize("wrong", ["attn_mask=~pairs", "attn_mask=pairs, is_causal=False, scale=1"])
def test_a_fix_with_another_mask_or_scale_is_noticed(wrong: str, tmp_path):
    example = MaskedAttention.EXAMPLES[0]
    assert example.after is not None
    before, after = (
        equivalence.load(source, tmp_path)
        for source in (example.before, example.after.replace("attn_mask=pairs", wrong))
    )
    with pytest.raises(equivalence.DifferenceError):
        equivalence.check_eager(before, after, equivalence.make_inputs(example.inputs))
