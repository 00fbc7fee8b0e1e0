"""Gradients of complex numbers under `porting()` are torch's, the conjugates of jax's."""

from typing import Any

import pytest
import torch
from torch import nn

import tpuport


class Spectral(nn.Module):
    """Multiplies some frequencies by complex weights."""

    def __init__(self, result: str) -> None:
        super().__init__()
        self.result = result
        self.weight = nn.Parameter(torch.randn(2, 3, 3, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x if x.is_complex() else torch.fft.rfft(x)[..., :3]
        y = torch.einsum("bi,cio->bco", z, self.weight)
        y = (y[:, 0] + 0.1 * y[:, 1] ** 2) / 4
        return y if self.result == "complex" else torch.fft.irfft(y, n=6)


def _trained(device: str, order: int) -> list[torch.Tensor]:
    """Return the gradients of two modules with a complex tensor between them, and of the input."""
    torch.manual_seed(0)
    model = nn.Sequential(Spectral("complex"), Spectral("real")).to(device)
    x = torch.randn(2, 6).to(device).requires_grad_()
    z = model[0](x)
    z.retain_grad()
    loss: Any = model[1](z).square().mean() + z.imag.square().mean()
    for _ in range(order - 1):
        made = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
        loss = sum((torch.view_as_real(g) if g.is_complex() else g).square().sum() for g in made)
    loss.backward()
    found = [t.grad for t in (x, z, *model.parameters())]
    return [g.cpu() for g in found if g is not None]


@pytest.mark.parametrize("order", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_gradients_of_complex_weights_arguments_and_results(order: int):
    """They were those of jax, with the other sign in imaginary parts; complex results had none."""
    with tpuport.porting():
        ours = _trained("cuda", order)
    theirs = _trained("cpu", order)
    assert len(ours) == len(theirs)
    for have, want in zip(ours, theirs, strict=True):
        # Of the largest one: squares of gradients are of very different sizes.
        assert (have - want).abs().max() <= 2e-6 * want.abs().max()
