"""Batch norm with momentum=None averages over all batches so far, in one program."""

import copy

import jax
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
