"""FlexAttention inside `porting()`: as a program, and where eager PyTorch of the CPU raises."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

import tpuport
from tpuport.compat.emulated.programs import programs

MASK = torch.tensor([[1, 1, 1, 0, 0, 1], [0, 1, 1, 1, 1, 0]], dtype=torch.bool)

# Eager PyTorch's word for a call that nobody compiled.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


class Attending(nn.Module):
    """Rows that are masked attend to nothing, as HunyuanVideo's padded text does."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.compiled = torch.compile(flex.flex_attention, dynamic=False)

    def forward(self, x, mask):
        q = self.enter(x).view(2, 6, 2, 4).transpose(1, 2)

        def seen(score, b, h, q_idx, kv_idx):
            return torch.where(mask[b, q_idx] & mask[b, kv_idx], score, float("-inf"))

        return self.compiled(q, q * 2, q + 1, score_mod=seen)


def reference(net, x, mask):
    """The same by scaled_dot_product_attention."""
    q = net.enter(x).view(2, 6, 2, 4).transpose(1, 2)
    pairs = (mask[:, :, None] & mask[:, None, :])[:, None]
    return F.scaled_dot_product_attention(q, q * 2, q + 1, attn_mask=pairs)


@pytest.mark.parametrize("ported", [True, False], ids=["program", "eager"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "sampled"])
def test_masked_rows_by_a_score_mod(ported, trained):
    original = flex.flex_attention
    with tpuport.porting(port_modules=ported), torch.set_grad_enabled(trained):
        torch.manual_seed(0)
        net = Attending().cuda()
        x = torch.randn(2, 6, 8, device="cuda", requires_grad=trained)
        got = net(x, MASK.cuda())
        assert len(programs()) == ported
        found = torch.autograd.grad(got.sum(), [x, *net.enter.parameters()]) if trained else ()
    assert flex.flex_attention is original
    want = reference(net, x, MASK)
    torch.testing.assert_close(got.cpu(), want)
    assert (got.cpu()[~MASK[:, None].expand(2, 2, 6)] == 0).all()
    for one, other in zip(
        found,
        torch.autograd.grad(want.sum(), [x, *net.enter.parameters()]) if trained else (),
        strict=True,
    ):
        torch.testing.assert_close(one.cpu(), other)
