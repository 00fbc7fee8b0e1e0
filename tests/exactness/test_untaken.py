"""A branch that is not taken has no gradient, even where a derivative is infinite or NaN.

Each program computes a value before a branch, where its derivative is infinite for an element that
is 0, and uses it on some sides only. Eager PyTorch judges the gradients of each path, `None`
included.
"""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tpuport
from tpuport.training import value_and_grad

# w and v [3] with zeros in w, x [3] that decides.
Program = Callable[[Any, Any, Any], Any]


def after(pole: Callable[[Any, Any], Any]) -> Program:
    def program(w: Any, v: Any, x: Any) -> Any:
        y, z = pole(w, v), v * x
        if x[0] > 0:
            z = z + y
        return z * v

    return program


def two_branches(w: Any, v: Any, x: Any) -> Any:
    y, z = torch.sqrt(w), v * x
    if x[0] > 0:
        z = z + y
    if z.sum() > 1:  # depends on the first
        z = z * y
    return z


def own_condition(w: Any, v: Any, x: Any) -> Any:
    y = torch.sqrt(w) * v
    if y.sum() * x[0] > 0:
        return v * y
    return v * x


def chained(w: Any, v: Any, x: Any) -> Any:
    y, z = torch.sqrt(w), v * x
    u = v
    if x[0] > 0:
        u = y * v
    t = u / w
    if x[1] > 0:
        z = z + t
    return z


def nested(w: Any, v: Any, x: Any) -> Any:
    y, z = w / w, v * x
    if x[0] > 0:
        z = z * 2
        if z[1] > 0:
            z = z + y
    elif x[2] > 0:
        z = z - y.log()
    return z


def both_sides(w: Any, v: Any, x: Any) -> Any:
    y, z = torch.sqrt(w), v * x
    if x[0] > 0:
        z = z + y
    else:
        z = z - y[:1]
    return z


def used_anyway(w: Any, v: Any, x: Any) -> Any:
    y, z = torch.sqrt(w), v * x
    if x[0] > 0:
        z = z + y
    return z + y.log()


def unused_result(w: Any, v: Any, x: Any) -> Any:
    y, z, kept = torch.sqrt(w), v * x, v
    if x[0] > 0:
        kept = y
    else:
        kept = (w / w).log()
    return z + kept.detach()


def recomputed(w: Any, v: Any, x: Any) -> Any:
    y = torch.sqrt(w)

    def block(v: Any) -> Any:
        z = v * x
        if z[0] > 0:
            z = z + y
        return z * z

    return checkpoint(block, v, use_reentrant=False)


def inner_gradient(w: Any, v: Any, x: Any) -> Any:
    z = after(lambda w, v: w.sqrt())(w, v, x)
    grad, _other = torch.autograd.grad(z.sum(), [w, v], allow_unused=True)
    return v * x if grad is None else v * grad


PROGRAMS: dict[str, Program] = {
    "a/a": after(lambda w, v: w / w),
    "sqrt": after(lambda w, v: w.sqrt()),
    "log": after(lambda w, v: w.log() * v),
    "norm": after(lambda w, v: (w * 0).norm()),
    "infinite factor": after(lambda w, v: (v / w.detach()) * w),
    "product": after(lambda w, v: w.sqrt() @ v.outer(v)),
    "power": after(lambda w, v: w**0.5),
    **{p.__name__: p for p in (two_branches, own_condition, chained, nested, both_sides)},
    "constant side": lambda w, v, x: (v * x if x[0] > 0 else torch.zeros(3)) + v,
    **{p.__name__: p for p in (used_anyway, unused_result, recomputed)},
    "inner_gradient": inner_gradient,
}


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.0, 4.0, 0.0]))
        self.v = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.program = program

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.program(self.w, self.v, x)


PATHS = [[a, b, c] for a in (-1.0, 1.5) for b in (-1.0, 1.5) for c in (-1.0, 1.5)]


def of_eager(program: Program, x: list[float]) -> dict[str, Any]:
    model = Model(program)
    model(torch.tensor(x)).sum().backward()
    return {n: None if p.grad is None else p.grad.numpy() for n, p in model.named_parameters()}


def check(want: dict[str, Any], have: dict[str, Any], where: Any) -> None:
    for name, value in want.items():
        got = np.asarray(have[name])
        expected = np.zeros_like(got) if value is None else value
        finite = np.where(np.isfinite(expected), expected, 0)
        noise = 1e-6 * np.abs(finite).max()  # of sums whose terms nearly cancel
        said = f"{name} at {where}"
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=noise, err_msg=said)


# Other functions in the place of "sqrt"; test_special_points.py has each where it is taken.
SLOW = {"log", "product", "power", "infinite factor"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PROGRAMS]
)
def test_gradients_of_each_path(name: str):
    """By `jax.grad` of `apply`, and with the flags for None."""
    ported = tpuport.convert(Model(PROGRAMS[name]), verify=False)

    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(ported.apply(params, {}, None, x)[0])

    plain = jax.jit(jax.grad(loss))
    flagged = jax.jit(value_and_grad(lambda p, x: (loss(p, x), None)))
    for x in PATHS:
        want = of_eager(PROGRAMS[name], x)
        check(want, plain(ported.params, jnp.array(x)), x)
        _, grads, has_gradient = flagged(ported.params, jnp.array(x))
        check(want, grads, x)
        assert {n: bool(has_gradient[n]) for n in want} == {
            n: g is not None for n, g in want.items()
        }


class Initialised(nn.Module):
    """A module that takes a buffer from its first batch, and notes so in another."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("started", torch.tensor(False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.line(x)
        if not self.started:
            self.scale.copy_(x.detach().std(0))
            self.started.fill_(True)
        return x / self.scale


def test_a_branch_sets_a_buffer_to_a_constant():
    eager = Initialised()
    ported = tpuport.convert(copy.deepcopy(eager))
    buffers = ported.buffers
    for _ in range(3):
        x = torch.randn(6, 4)
        eager.zero_grad()
        eager(x).square().sum().backward()

        def loss(params: Any, buffers: Any, x: Any) -> Any:
            out, after = ported.apply(params, buffers, None, x)
            return jnp.sum(out**2), after

        step = jax.grad(loss, has_aux=True)
        grads, buffers = step(ported.params, buffers, jnp.asarray(x.numpy()))
        check({n: p.grad.numpy() for n, p in eager.named_parameters()}, grads, "this call")
        assert bool(buffers["started"])
