"""Gradients through `while` loops on traced values, and loops whose state is an attribute."""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax import lax
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError
from tpuport.tracing.control_flow.loop_gradient import while_with_gradient


class Adaptive(nn.Module):
    """Take steps of Heun's method, whose size an estimate of the error decides."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Linear(3, 3)

    def step(self, state: Any) -> Any:
        y, t, dt = state
        rough = y + dt * self.field(y).tanh()
        fine = y + dt / 2 * (self.field(y).tanh() + self.field(rough).tanh())
        error = (fine - rough).abs().max() * 50
        accept = error <= 1
        if dt > 10.0:
            accept = False
        if dt <= 1e-4:
            accept = True
        if accept:
            t_next, y_next = t + dt, fine
        else:
            t_next, y_next = t, y
        dt = dt * (0.9 / error.clamp(min=1e-6).sqrt()).clamp(0.2, 5.0)
        return y_next, t_next, dt

    def start(self, y: torch.Tensor) -> Any:
        return (y, torch.tensor(0.0), torch.tensor(0.5))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        state = self.start(y)
        while 1.0 > state[1]:
            state = self.step(state)
        return state[0]


class InAttribute(Adaptive):
    """The same with its state in an attribute, as torchdiffeq has it, and a check of the rounds."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        self.state = self.start(y)
        rounds = 0
        while 1.0 > self.state[1]:
            assert rounds < 1000, f"too many steps: {rounds}"
            self.state = self.step(self.state)
            rounds += 1
        return self.state[0]


class InHistory(Adaptive):
    """The same with its state in a list and a dict, which a method of its own changes."""

    def advance(self) -> None:
        self.held["last"][0] = self.step(self.held["last"][0])
        self.count = self.count + 1

    def forward(self, y: torch.Tensor) -> Any:
        self.held = {"last": [self.start(y)]}
        self.count = torch.tensor(0)
        while self.held["last"][0][1] < 1.0:
            self.advance()
        return self.held["last"][0][0], self.count


@pytest.mark.parametrize("module", [InAttribute, InHistory])
def test_steps_of_an_integrator(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    eager, first, second = module(), torch.randn(4, 3), torch.randn(4, 3) * 3
    ported = tpuport.convert(copy.deepcopy(eager), verify=False)
    for x in (first, second):
        torch.testing.assert_close(tpuport.to_torch(ported(x)), eager(x))

    def loss(params: Any) -> Any:
        leaves = jax.tree.leaves(ported.apply(params, ported.buffers, None, jnp.asarray(second))[0])
        return (leaves[0] ** 2).sum()

    gradients = jax.jit(jax.grad(loss))(ported.params)
    torch.square(jax.tree.leaves(eager(second))[0]).sum().backward()
    for name, parameter in eager.named_parameters():
        found = torch.from_numpy(jax.device_get(gradients[name]).copy())
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-5)


class Grows(nn.Module):
    """A list that each round makes longer is no variable of the loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen: list[torch.Tensor] = []
        while x.sum() > 1:
            x = x / 2
            self.note(x)
        return torch.stack(self.seen).sum()

    def note(self, x: torch.Tensor) -> None:
        self.seen.append(x)


def test_what_grows_is_refused() -> None:
    with pytest.raises(PortError, match="changes Python values"):
        tpuport.convert(Grows(), verify=False)(torch.ones(3))


def rounds(count: Any, weight: Any, start: Any) -> Any:
    """Run a loop of some rounds, whose number it does not know before."""

    def test(x: Any, number: Any, kept: Any) -> Any:
        return number < count

    def body(x: Any, number: Any, kept: Any) -> Any:
        return [jnp.tanh(x * weight) + 0.1 * x, number + 1, kept]

    values = [start, jnp.int32(0), jnp.float32(1)]
    programs = (jax.make_jaxpr(test)(*values), jax.make_jaxpr(body)(*values))
    refusal = PortError("no second derivative", code="TPU104")
    return while_with_gradient(*programs, values, refusal)[0].sum()


def test_any_number_of_rounds() -> None:
    """Rounds fill the slots, thin them out once and more often, and fill those of a segment."""
    weight, start = jnp.array([0.9, 1.1, 0.5]), jnp.array([0.3, -0.2, 0.7])
    gradient = jax.jit(jax.grad(rounds, (1, 2)))

    @jax.jit
    def expected(count: Any, weight: Any, start: Any) -> Any:
        numbers = jnp.arange(1200)

        def step(x: Any, number: Any) -> Any:
            return jnp.where(number < count, jnp.tanh(x * weight) + 0.1 * x, x), None

        return lax.scan(step, start, numbers)[0].sum()

    wanted = jax.jit(jax.grad(expected, (1, 2)))
    for count in (0, 1, 31, 32, 33, 64, 65, 1024, 1025, 1200):
        pairs = zip(gradient(count, weight, start), wanted(count, weight, start), strict=True)
        for found, right in pairs:
            assert jnp.allclose(found, right, rtol=1e-5), count


class KnownFirst(nn.Module):
    """Python knows that there is a first round; each of its branches would be a path by itself."""

    def half(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x[0]
        return x / 2

    def forward(self, x: torch.Tensor) -> Any:
        t, rounds, self.last = torch.tensor(0.0), 0, x[1]
        while t < 1.0:
            if x.sum() > 4:
                x = self.half(x)
            if x.max() < 1:
                x = self.half(x) + 0.5
            if x.min() < 0.2:
                x = self.half(x) + 0.25
            t = t + 0.25 + x.min().sigmoid() / 4
            rounds += 1
        return x, rounds


class ShapedByTheFirst(nn.Module):
    """The first round gives a tensor another shape, so that Python has to run it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total, t = torch.zeros(1), torch.tensor(0.0)
        while t < 1.0:
            total = total + x
            t = t + x.abs().max()
        return total


@pytest.mark.parametrize("module", [KnownFirst, ShapedByTheFirst])
def test_rounds_that_python_knows(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    ported = tpuport.convert(module(), verify=False)
    for _ in range(2):
        x = torch.rand(3) * 3
        want, have = module()(x), tpuport.to_torch(ported(x))
        for one, other in zip(jax.tree.leaves(want), jax.tree.leaves(have), strict=True):
            torch.testing.assert_close(torch.as_tensor(other), torch.as_tensor(one))
