"""What user code sees of gradients inside a trace, and gradients that it takes itself."""

import warnings
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients, normal
from tests.training.none_programs import Second
from tpuport.foundation.errors import ParityError, PortError
from tpuport.tracing.core.tensor import TracedTensor

X = normal(4, 6)


class Answers(nn.Module):
    """Each answer that autograd gives to code, as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(6, 6), nn.Parameter(torch.ones(6), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x)
        filled = torch.zeros(4, 6)
        filled[0] = y[0]
        written = x.clone()
        part = written[1:]
        part.mul_(y[1:])
        leaf = y.detach().requires_grad_()
        with torch.no_grad():
            stopped, view = y * 2, y.t()
        both = y if x.sum() > 0 else x
        tensors = [x, y, filled, written, part, leaf, leaf * 2, stopped, view, both, self.table]
        tensors += [self.buffer + x, self.table * x, self.linear.weight.data, y > 0, y.round()]
        tensors += [torch.full_like(y, 2.0), torch.randn_like(y), y.new_ones(2), y * y.new_zeros(1)]
        tensors += [self.linear.weight, torch.cat([x, y]), x.detach().requires_grad_().sum()]
        seen = [(t.requires_grad, t.is_leaf, t.grad_fn is None) for t in tensors]
        return torch.tensor(seen) + 0 * x.sum().detach(), y.sum()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_answers_are_eagers(trained: bool, grad: bool):
    module = Answers()
    ported = by_tpuport(module)
    x = X.clone().requires_grad_(trained)
    with torch.set_grad_enabled(grad):
        want, got = module(x), ported(x)
    assert torch.equal(got[0].cpu(), want[0])
    assert [t.requires_grad for t in got] == [t.requires_grad for t in want]


def test_requires_grad_is_part_of_the_signature():
    ported = by_tpuport(Answers())
    for x in (X, X.clone().requires_grad_(), X, X.clone().requires_grad_()):
        assert bool(ported(x)[0][0, 0]) is x.requires_grad
    (retrace,) = ported.report.retraces
    assert "requires_grad" in retrace.causes[0]


class Needs(nn.Module):
    """`Second` asserts what ctx.needs_input_grad says of data and of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> Any:
        return Second.apply(x, self.weight)


def test_data_needs_no_gradient():
    ported = tpuport.convert(Needs())
    assert ported.verify(X).ok


class Miscounts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad


class Surplus(Miscounts):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Misshapes(Miscounts):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.repeat(2, 2)


class Applies(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function.apply(self.linear(x)).sum()


def _gradient(ported: Any) -> Any:
    return jax.jit(jax.grad(lambda p: ported.apply(p, ported.buffers, None, X)[0]))(ported.params)


def test_a_wrong_number_of_gradients_is_refused():
    with pytest.raises(RuntimeError, match="incorrect number of gradients"):
        Applies(Miscounts)(X).backward()
    with pytest.raises(PortError, match=r"incorrect number of gradients \(expected 1, got 2\)"):
        _gradient(by_tpuport(Applies(Miscounts)))
    _gradient(by_tpuport(Applies(Surplus)))
    with pytest.raises(RuntimeError, match=r"index 0 - got \[8, 12\]"):
        Applies(Misshapes)(X).backward()
    with pytest.raises(PortError, match=r"index 0 - got \[8, 12\] .* compatible with \[4, 6\]"):
        _gradient(by_tpuport(Applies(Misshapes)))


# Gradients that a forward takes.


class Penalty(nn.Module):
    """A gradient penalty with respect to a detached leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x).detach().requires_grad_()
        z = self.second(y).tanh().sum()
        (g,) = torch.autograd.grad(z, y, create_graph=True)
        return z + (g**2).sum()


class Guided(nn.Module):
    """Steps down an energy under no_grad; what comes before the leaf does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 1))

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            before = x.sum()
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                e = self.energy(x).square().sum()
                if e > 1:
                    e = e * 2
                x = x - 0.1 * torch.autograd.grad(e + before, [x])[0]
        return x


class OfWeights(nn.Module):
    """Gradients of arguments and weights, with cotangents, some unused."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(6, 6), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = self.linear(x).tanh()
        of = [x, self.linear.bias, self.unused]
        a, b, c = torch.autograd.grad(
            [y.sum(), y], of, [None, x], create_graph=True, allow_unused=True
        )
        assert c is None
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(y.sum(), self.unused)
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(y.detach().sum(), x)
        return a.square().sum() + b.prod() + y.sum()


def _used_before(x: torch.Tensor) -> torch.Tensor:
    before = x.square().sum()
    leaf = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(leaf.exp().sum() + before.detach() + leaf.view(-1)[0], leaf)
    return F.softmax(g, -1)


INNER = [
    Scenario("penalty", Penalty, ((X,),), rtol=1e-4),
    Scenario("of_weights", OfWeights, ((X,),), rtol=1e-4),
    Scenario("used_before", lambda: _used_before, ((X,),)),
]


@pytest.mark.parametrize("scenario", INNER, ids=str)
def test_inner_gradients(scenario: Scenario):
    check_calls(scenario, by_tpuport)
    if scenario.name != "used_before":
        check_gradients(scenario, by_tpuport)


def test_guidance_is_verified():
    ported = tpuport.convert(Guided(), args=(X,))
    assert ported.report.verified
    assert ported.verify(X * 2).ok


class Functional(nn.Module):
    """Gradients of weights by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        def energy(params: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(self.linear, params, x).tanh().sum()

        return torch.func.grad(energy)(dict(self.linear.named_parameters()), x)


class Misled(Functional):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(2 * x if isinstance(x, TracedTensor) else x)


def test_gradients_by_torch_func_are_verified():
    assert tpuport.convert(Functional(), args=(X,)).report.verified
    with pytest.raises(ParityError):
        tpuport.convert(Misled(), args=(X,))


# Inference mode.


class Cached(nn.Module):
    """A cache that is filled in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.arange(48.0).reshape(8, 6))
        self.register_buffer("cache", torch.zeros(8, 6))

    @torch.inference_mode()
    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        end = start + x.shape[0]
        self.cache[start:end] = self.linear(x) * self.table[start:end] + torch.arange(6).exp()
        return self.cache[:end].sum(1)


class Plain(Cached):
    forward = Cached.forward.__wrapped__  # type: ignore[attr-defined]


@pytest.mark.parametrize("outer", [False, True])
def test_inference_mode(outer: bool):
    module = Plain() if outer else Cached()
    ported = tpuport.convert(module)
    with torch.inference_mode(outer), warnings.catch_warnings():
        for start in (0, 4):
            want, got = module(X, start), ported(X, start)
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)
            assert not got.requires_grad
    assert (tpuport.to_torch(ported.buffers["cache"]) != 0).any(1).all()


def test_results_under_porting():
    class Frozen(Cached):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.linear(x)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(6, 6), Frozen()

        def forward(self, x: torch.Tensor) -> Any:
            target = self.teacher(x)
            return (self.student(x) - target).square().mean(), target

    with tpuport.porting():
        module = Pair()
        loss, target = module(X)
        assert (loss.requires_grad, target.requires_grad) == (True, False)
        loss.backward()
        assert [p.grad is None for p in module.parameters()] == [False, False, True, True]


class Window(nn.Module):
    """A window into the memory of a parameter, taken of a part of it or of all."""

    def __init__(self, take: Any) -> None:
        super().__init__()
        self.weight, self.take = nn.Parameter(normal(3, 4)), take

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.take(self.weight * x) + self.take(self.weight)


@pytest.mark.parametrize(
    "take",
    [
        lambda w: torch.as_strided(w[1], (2, 2), (2, 1), 1),
        lambda w: torch.as_strided(w[:, 1:3], (3,), (4,), 2),
        lambda w: w[2].as_strided((2,), (1,), 8),
        lambda w: w.t().as_strided((2, 3), (4, 1), 1),
    ],
)
def test_a_window_has_the_gradient_of_the_tensor_that_it_was_taken_of(take):
    check_gradients(Scenario("window", lambda: Window(take), ((torch.tensor(2.0),),)), by_tpuport)


class Residual(nn.Module):
    """The residual of a differential equation at points that require grad, as its solvers give."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        value = self.net(points)
        (slope,) = torch.autograd.grad(value, points, torch.ones_like(value), create_graph=True)
        return (slope + value).square().mean()


def test_a_call_differentiates_with_respect_to_an_argument_that_requires_grad():
    torch.manual_seed(0)
    net = Residual()
    ported = tpuport.convert(net)
    for count in (3, 3, 4):
        points = torch.rand(count, 1).requires_grad_()
        torch.testing.assert_close(tpuport.to_torch(ported(points)), net(points).detach())
        assert points.grad is None
