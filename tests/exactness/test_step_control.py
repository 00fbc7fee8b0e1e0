"""Python control of step sizes and lookups by numbers that depend on the inputs.

Contents:
    PROGRAMS          outcomes of unlike kinds, lookups by a traced number, grad modes
    test_math_*       the functions of `math`, and the errors that they raise
    test_refused_*    the message names the line of the branch, or of the draw
"""

import math
import random
from collections.abc import Callable
from math import isfinite, sqrt
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError

INPUTS = [[0.3, 0.5, -0.2], [-0.3, -0.5, -0.2], [3.0, 5.0, -0.2], [8.0, 3.0, 5.0]]


class _Run(nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.parts = nn.ModuleList([nn.Identity(), nn.ReLU(), nn.Tanh()])
        self.run = run

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def _accepted(m: _Run, x: torch.Tensor) -> torch.Tensor:
    """dopri5's test of a step: a tensor or a plain bool; a factor likewise."""
    accept = x.abs().max() <= 1
    factor: Any = x.abs().max() * 0.5
    if x.sum() > 10.0:
        accept, factor = False, 0.2
    if x.sum() <= 0.0:
        accept = True
    return m.weight * x if accept else m.weight * x * factor


def _interval(m: _Run, x: torch.Tensor) -> torch.Tensor:
    """An index that stays in range, moved on by a test."""
    times, index = torch.arange(5.0), 1
    for k in range(3):
        if x.sum() >= k:
            index = min(index + 1, len(times) - 1)
        x = x + times[index] * m.weight
    return x


def _entries(m: _Run, x: torch.Tensor) -> torch.Tensor:
    """Lists, texts and modules by a traced number, which is the same one at each use."""
    index = int(x.argmax())
    factor = [1.0, 2.0, 3.0][index] + len("abc"[: index + 1])
    return m.parts[index](x) * factor * [m.weight, m.weight * 2, m.weight.detach()][index]


def _nothing(m: _Run, x: torch.Tensor) -> torch.Tensor:
    """A number on one side and nothing on the other."""
    count = None
    if x.sum() > 0:
        count = 3
    return m.weight * x if count is None else m.weight * x * count


def _mode(m: _Run, x: torch.Tensor) -> torch.Tensor:
    """A grad mode by a traced value."""
    with torch.set_grad_enabled(bool(x.sum() > 0)):
        y = m.weight * x
    return y + m.weight


def _generated(m: _Run, x: torch.Tensor) -> torch.Tensor:
    """Branches in a generator and a closure."""

    def parts() -> Any:
        for k in range(2):
            yield x * k if x.sum() > k else x + k

    def stepped(y: torch.Tensor) -> torch.Tensor:
        return y * 2 if y.sum() > 0 else y - m.weight

    return stepped(sum(parts()))


PROGRAMS = [_accepted, _interval, _entries, _nothing, _mode, _generated]


@pytest.mark.parametrize("run", PROGRAMS, ids=lambda run: run.__name__[1:])
def test_values_and_gradients_are_those_of_eager(run: Callable[..., Any]):
    ported = tpuport.convert(_Run(run), verify=False)

    def loss(params: Any, x: Any) -> Any:
        out = ported.apply(params, ported.buffers, None, x)[0]
        return (out * out).sum(), out

    step = jax.jit(jax.grad(loss, has_aux=True))
    for given in INPUTS:
        model, x = _Run(run), torch.tensor(given)
        expected = model(x)
        if expected.requires_grad:
            (expected * expected).sum().backward()
        grads, out = step(ported.params, x.numpy())
        np.testing.assert_allclose(out, expected.detach(), rtol=1e-5)
        found = model.weight.grad
        want = torch.zeros(3) if found is None else found
        np.testing.assert_allclose(grads["weight"], want, rtol=1e-5)


_OF_ONE = (
    *("sqrt", "exp", "exp2", "log", "log2", "log10", "log1p", "expm1", "sin", "cos", "tan"),
    *("asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "atanh", "fabs", "degrees"),
    *("radians", "cbrt", "gamma", "lgamma", "erf", "erfc", "floor", "ceil", "trunc"),
)
_OF_TWO = ("pow", "fmod", "atan2", "hypot", "copysign", "log")


def _of_math(x: torch.Tensor) -> torch.Tensor:
    a, b = x[0].item(), x[1].item()
    found = [getattr(math, name)(a) for name in _OF_ONE]
    found += [getattr(math, name)(a, b) for name in _OF_TWO]
    found += [math.acosh(1 + a), math.sqrt(x[0]), math.pow(2, a), math.sqrt(4.0), sqrt(b)]
    found = [float(one) for one in found]
    tests = [math.isnan(a), math.isinf(a), isfinite(b), math.isclose(a, b, rel_tol=0.5)]
    return torch.tensor(found) + 0 * x[0], torch.tensor(tests)


def test_math_functions_are_those_of_python():
    ported = tpuport.convert(_of_math, verify=False)
    for given in ([0.3, 0.4], [0.75, 0.125]):
        for got, want in zip(
            ported(torch.tensor(given)), _of_math(torch.tensor(given)), strict=True
        ):
            torch.testing.assert_close(tpuport.to_torch(got), want, rtol=2e-5, atol=1e-6)


def test_math_functions_raise_where_pythons_do():
    def rooted(x: torch.Tensor) -> torch.Tensor:
        return x * math.sqrt(x.sum().item()) * math.log(x[0].item())

    ported = tpuport.convert(rooted, verify=False)
    for given in ([1.0, -3.0], [0.0, 1.0]):
        for run in (rooted, ported):
            with pytest.raises(ValueError, match="math domain error"):
                run(torch.tensor(given))
    torch.testing.assert_close(
        tpuport.to_torch(ported(torch.tensor([2.0, 2.0]))), rooted(torch.tensor([2.0, 2.0]))
    )


def _many(m: _Run, x: torch.Tensor) -> Any:
    found = []
    for k in range(40):
        if x.sum() > k:
            found.append(k)  # a list of another length on each path
    return x * len(found), found


def _by_key(m: _Run, x: torch.Tensor) -> Any:
    return x * {0: 1.0, 1: 2.0, 2: 3.0}[int(x.argmax())]


def _drawn(m: _Run, x: torch.Tensor) -> Any:
    y = x * 2
    if x.sum() > 0:
        y = y * random.sample([1, 2], 1)[0]
    return y * 2


def _drawn_by_numpy(m: _Run, x: torch.Tensor) -> Any:
    y = x * 2
    if x.sum() > 0:
        y = y * float(np.random.rand(1)[0])
    return y


REFUSED = {
    _many: ("TPU101", "if x.sum() > k:", "--eager NAME"),
    _by_key: ("TPU103", "[int(x.argmax())]", "pass it as a Python number"),
    _drawn: ("TPU404", "random.sample([1, 2], 1)[0]", "draw before the call"),
    _drawn_by_numpy: ("TPU404", "np.random.rand(1)[0]", "draw before the call"),
}


@pytest.mark.parametrize("run", REFUSED, ids=lambda run: run.__name__[1:])
def test_refused_at_the_innermost_line(run: Callable[..., Any]):
    code, line, remedy = REFUSED[run]
    with pytest.raises(PortError) as refused:
        tpuport.convert(nn.Sequential(nn.Identity(), _Run(run)), verify=False)(torch.ones(3))
    assert refused.value.code == code
    assert line in str(refused.value.source_line)
    assert remedy in str(refused.value)
