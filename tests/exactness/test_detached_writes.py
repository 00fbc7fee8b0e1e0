"""Writes with a gradient to detached tensors: they share memory with others, and no gradient."""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError

# a [3, 4] computed from the weight, w [4, 4] the weight, x [3, 4] the input.
Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
ROWS = torch.tensor([True, False, True])
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


@program
def whole(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b = a.detach()
    b.mul_(w[:3])
    c = a * b
    return a, b, c


@program
def row(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b = a.detach()
    b[0] *= w[0]
    return a, b


@program
def rows_of_a_mask(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b = a.detach()
    b[ROWS] *= w[:2]
    b[~ROWS] += x[:1]
    return a, b


@program
def elements_of_a_mask(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b = a.detach()
    b[x > 0] = w.sum()
    return a, b, b[x > 0].sum() * w[0]


@program
def copied(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b = a.detach()
    b.copy_(w[:3])
    return a, b


@program
def scattered(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b = a.detach()
    b.index_add_(0, torch.tensor([0, 2]), w[:2])
    b.scatter_add_(0, torch.zeros(3, 4, dtype=torch.long), w[:3])
    b.masked_fill_(ROWS[:, None] & (x > 0), w.sum())
    return a, b


@program
def of_a_constant(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    out = torch.zeros(3, 4)
    b, view = out.detach(), out[1]
    b[0] = w[0]
    out[1] = w[1]
    for i in range(2):
        out.data[i + 1, 2:] = w[i, 2:] * 2
    return out, b, b * b, view * w[2]


@program
def views_of_a_constant(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    out = torch.zeros(12)
    rows = out.view(3, 4)
    last = rows[2]
    out[:4] = w[0]
    kept = nn.Parameter(out)
    rows[1] = w[1]
    return rows.t()[:, :3], out.view(3, 4), last, kept.view(3, 4) * w.sum()


@program
def through_views(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b = a.detach()
    c = b[0]
    c.mul_(w[0])
    d = a[1].detach()
    d.mul_(w[1])
    e = b.view(4, 3).t().detach()
    e[1:].mul_(w[:2])
    return a, b, c, d, e


@program
def in_place(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    a = a * 1
    a.detach_()
    a[ROWS] *= w[:2]
    return a


@program
def again(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b = a.detach()
    b += w[0]
    c = b.detach()
    c *= w[1]
    return a, b, c


@program
def two_of_one(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b, c = a.detach(), a.detach()
    b[0] = w[0]
    c[1] = w[1]
    return a, b, c


@program
def the_other_later(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    a = a * 1
    b = a.detach()
    b[0] = w[0]
    a.mul_(2)
    return a, b


@program
def without_grad(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b = a.detach()
    b[0] = w[0]
    with torch.no_grad():
        b[1] = w[1]
        b.mul_(2)
    return a, b


@program
def in_a_branch(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b = a.detach()
    c = b[0]
    if x[0, 0] > 0:
        c *= w[0]
    else:
        b *= 2
    if x[0, 1] > 0:
        b[1] += w[2]
    return a, b * 1, c


@program
def detached_in_a_branch(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b = a.detach()
    if x[0, 0] > 0:
        b = a.detach()
        b *= w[:3]
    return a, b


@program
def kept_state(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    h, outs = torch.zeros(3, 4), []
    for t in range(4):
        h[t % 3] = torch.tanh(x[t % 3] @ w + h[t % 3])
        outs.append(h.sum())
        if t % 2:
            h = h.detach()
    return torch.stack(outs), h


@program
def kept_rows(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    h = a.detach()
    for _ in range(2):
        moved = h.sum(1) > 0
        h[moved] = h[moved] @ w
        h = h.detach()
        h[~moved] += w.sum(0)
    return a, h


@program
def complex_numbers(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    b = torch.complex(a, a).detach()
    b[0] = torch.complex(w[0], w[1])
    return torch.view_as_real(b)


@program
def shallow_copies(a: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> Any:
    a = a * 1
    b, row, kept = copy.copy(a), copy.copy(a[1]), copy.copy(w)
    with torch.no_grad():
        b[0] *= 2
        row += 1
    return a, a * b, kept * x.sum(), row


# A branch runs all that follows it once more, so that these are models by themselves.
BRANCHES = ["in_a_branch", "detached_in_a_branch"]
GROUPS = [[name for name in PROGRAMS if name not in BRANCHES], *([name] for name in BRANCHES)]


class Model(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(np.arange(16) % 5 - 1.75).float().view(4, 4))
        self.names = names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss [programs] of each program."""
        return torch.stack([loss(PROGRAMS[name](x @ self.w, self.w, x)) for name in self.names])


def loss(out: Any) -> torch.Tensor:
    outs = out if isinstance(out, tuple) else (out,)
    return sum((part.square() * torch.arange(1, 5)[: part.shape[-1]]).sum() for part in outs)


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
def test_gradients_of_what_is_written(names: list[str]):
    ported = tpuport.convert(Model(names))
    slopes = jax.jit(jax.jacrev(lambda p, x: ported.apply(p, {}, None, x)[0], (0, 1)))
    for signs in ((1, 1), (1, -1), (-1, 1)) if names[0] in BRANCHES else ((1, 1),):
        x = torch.tensor(np.arange(12) * 7 % 11 / 8 - 0.6).float().view(3, 4)
        x[0, :2] = x[0, :2].abs() * torch.tensor(signs)
        torch.testing.assert_close(tpuport.to_torch(ported(x)), Model(names)(x).detach())
        of_params, of_x = slopes(ported.params, jnp.asarray(x.numpy()))
        for number, name in enumerate(names):
            model, given = Model(names), x.clone().requires_grad_()
            model(given)[number].backward()
            for want, got in ((model.w.grad, of_params["w"]), (given.grad, of_x)):
                expected = np.zeros(got.shape[1:]) if want is None else want.numpy()
                np.testing.assert_allclose(got[number], expected, 1e-4, 1e-4, err_msg=name)


def test_whether_a_gradient_is_required():
    class Asked(Model):
        def forward(self, x: torch.Tensor) -> Any:
            a = x @ self.w
            b = a.detach()
            c, before = b[0], b.requires_grad
            c.mul_(self.w[0])
            return a.requires_grad, before, b.requires_grad, c.requires_grad, b.is_leaf

    x = torch.ones(3, 4)
    assert tpuport.convert(Asked([]))(x) == Asked([])(x) == (True, False, True, True, False)


class Kind(torch.Tensor):
    """A class of a script's own."""


class Copying(nn.Module):
    """A module that makes shallow copies of an argument, a buffer, a weight and a result."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        made, seen = x * self.w, copy.copy(self.seen)
        made.tag, seen.tag = ["one"], "two"
        seen += x.sum(0)
        again, weight = copy.copy(made), copy.copy(self.w)
        named = (x * 2).as_subclass(Kind)
        named.tag = 3
        other = copy.copy(named)
        other += 1
        facts = (again.tag is made.tag, copy.copy(seen).tag, again.is_leaf, again.requires_grad)
        kinds = type(weight) is nn.Parameter, type(other) is Kind, other.tag
        (slope,) = torch.autograd.grad((again**2).sum(), again)
        return facts, kinds, slope, named + 0, copy.copy(x)


def test_a_shallow_copy_is_a_leaf_with_the_attributes_on_the_same_memory():
    ported, eager = tpuport.convert(Copying()), Copying()
    for x in (torch.arange(6.0).view(2, 3), torch.ones(2, 3)):
        (facts, kinds, *want), got = eager(x), ported(x)
        assert got[:2] == (facts, kinds) == ((True, "two", True, True), (True, True, 3))
        for have, value in zip(got[2:], want, strict=True):
            torch.testing.assert_close(tpuport.to_torch(have), value.detach(), check_stride=False)
    np.testing.assert_allclose(ported.buffers["seen"], eager.seen)
    result = ported(torch.ones(2, 3))[2]
    beside = copy.copy(result)
    beside += 1
    torch.testing.assert_close(tpuport.to_torch(result), torch.full((2, 3), 3.0))
    with tpuport.porting():
        module = Copying().cuda()
        out = module(torch.ones(2, 3).cuda())
        assert out[:2] == (facts, kinds)
        torch.testing.assert_close(module.seen.cpu(), torch.full((3,), 2.0))


def test_windows_of_a_detached_tensor_are_refused():
    class Windows(Model):
        def forward(self, x: torch.Tensor) -> Any:
            b = (x @ self.w).detach()
            b.as_strided((2, 2), (4, 1)).mul_(self.w[:2, :2])
            return b

    with pytest.raises(PortError, match="through as_strided of a detached tensor"):
        tpuport.convert(Windows([]))(torch.ones(3, 4))


class Restarted(nn.Module):
    """A detached part is asked for gradients and looked at by its memory, as by adjoint solvers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.zeros(3, 3)
        rows[0], rows[1:] = self.lin(x)[0], self.lin(x)[1:] * 2
        part = rows[1].detach().requires_grad_(True)
        with torch.enable_grad():
            window = torch.as_strided(part, (2,), (2,))
            (slope,) = torch.autograd.grad((window**3).sum() + part[1] ** 2, part)
        return slope * self.lin(x), window


def test_a_window_of_a_detached_tensor_with_a_gradient_of_its_own():
    torch.manual_seed(0)
    net, x = Restarted(), torch.randn(3, 3)
    ported = tpuport.convert(net)
    for one in (x, -x):
        got = ported(one)
        for have, want in zip(got, net(one), strict=True):
            torch.testing.assert_close(tpuport.to_torch(have), want, rtol=1e-5, atol=1e-6)
    net(x)[0].square().sum().backward()

    def loss(params: Any) -> jax.Array:
        out, _ = ported.apply(params, ported.buffers, None, jnp.asarray(x.numpy()))
        return (out[0] ** 2).sum()

    found = jax.jit(jax.grad(loss))(ported.params)
    for name, weight in net.named_parameters():
        np.testing.assert_allclose(found[name], weight.grad, rtol=1e-4, atol=1e-6)
