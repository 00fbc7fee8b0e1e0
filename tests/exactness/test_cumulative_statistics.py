"""Batch norm: an average over all batches so far, in one program, and statistics beside float64."""

import copy

import jax
import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import normal


def test_a_cumulative_average_needs_one_program():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=None)
    )
    eager = copy.deepcopy(model)
    ported = tpuport.convert(model)
    for scale in range(1, 5):
        x = normal(4, 3) * scale + scale
        torch.testing.assert_close(tpuport.to_torch(ported(x)), eager(x))
        for name, buffer in eager.named_buffers():
            ours = tpuport.to_torch(ported.buffers[name])
            torch.testing.assert_close(ours, buffer, check_dtype=False)
    again = copy.deepcopy(eager)
    again(x).cos().sum().backward()

    def loss(params):
        out, changed = ported.apply(params, ported.buffers, None, x)
        return jax.numpy.cos(out).sum(), changed

    gradients, _ = jax.jit(jax.grad(loss, has_aux=True))(ported.params)
    for name, gradient in gradients.items():
        torch.testing.assert_close(tpuport.to_torch(gradient), again.get_parameter(name).grad)
    assert ported.report.retraces == []
    assert ported.report.notes == []
    eager.eval()
    torch.testing.assert_close(tpuport.to_torch(ported.eval()(x)), eager(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (10.0, 0.1), (100.0, 1.0)])
def test_batch_statistics_are_as_near_to_float64_as_eagers(mean: float, std: float):
    """Eager sums in float64: the rounding of a large mean was ten times its error."""
    torch.manual_seed(0)
    x = torch.randn(2, 16, 7, 7) * std + mean
    weights = torch.randn_like(x)

    def results(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        out = module(given)
        (out * weights.to(out)).sum().backward()
        assert given.grad is not None
        found = (out.detach(), given.grad, module.running_mean, module.running_var)
        return [one.cpu().double() for one in found]

    exact = results(nn.BatchNorm2d(16).double(), x.double())
    eager = results(nn.BatchNorm2d(16), x)
    with tpuport.porting():
        found = results(nn.BatchNorm2d(16).cuda(), x.cuda())
    for want, near, have in zip(exact, eager, found, strict=True):
        # As far again as eager is, or what one rounding of the largest value makes.
        allowed = 2 * (near - want).abs().max() + 2e-7 * want.abs().max()
        assert (have - want).abs().max() <= allowed
