"""The comparison with eager PyTorch: rounding is no error, and no error passes for rounding.

A fault is planted where code sees that it is traced. One program holds all cases, as outputs.
"""


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
    y = y + (1e-5 if fault == "wrong term" else 0)
    return {"mean": y.mean((0, 2, 3)), "out": F.batch_norm(y, None, None, training=True)}


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
        weight = weight * torch.ones(16, 16).triu(1)[..., None]
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
    instance_then_batch: ["wrong term"],
    constant_channel: ["missing eps"],
    equivariant: ["wrong mask"],
    softmax: ["wrong mask"],
    levels: ["one element"],
    mask: ["one element"],
}
# A program that computes in 16 bits anywhere has their tolerance everywhere.
IN_16_BITS = {bfloat16: ["wrong factor"], halves: ["dropped term"]}


class Cases(nn.Module):
    def __init__(self, cases):
        super().__init__()
        self.cases = cases

    def forward(self, x):
        out = {}
        for case, faults in self.cases.items():
            for fault in (None, *faults):
                label = case.__name__ + (f" {fault}" if fault else "")
                out[label.replace(" ", "_")] = case(x, fault if is_traced(x) else None)
        return out


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compared(cases):
    """Return the records of outputs without a fault, and those of each fault by its path."""
    ported = tpuport.convert(Cases(cases))
    with pytest.raises(ParityError):
        ported(normal(2, 3, 16, 16))
    faults = [f"{case.__name__}_{fault}" for case, all_ in cases.items() for fault in all_]
    planted = {f"output.{fault.replace(' ', '_')}": [] for fault in faults}
    clean = []
    for record in ported.report.parity:
        fault = next((one for one in planted if record.path.startswith(one)), None)
        (clean if fault is None else planted[fault]).append(record)
    return clean, planted


@pytest.mark.parametrize(
    ("cases", "noisy"),
    [
        (CASES, {"centred", "inverse", "instance_then_batch", "equivariant", "softmax"}),
        (IN_16_BITS, set()),
    ],
)
def test_rounding_is_no_error_and_planted_faults_are_found(cases, noisy):
    clean, planted = compared(cases)
    assert [record for record in clean if not record.ok] == []
    beyond = {r.path.removeprefix("output.").partition(".")[0] for r in clean if r.is_rounding}
    assert beyond >= noisy
    assert [path for path, found in planted.items() if all(one.ok for one in found)] == []


class Turned(nn.Module):
    """Returns its input; where it is traced, the gradient has the wrong sign."""

    def forward(self, x):
        return 2 * x.detach() - x if is_traced(x) else x


class Scaled(nn.Module):
    def forward(self, x):
        return x.detach() + 1.01 * (x - x.detach()) if is_traced(x) else x


class Branches(nn.Module):
    """Layers with gradients that are zero but for rounding, each beside a fault in the same."""

    def __init__(self):
        super().__init__()
        for name, fault in (("right", nn.Identity), ("turned", Turned), ("scaled", Scaled)):
            self.add_module(
                name,
                nn.Sequential(nn.Conv2d(3, 4, 3), fault(), nn.InstanceNorm2d(4), nn.BatchNorm2d(4)),
            )
        self.deep = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.ReLU())),
            *(nn.Linear(16, 16), nn.BatchNorm1d(3), nn.MaxPool1d(2)),
        )
        self.late = nn.Sequential(nn.Linear(16, 8), Turned(), nn.LayerNorm(8))

    def forward(self, x):
        out = {
            name: part(x) for name, part in self.named_children() if name not in ("deep", "late")
        }
        small = self.late(x[0]) * 1e-6
        return out | {"deep": self.deep(x[:, :, 0]), "late": small}


def test_gradients_that_are_zero_but_for_rounding_hide_no_fault():
    torch.manual_seed(0)
    ported = tpuport.convert(Branches())
    with pytest.raises(ParityError):
        ported.verify(normal(4, 3, 16, 16))
    wrong = {r.path for r in ported.report.parity if not r.ok}
    assert wrong == {
        *("grad.turned.0.weight", "grad.scaled.0.weight", "grad.late.0.weight", "grad.late.0.bias")
    }
    zero = {r.path for r in ported.report.parity if r.is_rounding}
    assert zero >= {"grad.right.0.bias", "buffer.right.3.running_mean"}
