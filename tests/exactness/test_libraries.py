"""Idioms of other people's packages, without the packages."""

import weakref

import jax
import opt_einsum
import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients, normal
from tpuport.foundation.errors import PortError

X, Y, Z = normal(4, 3), normal(4, 3, seed=2), normal(4, 3, seed=3)


class ActNorm(nn.Module):
    """The first batch sets a parameter by `.data`, in a branch on a buffer (normalizing flows)."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(3))
        self.register_buffer("initialized", torch.tensor(False))

    def forward(self, x):
        before = self.scale.detach()
        if not self.initialized:
            with torch.no_grad():
                self.scale.data = -torch.log(x.std(0))
                self.initialized.data = torch.tensor(True)
        return x * self.scale.exp(), before


class Average:
    """It refers to the parameters of a module, weakly and otherwise, and keeps other state."""

    def __init__(self, parameters):
        self.known = list(parameters)
        self.weak = [weakref.ref(p) for p in self.known]
        self.kept, self.calls = None, 0


class Averaged(nn.Module):
    """An average of weights as torch-ema keeps it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.average = Average(self.linear.parameters())

    def forward(self, x):
        weak, known = self.average.weak, self.average.known
        self.average.kept = [p().clone() for p in weak]
        self.average.calls += 1
        with torch.no_grad():
            known[1].add_(1)
        return self.linear(x) + self.average.kept[0].sum() + weak[1]().sum()


def lists(x):
    """Ops on lists, as tensordict and optimizers call them."""
    a = [x * 1, x[:2] * 2]
    with torch.no_grad():
        b = torch._foreach_maximum(torch._foreach_mul(a, 0.5), 0.1)
        torch._foreach_mul_(b, [2.0, 3.0])
        torch._foreach_addcdiv_(b, a, torch._foreach_add(a, a, alpha=4), [0.5, 0.25])
        c = torch._foreach_lerp(torch._foreach_pow(2.0, a), b, 0.3)
        d = torch._foreach_addcmul(b, c, a, torch.tensor([1.0, 2.0]))
    return b, c, d, torch._foreach_norm(a), torch._foreach_sub(a, [1.0, 2.0])


class Contracted(nn.Module):
    """opt_einsum finds the functions for an array by the module of its class."""

    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(normal(3, 4)), nn.Parameter(normal(4, 5))

    def forward(self, x):
        return opt_einsum.contract("ij,jk,kl->il", x, self.w, self.v)


SCENARIOS = [
    Scenario("set by the first batch", ActNorm, ((X,), (Y,), (Z,)), grads=False),
    Scenario("an average of weights", Averaged, ((X,), (Y,), (Z,)), grads=False),
    Scenario("lists", lambda: lists, ((X,), (Y,))),
    Scenario("opt_einsum", Contracted, ((X,),)),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_values(scenario):
    check_calls(scenario, by_tpuport)


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.grads], ids=str)
def test_gradients(scenario):
    check_gradients(scenario, by_tpuport)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_a_hook_of_the_graph_is_refused_when_a_gradient_is_taken():
    module = nn.Linear(3, 3)
    module.register_backward_hook(lambda module, before, after: None)
    ported = tpuport.convert(module, verify=False)
    torch.testing.assert_close(ported(X).torch(), module(X))

    def loss(params):
        return ported.apply(params, ported.buffers, None, X)[0].sum()

    with pytest.raises(PortError, match="TPU403 a hook of torch's autograd graph"):
        jax.grad(loss)(ported.params)


@pytest.mark.parametrize("made", [lambda x: x[:2], torch.Tensor.half], ids=["shape", "dtype"])
def test_data_of_another_form_is_refused(made):
    def replaced(x):
        y = x * 1
        y.data = made(x)
        return y * 1

    with pytest.raises(PortError, match="`.data` of a tensor .* gets another dtype or shape"):
        tpuport.convert(replaced, verify=False)(X)
