"""Gradients of custom functions are those of eager, however user code calls them.

Contents:
    CALLS               every way to reach `apply`: bound early, overridden, by keyword
    FUNCTIONS           what forward and backward may do: save, take lists, be decorated, be complex
    test_second_*       derivatives of derivatives go through backward, not through forward
    test_repeated_*     blocks that call a bound `apply` are one program
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

import tpuport
from tests.exactness.scenario import normal
from tpuport.foundation.errors import PortError

X = normal(3)


class Doubled(torch.autograd.Function):
    """Twice its input, with gradient seven."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 7


class WithSetup(torch.autograd.Function):
    """A function with a default argument and a separate context."""

    @staticmethod
    def forward(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.factor * 10, None


class Overridden(Doubled):
    @classmethod
    def apply(cls, x: torch.Tensor) -> Any:
        return super().apply(x) + 1


class Holder:
    bound = Doubled.apply


bound, with_setup, overridden = Doubled.apply, WithSetup.apply, Overridden.apply
table, partial = {"op": Doubled.apply}, functools.partial(WithSetup.apply, factor=2.0)


def _default(x: torch.Tensor, op: Any = Doubled.apply) -> Any:
    return op(x)


CALLS = {
    "by class": lambda x: Doubled.apply(x),
    "bound": lambda x: bound(x),
    "in a dict": lambda x: table["op"](x),
    "class attribute": lambda x: Holder.bound(x),
    "default argument": lambda x: _default(x),
    "partial": lambda x: partial(x),
    "overridden": lambda x: overridden(x),
    "with defaults": lambda x: with_setup(x),
    "by keyword": lambda x: bound(x=x),
    "setup by keyword": lambda x: WithSetup.apply(x, factor=0.5),
}


class Scaled(nn.Module):
    """A parameter, scaled by the input after a custom function."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.call(self.weight) * x).sum()


def _check(call: Any) -> None:
    """Compare the value and the parameter's gradient with eager."""
    model = Scaled(call)
    expected = model(X)
    expected.backward()
    ported = tpuport.convert(Scaled(call))

    def loss(params: Any) -> Any:
        return ported.apply(params, ported.buffers, None, X)[0]

    for value_and_grad in (jax.value_and_grad(loss), jax.jit(jax.value_and_grad(loss))):
        value, grads = value_and_grad(ported.params)
        np.testing.assert_allclose(value, expected.detach(), rtol=1e-6)
        np.testing.assert_allclose(grads["weight"], model.weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_gradient_however_apply_is_reached(name: str):
    _check(CALLS[name])


def test_a_bound_apply_in_a_script():
    weight = torch.arange(1.0, 4.0, requires_grad=True)
    with tpuport.porting():
        model = Scaled(bound)
        model(X).backward()
        assert torch.allclose(model.weight.grad.cpu(), 7 * X)
    bound(weight).sum().backward()
    assert weight.grad.tolist() == [7, 7, 7]
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


class Listed(torch.autograd.Function):
    """Tensors in lists have no gradient."""

    @staticmethod
    def forward(ctx: Any, tensors: Any, x: torch.Tensor) -> torch.Tensor:
        return tensors[0] * 2 + x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, grad * 7


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 7 * ctx.saved_tensors[0]


class ByVjp(torch.autograd.Function):
    boxed_grads_call = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x * 2, x * 3

    @staticmethod
    def vjp(ctx: Any, grads: Any) -> Any:
        return grads[0] * 5 - grads[1]


class Rotated(torch.autograd.Function):
    """A function of complex numbers."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        return z * (2 + 1j)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * (3 + 7j)


class Asked(torch.autograd.Function):
    """A function that asks which gradients are needed, and reads a constant argument."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        assert ctx.needs_input_grad == tuple(a.requires_grad for a in args)
        weight, fixed, table = args
        assert ctx.needs_input_grad == (True, False, False)
        steps = sum(1 for i in range(3) if table[i] > 0.5)  # decided on the host
        return weight * fixed * steps

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        assert ctx.needs_input_grad == (True, False, False)
        return grad * 11, None, None


class Marked(torch.autograd.Function):
    """One of its outputs has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        constant = x * 3
        ctx.mark_non_differentiable(constant)
        return x * 2, constant

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        return first * 7 + second


class Wrote(torch.autograd.Function):
    """What it saved is the input as forward left it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class WithOthers(torch.autograd.Function):
    """Returns what is no tensor between its tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x * 2, None, x * 3, 4

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        assert len(grads) == 4
        assert grads[1] is None
        assert grads[3] is None
        return grads[0] * 5 + grads[2] * 7


class InAList(torch.autograd.Function):
    """Returns a list, whose tensors have no gradient, beside a tensor that has one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return x * 2, [x * 3, x * 4]

    @staticmethod
    def backward(ctx: Any, grad: Any, of_list: Any) -> Any:
        assert of_list is None
        return grad * 5


class OnlyAList(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        return [x * 3, x * 4]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("no output has a gradient")


def _beside_others(w: torch.Tensor) -> torch.Tensor:
    first, nothing, second, number = WithOthers.apply(w)
    assert nothing is None
    return first * number + second


def _with_a_list(w: torch.Tensor) -> torch.Tensor:
    first, (second, third) = InAList.apply(w)
    assert not second.requires_grad
    return first * second + third


def _from_a_list(w: torch.Tensor) -> torch.Tensor:
    first, second = OnlyAList.apply(w)
    assert not first.requires_grad
    return w * first + second


def _second_output(w: torch.Tensor) -> torch.Tensor:
    first, second = Marked.apply(w)
    assert first.requires_grad
    assert not second.requires_grad
    return first * second


FUNCTIONS = {
    "tensors in a list": lambda w: Listed.apply([w], w * 2),
    "once differentiable": lambda w: OnceDifferentiable.apply(w),
    "vjp with boxed gradients": lambda w: sum(ByVjp.apply(w)),
    "complex": lambda w: torch.view_as_real(Rotated.apply(torch.fft.fft(w))).sum(1),
    "needs_input_grad": lambda w: Asked.apply(w, w.detach() + 1, torch.linspace(0, 1, 3)),
    "non-differentiable output": _second_output,
    "outputs that are no tensors": _beside_others,
    "a list as an output": _with_a_list,
    "a list alone": _from_a_list,
    "written input": lambda w: Wrote.apply(w * 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_of_what_functions_do(name: str):
    _check(FUNCTIONS[name])


def test_a_frozen_input_makes_a_frozen_output():
    def call(w: torch.Tensor) -> torch.Tensor:
        fixed = bound(w.detach())
        assert not fixed.requires_grad
        with torch.no_grad():
            assert not bound(w).requires_grad
            stopped = bound(w)
        return w * fixed * stopped

    _check(call)


def _complex_under_no_grad(w: torch.Tensor) -> torch.Tensor:
    z = torch.fft.fft(w)
    assert z.requires_grad
    with torch.no_grad():
        size = z.abs()
    real = torch.fft.ifft(z).real
    assert real.requires_grad
    with torch.no_grad():
        twice = real * 2
    return size * w + twice * w + z.detach().abs() * w


def test_no_grad_stops_gradients_of_complex_numbers():
    _check(_complex_under_no_grad)


class Exponential(torch.autograd.Function):
    """It saves its output, whose own gradient is its backward's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = x.exp()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return 3 * grad * ctx.saved_tensors[0]


class Squared(torch.autograd.Function):
    """It saves its input and what it computed on its way, which is a constant to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x * 2)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, twice = ctx.saved_tensors
        return 5 * grad * x * twice


@pytest.mark.parametrize("function", [Doubled, Exponential, Squared])
def test_second_derivatives_go_through_the_backward(function: Any):
    def program(x: torch.Tensor) -> torch.Tensor:
        return (function.apply(x) ** 2 * x).sum()

    expected = torch.autograd.functional.hessian(program, X)
    ported = tpuport.convert(program)
    gradient = jax.grad(lambda x: ported.apply({}, {}, None, x)[0])
    for hessian in (jax.jacrev(gradient), jax.jit(jax.jacrev(gradient))):
        np.testing.assert_allclose(hessian(X.numpy()), expected, rtol=1e-5, atol=1e-5)


class BoundBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return bound(self.linear(x)).tanh()


def test_repeated_blocks_share_a_program_and_its_backward():
    torch.manual_seed(0)
    model = nn.Sequential(*(BoundBlock() for _ in range(4)))
    expected = model(X)
    expected.sum().backward()
    ported = tpuport.convert(model)
    gradient = jax.grad(lambda p: ported.apply(p, ported.buffers, None, X)[0].sum())
    grads = jax.jit(gradient)(ported.params)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(grads[name], parameter.grad, rtol=1e-4, atol=1e-5)


class MarkedDirty(torch.autograd.Function):
    """Marks its input and writes it only with more than one row (fairscale with one process)."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2.0) if x.shape[0] > 1 else x

    @staticmethod
    def backward(ctx, g):
        return g * 7.0


@pytest.mark.parametrize("rows", [1, 2])
def test_a_function_may_mark_its_input_as_written(rows):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x):
            y = self.layer(x)
            z = MarkedDirty.apply(y)
            z += 1.0  # the input itself
            return y, z

    net, x = Net(), torch.linspace(-1, 1, 3 * rows).reshape(rows, 3)
    ported = tpuport.convert(net)
    with torch.no_grad():
        expected = net(x)
        for _ in range(2):
            torch.testing.assert_close(tpuport.to_torch(ported(x)), expected)
    with tpuport.porting(), torch.inference_mode():
        got = net.cuda()(x.cuda())
        torch.testing.assert_close(tuple(one.cpu() for one in got), expected)
    own = Net()
    asking = tpuport.convert(own)
    slope = jax.grad(lambda p: sum(o.sum() for o in asking.apply(p, {}, None, x)[0]))
    found = jax.jit(slope)(asking.params)
    sum(out.sum() for out in own(x)).backward()
    for name, parameter in own.named_parameters():
        np.testing.assert_allclose(found[name], parameter.grad, rtol=1e-4, atol=1e-5)


class OfNeeded(torch.autograd.Function):
    """Gives gradients only to what needs one, as kernels with two products do."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return (
            g * w * 3 if ctx.needs_input_grad[0] else None,
            g * x * 4 if ctx.needs_input_grad[1] else None,
        )


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize("inner", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_an_argument_that_jax_differentiates_needs_a_gradient(outer, inner):
    ported = tpuport.convert(OfNeeded.apply, verify=False)
    x, w = jnp.arange(3.0), jnp.arange(3.0) + 5

    @inner
    def total(x, w):
        return ported.apply({}, {}, None, x, w)[0].sum()

    for places, want in (((0, 1), [w * 3, x * 4]), (0, w * 3), (1, x * 4)):
        found = outer(jax.grad(total, places))(x, w)
        for have, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(have, expected)


class Gathered(torch.autograd.Function):
    """Reads what it saved at places that only the backward computes."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(x, places)
        return x * 1

    @staticmethod
    def backward(ctx, g):
        x, places = ctx.saved_tensors
        return g * x[places * 1000000000], None


@pytest.mark.parametrize("places", [[0, 0], [0, 1], [0, 7]], ids=["right", "outside", "64 bits"])
def test_gradients_are_nan_where_a_check_in_a_backward_fails(places):
    ported, x = tpuport.convert(Gathered.apply, verify=False), jnp.asarray([2.0, 3.0])
    places = torch.tensor(places)
    try:  # around the call, not in it
        found = jax.grad(lambda x: ported.apply({}, {}, None, x, places)[0].sum())(x)
    except IndexError:
        found = None
    assert found is not None
    assert np.isnan(found).all() == bool(places.any())


def _checked(x):
    if not torch.equal(x[:1], x[:1].abs()):
        raise ValueError("the first element is negative")
    return x


class Branching(torch.autograd.Function):
    """Its backward branches on values, in a function that checks them, too."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        if (x > 1).all():
            return g * 3
        if x.sum() > 2:
            return g * 5 * _checked(x)
        return _checked(g) * 7


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return Branching.apply(self.weight * x)


def test_a_backward_may_branch_on_values():
    values = ([2.0, 3, 4], [1.0, 2, 3], [1.0, 0, 0])
    eager, ported = Branches(), tpuport.convert(Branches())

    def total(params, x):
        return ported.apply(params, ported.buffers, None, x)[0].sum()

    gradient, wanted = jax.jit(jax.grad(total)), []
    for x in map(torch.tensor, values):
        eager.zero_grad()
        eager(x).sum().backward()
        wanted.append(eager.weight.grad.clone())
        found = gradient(ported.params, jnp.asarray(x.numpy()))["weight"]
        np.testing.assert_allclose(found, wanted[-1])
    failed = gradient(ported.params, jnp.asarray([-1.0, 2, 3]))["weight"]
    assert np.isnan(failed).all()  # where eager PyTorch raises ValueError
    with tpuport.porting() as run:
        model = Branches().to("cuda")
        for x, want in zip(map(torch.tensor, values), wanted, strict=True):
            model.zero_grad()
            model(x.cuda()).sum().backward()
            assert torch.equal(model.weight.grad.cpu(), want)
    assert not run.report.descended


class Adding(torch.autograd.Function):
    """Its backward branches, and adds to the gradients of a layer of its own."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(g)
        return (x.grad if x.sum() > 0 else x.grad * 2), None


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return Adding.apply(self.first(x), self.layer)


def test_a_backward_that_branches_and_adds_to_gradients_is_refused():
    ported, x = tpuport.convert(Adds(), verify=False), jnp.ones((2, 3))
    ported(x)

    def total(params):
        return ported.apply(params, ported.buffers, None, x)[0].sum()

    with pytest.raises(PortError, match="the truth of a traced value"):
        jax.grad(total)(ported.params)


def test_a_backward_that_returns_too_few_gradients_is_named():
    class Few(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):
            return x * factor

        @staticmethod
        def backward(ctx, g):
            return g

    ported = tpuport.convert(lambda x: Few.apply(x, 2), verify=False)
    with pytest.raises(PortError, match="expected 2, got 1") as caught:
        jax.grad(lambda x: ported.apply({}, {}, None, x)[0].sum())(jnp.ones(2))
    assert caught.value.source_line == "return g"


class Reversal(torch.autograd.Function):
    """Keeps numbers of the program for its backward, as gradient reversal does its factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float, options: dict[str, Any]) -> torch.Tensor:
        ctx.factor, ctx.more, ctx.fixed = factor * 0.5, [options["times"], {"sign": -1}], 3
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        times, sign = ctx.more
        return ctx.factor * times * sign["sign"] * ctx.fixed * grad, None, None


class Annealed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.calls = nn.Linear(3, 3), how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.how == "counted":
            factor = 2 / (1 + math.exp(-self.calls / 5)) - 1
        else:
            factor = x.abs().max().item()
        options = {"times": self.calls + 1}
        return Reversal.apply(self.linear(x), factor, options) * 2


def _reversed(device: str, how: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Annealed(how).to(device)
    for seed in range(4):
        torch.manual_seed(seed)
        model(torch.randn(2, 3).to(device)).square().sum().backward()
    return [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize("how", ["counted", "data"])
def test_a_backward_reads_numbers_of_the_program(how: str):
    """It read those of the trace of the forward: jax called them unexpected tracers."""
    with tpuport.porting():
        ours = _reversed("cuda", how)
    torch.testing.assert_close(ours, _reversed("cpu", how))


class Summed(torch.autograd.Function):
    """Sums gradients over its calls, in memory that all of them have."""

    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.total = total
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.total.data[:] += grad
        return None, ctx.total.clone()


class Summing(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where, self.list = nn.Linear(3, 3), where, [torch.zeros(3)]
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = {
            "new": lambda: torch.zeros(3),
            "traced": lambda: x[0] * 0,
            "list": lambda: self.list[0],
            "buffer": lambda: self.kept,
        }
        total = places[self.where]()
        for row in self.linear(x):
            x = x + Summed.apply(total, row)
        return x.square()


@pytest.mark.parametrize("where", ["new", "traced", "list", "buffer"])
def test_a_backward_that_writes_what_other_calls_read_is_refused(where: str):
    """Each call had a copy of its own: gradients were others without an error."""
    ported, x = tpuport.convert(Summing(where), verify=False), normal(2, 3)
    with pytest.raises(PortError, match="writes to a tensor from outside of it") as caught:
        jax.grad(lambda p: ported.apply(p, ported.buffers, None, x)[0].sum())(ported.params)
    assert caught.value.source_line == "ctx.total.data[:] += grad"
    assert "eager=" in str(caught.value)


class Scratch(torch.autograd.Function):
    """Writes in its backward what nobody else has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(2 * x)
        return x**2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (slope,), total = ctx.saved_tensors, torch.zeros(3)
        total += grad
        slope.mul_(total)
        return slope.add_(torch.ones(3).mul_(3) * grad)


def test_a_backward_may_write_what_it_or_its_forward_made():
    x = normal(3).requires_grad_()
    Scratch.apply(x).sum().backward()
    ported = tpuport.convert(Scratch.apply, verify=False)
    found = jax.grad(lambda x: ported.apply({}, {}, None, x)[0].sum())(jnp.asarray(x.detach()))
    np.testing.assert_allclose(found, x.grad)


class Quadrupled(torch.autograd.Function):
    """A function that `vmap` derives a class from, which returns where its batch is, too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 4 * ctx.saved_tensors[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_vmap_takes_a_custom_function(depth: int):
    rows = functools.reduce(lambda f, _: torch.func.vmap(f), range(depth), Quadrupled.apply)
    x = normal(2, 3).requires_grad_()
    (rows(x) * x).sum().backward()
    ported = tpuport.convert(lambda x: rows(x) * x)
    found = jax.grad(lambda x: ported.apply({}, {}, None, x)[0].sum())(jnp.asarray(x.detach()))
    np.testing.assert_allclose(found, x.grad, rtol=1e-6)
