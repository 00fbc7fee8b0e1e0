"""The strides of attention's result, which say whether a view may join its heads again."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tpuport

HEADS, WIDTH, LENGTH = 3, 4, 5


class Joined(nn.Module):
    """Self-attention that joins its heads by `view`, as eager PyTorch's fused kernel allows."""

    def __init__(self, **options):
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.options = options
        self.strides = ()

    def forward(self, x):
        parts = self.qkv(x).view(*x.shape[:2], 3, HEADS, WIDTH).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        out = scaled_dot_product_attention(q, k, v, **self.options)
        self.strides = out.stride()
        return out.transpose(1, 2).view(x.shape)


def gradients(model: Any) -> list[torch.Tensor]:
    return [p.grad.cpu().clone() for p in model.parameters()]


class Laid(nn.Module):
    """Attention over queries as they are laid out, which returns the strides of the result."""

    def forward(self, q, k, v, mask=None, grouped=False):
        out = scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)
        return out, torch.tensor(out.stride())


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"attn_mask": torch.zeros(LENGTH, LENGTH)}]
)
def test_heads_are_joined_by_a_view(options):
    model, inputs = Joined(**options), torch.randn(2, 2, LENGTH, HEADS * WIDTH)
    expected = [model(x) for x in inputs]
    eager = model.strides
    expected[1].square().sum().backward()
    wanted = gradients(model)
    with tpuport.porting():
        model.zero_grad()
        ported = model.cuda()
        found = [ported(x.cuda()) for x in inputs]
        found[1].square().sum().backward()
        assert model.strides == eager
        torch.testing.assert_close([x.cpu() for x in found], expected)
        torch.testing.assert_close(gradients(ported), wanted)


def test_strides_are_those_of_eager():
    def f(*shape, order=(0, 1, 2, 3)):
        return torch.randn(*(shape[at] for at in order)).permute(*map(order.index, range(4)))

    heads_inside, q, k = (0, 2, 1, 3), f(2, 4, 5, 8), f(2, 4, 6, 8)
    turned = f(2, 4, 5, 8, order=heads_inside)
    calls = [
        (q, k, k),
        (turned, k, k),
        (f(2, 4, 7, 8, order=heads_inside)[:, :, 1:6], k, k),
        (f(2, 4, 5, 8, order=(1, 2, 0, 3)), k, k),
        (f(2, 4, 5, 8, order=(0, 1, 3, 2)), k, k),  # no kernel for a row with gaps
        (turned, k, f(2, 4, 6, 7)),  # nor for another width of values
        (turned, k, k, torch.zeros(5, 6)),
        (turned, k[:, :2], k[:, :2], None, True),
        (turned[0], k[0], k[0]),
    ]
    ported = tpuport.convert(Laid())
    seen = set()
    for call in calls:
        out, strides = Laid()(*call)
        found, of_found = ported(*call)
        assert of_found.tolist() == strides.tolist()
        torch.testing.assert_close(found.cpu(), out)
        seen.add(out.is_contiguous())
    assert seen == {True, False}


def test_a_kernel_that_is_switched_off_does_not_lay_the_result_out():
    with sdpa_kernel(SDPBackend.MATH):
        with pytest.raises(RuntimeError, match="view size"):
            Joined()(torch.randn(1, LENGTH, HEADS * WIDTH))
        with pytest.raises(RuntimeError, match="view size"):
            tpuport.convert(Joined())(torch.randn(1, LENGTH, HEADS * WIDTH))
