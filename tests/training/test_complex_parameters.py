"""Training steps of models with complex parameters."""

from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import UsageError
from tpuport.training import from_torch, make_train_step


class Spectral(nn.Module):
    """Multiplies frequencies by complex weights, and gives the real part or all of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.cfloat))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.fft.rfft(x)[..., :3] @ self.weight
        return self.linear(z.real + 2 * z.imag), z


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    real, z = model(x)
    return real.square().mean() + z.imag.square().mean()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=0.1)


OPTIMIZERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "from_torch": (_sgd, lambda model, ported: from_torch(ported, _sgd(model.parameters()))),
    "optax": (lambda p: torch.optim.SGD(p, lr=0.01), lambda model, ported: optax.sgd(0.01)),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(name: str, accumulate: int):
    """The gradients were jax's, so that steps went uphill in the imaginary parts of weights."""
    of_torch, of_port = OPTIMIZERS[name]
    batches, model = [torch.randn(4, 6) for _ in range(3)], Spectral()
    optimizer = of_torch(model.parameters())
    for batch in batches:
        optimizer.zero_grad()
        _loss(model, batch).backward()
        optimizer.step()
    source = Spectral()
    ported = tpuport.convert(source)
    step = make_train_step(ported, _loss, of_port(source, ported), accumulate=accumulate)
    state = step.init()
    for batch in batches:
        state, _ = step(state, batch)
    for key, parameter in model.named_parameters():
        # After three steps, in which rounding of float32 adds up.
        np.testing.assert_allclose(state.params[key], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_an_optimizer_that_takes_parts_as_numbers_is_refused():
    model = Spectral()
    with pytest.raises(UsageError, match="two parts of a complex parameter"):
        from_torch(tpuport.convert(model), torch.optim.AdamW(model.parameters()))


def test_gradients_of_complex_results_are_compared():
    ported, x = tpuport.convert(Spectral()), torch.randn(2, 6)
    ported.verify(x)
    found = {one.path: one for one in ported.report.parity}
    assert found["grad.weight"].max_rel < 1e-5
