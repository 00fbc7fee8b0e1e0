"""Convolutions of images that are smaller than their kernel, as the last ones of VGG16 see them."""

import jax
import jax.numpy as jnp
import pytest
import torch
from jax import lax
from torch import nn

import tpuport


def convolve(x, weight):
    return lax.conv_general_dilated(x, weight, (1,) * (x.ndim - 2), [(1, 1)] * (x.ndim - 2))


@pytest.mark.xfail(strict=True, reason="XLA's CPU backend has no fast path for what this gives")
def test_xla_exchanges_image_and_kernel():
    """Once this passes, `_enlarged` in tpuport/tracing/lowerings/convolution.py can go."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 8, 2, 2), (8, 8, 3, 3))]
    assert "rhs_reversal" not in (jax.jit(convolve).lower(*shapes).compile().as_text() or "")


LAYERS = {
    "smaller": (nn.Conv2d(8, 6, 3, padding=1), (2, 8, 2, 2)),
    "smaller on one side": (nn.Conv2d(8, 6, (3, 5), padding=(1, 2)), (2, 8, 1, 4)),
    "without padding on a side": (nn.Conv2d(8, 6, (2, 5), padding=(0, 2)), (2, 8, 2, 3)),
    "one sample": (nn.Conv2d(8, 6, 5, padding=2), (8, 3, 3)),
    "padding beyond the kernel": (nn.Conv2d(8, 6, 3, padding=4), (2, 8, 2, 2)),
    "a sequence": (nn.Conv1d(8, 6, 5, padding=2), (2, 8, 3)),
    "a volume": (nn.Conv3d(8, 6, 3, padding=1), (2, 8, 2, 2, 2)),
    "one element": (nn.Conv2d(8, 6, 3, padding=1), (2, 8, 1, 1)),
    "strided": (nn.Conv2d(8, 6, 3, padding=1, stride=2), (2, 8, 2, 2)),
    "dilated": (nn.Conv2d(8, 6, 3, padding=2, dilation=2), (2, 8, 2, 2)),
    "grouped": (nn.Conv2d(8, 6, 3, padding=1, groups=2), (2, 8, 2, 2)),
    "transposed": (nn.ConvTranspose2d(8, 6, 3), (2, 8, 2, 2)),
    "transposed and cut": (nn.ConvTranspose2d(8, 6, 3, padding=(3, 0)), (2, 8, 7, 1)),
    "an even kernel": (nn.Conv2d(8, 6, 4, padding=2), (2, 8, 3, 3)),
}


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS)
def test_values_and_gradients_are_those_of_eager(layer, shape):
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    out = layer(x)
    cotangent = torch.randn(out.shape)
    expected = torch.autograd.grad(out, [x, layer.weight, layer.bias], cotangent)

    ported = tpuport.convert(layer)
    given, along = (jnp.asarray(t.detach().numpy()) for t in (x, cotangent))

    def loss(params, x):
        return (ported.apply(params, {}, None, x)[0] * along).sum()

    of_params, of_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(ported.params, given)
    torch.testing.assert_close(tpuport.to_torch(ported(x.detach())), out.detach())
    got = (of_x, of_params["weight"], of_params["bias"])
    for want, made in zip(expected, got, strict=True):
        torch.testing.assert_close(tpuport.to_torch(made), want, rtol=1e-4, atol=1e-5)


def test_the_programs_exchange_nothing():
    """Neither the convolution nor its gradients are what XLA computes by plain loops."""
    layer = nn.Conv2d(8, 6, 3, padding=1)
    ported = tpuport.convert(layer)
    x = jnp.ones((4, 8, 2, 2))

    def loss(params, x):
        return (ported.apply(params, {}, None, x)[0] ** 2).sum()

    texts = [
        jax.jit(run).lower(ported.params, x).compile().as_text() or ""
        for run in (loss, jax.grad(loss, argnums=(0, 1)))
    ]
    assert all("convolution" in text and "rhs_reversal" not in text for text in texts)
