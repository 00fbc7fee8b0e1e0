"""The comparison with eager PyTorch: rounding is no error, and no error passes for rounding.

A fault is planted where code sees that it is traced. One program holds all cases, as outputs.
"""

import contextlib
import copy
import enum
import time
from collections import namedtuple
from dataclasses import dataclass

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tpuport.compat.emulated.programs import PortWarning
from tpuport.foundation.errors import ParityError, UsageError
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.training import make_train_step


def is_traced(x):
    return isinstance(x, TracedTensor)


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


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


def of_a_made_class(x, field="a", base=object):
    """Return objects of classes that are others in each call."""

    @dataclass
    class Result(base):
        a: torch.Tensor
        number: int = 3

    class Plain:
        def twice(self):
            return self.a * 2

    plain = Plain()
    plain.a = x
    return [namedtuple("Named", [field])(x + 1), Result(x), plain]


def of_another_class(x):
    class Plain:
        def twice(self):
            return self.a * 3

    Plain.__qualname__ = "of_a_made_class.<locals>.Plain"
    plain = Plain()
    plain.a = x
    return [*of_a_made_class(x)[:2], plain]


# What eager PyTorch gives, and what the port gives in its place.
OTHER_VALUES = {
    "none": (lambda x: x, lambda x: None),
    "tensor": (lambda x: None, lambda x: x + 1),
    "number": (lambda x: 3, lambda x: 4),
    "truth": (lambda x: True, lambda x: 1),
    "real": (lambda x: 0.5, lambda x: 0.501),
    "text": (lambda x: "mean", lambda x: "sum"),
    "dtype": (lambda x: torch.float32, lambda x: torch.bfloat16),
    "choice": (lambda x: Level.LOW, lambda x: Level.HIGH),
    "list": (lambda x: [x], lambda x: (x,)),
    "longer": (lambda x: [x], lambda x: [x, x]),
    "keys": (lambda x: {"a": x, "b": 1}, lambda x: {"b": 1, "a": x}),
    "set": (lambda x: {1, 2}, lambda x: {1, 3}),
    "integers": (lambda x: torch.arange(3) + 2**20, lambda x: torch.arange(3) + 2**20 + 1),
    "wider": (lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True)),
    "cast": (lambda x: x * 2, lambda x: (x * 2).half()),
    "field": (of_a_made_class, lambda x: of_a_made_class(x, field="b")),
    "base": (of_a_made_class, lambda x: of_a_made_class(x, base=Exception)),
    "code": (of_a_made_class, of_another_class),
}


def other_values(x):
    which = 1 if is_traced(x) else 0
    same = {"same": [x * 2, 7, "s"], "made": of_a_made_class(x)}
    return {name: both[which](x) for name, both in OTHER_VALUES.items()} | same


def test_what_is_no_tensor_is_compared_exactly():
    ported = tpuport.convert(other_values)
    with pytest.raises(ParityError) as raised:
        ported(normal(2, 3))
    assert "rtol" not in str(raised.value)
    found = {r.path: r.problem for r in ported.report.parity if not r.ok}
    assert {path.removeprefix("output.").partition("[")[0] for path in found} == {*OTHER_VALUES}
    assert found["output.none"] == "None where eager PyTorch gives float32[2, 3]"
    assert found["output.tensor"] == "float32[2, 3] where eager PyTorch gives None"
    assert found["output.truth"] == "int 1 where eager PyTorch gives bool True"
    assert found["output.list"] == "a tuple where eager PyTorch gives a list"


def test_one_tensor_in_two_places_is_not_two():
    def twice(x):
        y = x * 2
        return y, (y.clone() if is_traced(x) else y)

    with pytest.raises(ParityError, match=r"output\[1\]: the same tensor as output\[0\] in eager"):
        tpuport.convert(twice)(normal(2))


@pytest.mark.parametrize(
    ("factor", "advice"), [(2.0, "more than rounding"), (1.01, "more than rounding")]
)
def test_the_advice_is_not_to_accept_an_error(factor, advice):
    def scaled(x):
        return x.sin() * (factor if is_traced(x) else 1)

    ported = tpuport.convert(scaled)
    for _ in range(2):  # a caught error does not let the next call through
        with pytest.raises(ParityError, match=advice) as raised:
            ported(normal(4))
        assert "rtol" not in str(raised.value)
        assert "eager PyTorch is" in str(raised.value)
    assert not ported.report.ok


MET = [False]


def doubled_at_first(x):
    if not MET[0]:
        MET[0] = True
        return x * 2
    return x


def test_a_global_that_the_call_changes_is_named():
    with pytest.raises(ParityError, match=r"the call changes .*MET.* outside of the module"):
        tpuport.convert(doubled_at_first)(normal(3))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps, self.norm = 0, nn.BatchNorm1d(3)
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        self.steps += 1
        self.total += x.sum(0)
        return self.norm(x) * self.steps + self.total


def test_a_reference_starts_from_the_state_before_the_call():
    ported = tpuport.convert(Counter(), args=(normal(4, 3),))
    verifier = ported._verifier
    call = verifier.call("forward", (normal(4, 3),), {})
    want = ported(normal(4, 3))
    ported(normal(4, 3, seed=1))
    again = verifier.reference(call)
    torch.testing.assert_close(again.out, tpuport.to_torch(want))
    assert again.module.steps == 1


def right_at_first(x):
    return x * torch.where(x.sum() > 1, 3.0, 2.0) if is_traced(x) else x * 2


def calls_until_error(verify, seconds=20.0):
    ported = tpuport.convert(right_at_first, verify=verify)
    ported(torch.zeros(3) + 0.1)
    if ported._sampler is not None:
        ported._sampler.wait_for(0.0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ported(torch.ones(3))
    raise AssertionError("nothing was found")


def test_sampled_calls_find_what_the_first_call_does_not_show():
    with pytest.raises(ParityError, match=r"call \d+ of forward: output differs"):
        calls_until_error("sample")


def test_every_call_is_compared_if_asked_for():
    with pytest.raises(ParityError, match="output differs"):
        calls_until_error("always")


def test_comparing_takes_a_small_share_of_the_time(monkeypatch):
    ported = tpuport.convert(right_at_first, verify="sample", args=(torch.zeros(3),))
    sampler, now = ported._sampler, [100.0]
    assert sampler is not None
    monkeypatch.setattr("tpuport.model.parity.sampling.time.monotonic", lambda: now[0])
    due = []
    for _ in range(200):
        sampler.wait_for(0.5)
        due.append(sampler._next - now[0])
    assert 0.5 / (sum(due) / len(due)) < 0.05
    assert len(set(due)) > 100


def test_an_unknown_way_to_verify_is_refused():
    with pytest.raises(UsageError, match="verify is one of True, False, 'first', 'sample'"):
        tpuport.convert(nn.Linear(2, 2), verify="some")
    with (
        pytest.raises(UsageError, match="one of True, False, 'first', 'always'; got 'sample'"),
        tpuport.porting(verify="sample"),
    ):
        pass


class Misled(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.turned = nn.Linear(3, 4), Turned()

    def forward(self, x):
        return self.turned(self.line(x)).square().mean()


def test_the_first_training_step_compares_gradients():
    ported = tpuport.convert(Misled())
    step = make_train_step(ported, optimizer="sgd")
    with pytest.raises(ParityError, match=r"grad\.line"):
        step(step.init(), normal(5, 3))


def test_the_first_apply_under_grad_compares_gradients():
    ported = tpuport.convert(Misled())
    x = normal(5, 3)

    def loss(params):
        return ported.apply(params, ported.buffers, None, x)[0]

    jax.jit(jax.grad(loss))(ported.params)  # no values are known here
    assert ported.report.parity == []
    with pytest.raises(ParityError, match=r"grad\.line"):
        jax.grad(loss)(ported.params)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_a_right_step_agree(accumulate):
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1))
    ported = tpuport.convert(model, methods=(mean_square,))
    step = make_train_step(ported, mean_square, "sgd", accumulate=accumulate)
    state, _ = step(step.init(), normal(8, 3))
    step(state, normal(8, 3))
    assert sorted(r.path for r in ported.report.parity) == sorted(
        f"grad.{name}" for name in ported.params
    )
    assert ported.report.ok


def mean_square(model, x):
    return model(x).square().mean()


def test_why_there_is_no_result_in_float64_is_said():
    def fussy(x):
        if not is_traced(x) and torch._C._len_torch_dispatch_stack() > 1:
            raise TypeError("no modes, please")
        return x.sin() * (1.01 if is_traced(x) else 1)

    said = r"eager PyTorch does not run in float64 \(TypeError: no modes, please\)(?s:.*)rtol="
    with pytest.raises(ParityError, match=said):
        tpuport.convert(fussy)(normal(4))


def seeded_inside(x):
    """Draw from a seed of its own, and then what the caller's seed gives."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        fixed = torch.randn(4)
    return fixed + x, torch.rand(4)


def test_numbers_drawn_from_a_seed_in_the_code_are_no_parity_error():
    ported = tpuport.convert(seeded_inside)
    torch.manual_seed(0)
    (first, free), (second, other) = ported(torch.zeros(4)), ported(torch.zeros(4))
    assert torch.equal(first.torch(), second.torch())
    assert not torch.equal(free.torch(), other.torch())  # the fork set the seed of the caller back


class TakesSteps(nn.Module):
    """Trains a layer in its forward pass, and puts its weight back, or a copy of it."""

    def __init__(self, copies: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.copies = nn.Linear(3, 2), nn.Linear(3, 3), copies

    def forward(self, x):
        held = self.inner._parameters
        weight = held["weight"] = held["weight"].clone() if self.copies else held["weight"]
        loss = self.inner(self.outer(x)).sum()
        held["weight"] = weight - 0.1 * torch.autograd.grad(loss, weight, create_graph=True)[0]
        out = self.inner(self.outer(x)).square().sum()
        held["weight"] = weight
        return out if not is_traced(x) or not self.outer.bias.max() > 9 else out * 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gradients_are_those_of_the_parameters_before_the_call():
    x = torch.arange(6.0).reshape(2, 3) / 5
    for copies in (False, True):
        torch.manual_seed(0)
        eager, parameters = TakesSteps(copies), []
        refused = pytest.warns(PortWarning, match="in place of the parameter 'inner.weight'")
        with tpuport.porting(), refused if copies else contextlib.nullcontext():
            ported = copy.deepcopy(eager).to("cuda")
            for module in (eager, ported):
                parameters.append(list(module.parameters()))
                module(x.to(parameters[-1][0].device)).backward()
        for want, got in zip(*parameters, strict=True):
            torch.testing.assert_close(got.grad.cpu(), want.grad)


def test_a_fault_beside_gradients_that_the_code_asks_for_is_a_parity_error():
    torch.manual_seed(0)
    model = TakesSteps(False)
    with torch.no_grad():
        model.outer.bias[0] = 10
    with pytest.raises(ParityError, match="output differs from eager PyTorch"):
        tpuport.convert(model)(torch.ones(2, 3))
