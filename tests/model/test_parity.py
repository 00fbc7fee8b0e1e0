"""The comparison with eager PyTorch: rounding is no error, and no error passes for rounding.

A fault is planted where code sees that it is traced. One program holds all cases, as outputs.
"""

import enum

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tpuport.foundation.errors import ParityError


def is_traced(x):
    return type(x) is not torch.Tensor


def orthogonal(x):
    """A rotation but for rounding."""
    return torch.linalg.qr(x[0, 0] + 3 * torch.eye(16))[0]


def centred(x, fault):
    return (x - (0 if fault == "dropped term" else x.mean())).mean()


def inverse(x, fault):
    square = x[0, 1] + 4 * torch.eye(16)
    factor = {"wrong factor": 1.001, "wrong sign": -1.0}.get(fault, 1.0)
    return torch.linalg.inv(square) @ square - factor * torch.eye(16)


def frobenius(x, fault):
    q = orthogonal(x)
    rows = q.roll(1, 0) if fault == "wrong row" else q
    return torch.linalg.matrix_norm(q.T @ rows - torch.eye(16))


def instance_then_batch(x, fault):
    y = F.instance_norm(x * 3 + 1)
    mean = 0 if fault == "dropped term" else y.mean((0, 2, 3), keepdim=True)
    if fault == "wrong factor":
        y = y * 1.001
    return {"mean": (y - mean).mean((0, 2, 3)), "out": F.batch_norm(y, None, None, training=True)}


def constant_channel(x, fault):
    """Nearly nothing but the eps keeps this from 0 / 0."""
    y = x.clone()
    y[:, 0] = 1 / 3
    centred = y - y.mean((2, 3), keepdim=True)
    eps = 0.0 if fault == "missing eps" else 1e-5
    return centred / (centred.square().mean((2, 3), keepdim=True) + eps).sqrt()


def equivariant(x, fault):
    """Messages between points, whose sum over all pairs is nothing."""
    points = x[0, 0, :, :3] + 100
    between = points[:, None] - points[None]
    weight = torch.exp(-between.square().sum(-1, keepdim=True))
    if fault == "wrong mask":
        weight = weight * torch.ones(16, 16, 1).triu_(1)
    return (between * weight).sum((0, 1))


def softmax(x, fault):
    probabilities = x.softmax(-1)
    if fault == "wrong mask":
        probabilities = x.masked_fill(torch.arange(16) > 14, -1e9).softmax(-1) * 1.0001
    return probabilities.sum(-1) - 1


def bfloat16(x, fault):
    y = x.to(torch.bfloat16)
    y = (y * 3).softmax(-1) @ y
    return (y - (0.9 if fault == "wrong factor" else 1.0) * y.roll(1, -1)).sum((1, 2))


def halves(x, fault):
    y = x.half()
    return (y @ y - (0 if fault == "dropped term" else (y @ y).mean())).mean()


def levels(x, fault):
    """Whole numbers, some of which are decided by the last bit."""
    y = ((x * 0.1).exp() * 1000 / 7).floor().to(torch.int32)
    if fault == "one element":
        y[1, 2, 3, 4] += 1
    return {"levels": y, "signs": (x - x.mean()).sum() > 1e3, "first": x.flatten(1).argmax(1)}


def mask(x, fault):
    return x > (x.flatten()[7] if fault == "one element" else x.flatten()[8])


CASES = {
    centred: ["dropped term"],
    inverse: ["wrong factor", "wrong sign"],
    frobenius: ["wrong row"],
    instance_then_batch: ["dropped term", "wrong factor"],
    constant_channel: ["missing eps"],
    equivariant: ["wrong mask"],
    softmax: ["wrong mask"],
    bfloat16: ["wrong factor"],
    halves: ["dropped term"],
    levels: ["one element"],
    mask: ["one element"],
}


class Cases(nn.Module):
    def forward(self, x):
        out = {}
        for case, faults in CASES.items():
            for fault in (None, *faults):
                label = case.__name__ + (f" {fault}" if fault else "")
                out[label.replace(" ", "_")] = case(x, fault if is_traced(x) else None)
        return out


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def outputs():
    """The records of all cases by their path, and those that a fault was planted in."""
    ported = tpuport.convert(Cases())
    with pytest.raises(ParityError):
        ported(normal(2, 3, 16, 16))
    faults = [f"{case.__name__}_{fault}" for case, all_ in CASES.items() for fault in all_]
    planted = tuple(f"output.{fault.replace(' ', '_')}" for fault in faults)
    return [r for r in ported.report.parity if r.kind == "output"], planted


def test_rounding_without_a_scale_is_no_error(outputs):
    records, planted = outputs
    clean = [r for r in records if not r.path.startswith(planted)]
    assert [r for r in clean if not r.ok] == []
    beyond = {r.path.removeprefix("output.").partition(".")[0] for r in clean if r.is_rounding}
    assert beyond >= {"centred", "inverse", "instance_then_batch", "equivariant", "softmax"}


def test_planted_faults_are_found(outputs):
    records, planted = outputs
    found = [r.path for r in records if not r.ok]
    assert [path for path in planted if not any(one.startswith(path) for one in found)] == []
