"""Custom functions whose backward runs modules again, and gradients taken inside a program.

Contents:
    MODELS            checkpointing functions, reversible layers, hooks, inner backward()
    test_refused_*    what would leave a gradient, or state, outside of the program
"""

import functools
import itertools
import warnings
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import func, nn
from torch.autograd import functional
from torch.utils.checkpoint import CheckpointFunction

import tpuport
from tests.exactness.scenario import normal
from tpuport.foundation.errors import PortError
from tpuport.training import from_torch, make_train_step

X = normal(3, 4)


class Checkpoint(torch.autograd.Function):
    """OpenAI's activation checkpointing: the weights are inputs too."""

    @staticmethod
    def forward(ctx: Any, run: Any, length: int, *args: Any) -> Any:
        ctx.run = run
        ctx.input_tensors, ctx.input_params = list(args[:length]), list(args[length:])
        with torch.no_grad():
            return ctx.run(*ctx.input_tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.input_tensors = [x.detach().requires_grad_(True) for x in ctx.input_tensors]
        with torch.enable_grad():
            shallow = [x.view_as(x) for x in ctx.input_tensors]
            out = ctx.run(*shallow)
        found = torch.autograd.grad(
            out, ctx.input_tensors + ctx.input_params, grads, allow_unused=True
        )
        del ctx.input_tensors, ctx.input_params, out
        return (None, None, *found)


class Checkpointed(nn.Module):
    """Two blocks that are checkpointed as guided-diffusion does; one weight is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.unused = nn.Parameter(torch.ones(3))

    def _block(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return x + layer(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            weights = [*layer.parameters(), self.unused]
            x = Checkpoint.apply(lambda x, f=layer: self._block(x, f), 1, x, *weights)
        return x


class _Delegating(torch.autograd.Function):
    """Activation checkpointing by torch's own function, as for moving activations to the host."""

    @staticmethod
    def forward(ctx: Any, run: Any, keep: bool, *args: Any) -> Any:
        return CheckpointFunction.forward(ctx, run, keep, *args)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return CheckpointFunction.backward(ctx, *grads)


class Reentrant(nn.Module):
    """Blocks whose backward calls `backward()`, which `torch.autograd.grad` does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        x = CheckpointFunction.apply(self.layers[1], True, x).tanh()
        return _Delegating.apply(self.layers[2], True, x).tanh()


class _Kept(nn.Module):
    """A network that draws the numbers of an earlier run again, as Reformer's does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2), nn.Dropout(0.4), nn.GELU())
        self.state: Any = None

    def forward(self, x: torch.Tensor, *, again: bool = False) -> torch.Tensor:
        if not again:
            self.state = torch.get_rng_state()
            return self.net(x)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            return self.net(x)


class _ReversibleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = _Kept(), _Kept()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        with torch.no_grad():
            y1 = x1 + self.f(x2)
            y2 = x2 + self.g(y1)
        return torch.cat([y1, y2], -1)

    def backward_pass(self, y: torch.Tensor, dy: torch.Tensor) -> Any:
        y1, y2 = y.chunk(2, -1)
        dy1, dy2 = dy.chunk(2, -1)
        with torch.enable_grad():
            y1.requires_grad = True
            gy1 = self.g(y1, again=True)
            torch.autograd.backward(gy1, dy2)
        with torch.no_grad():
            x2 = y2 - gy1
            dx1 = dy1 + y1.grad
            y1.grad = None
        with torch.enable_grad():
            x2.requires_grad = True
            fx2 = self.f(x2, again=True)
            fx2.backward(dx1, retain_graph=True)
        with torch.no_grad():
            x1 = y1 - fx2
            dx2 = dy2 + x2.grad
            x2.grad = None
            return torch.cat([x1, x2.detach()], -1), torch.cat([dx1, dx2], -1)


class _ReversibleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: Any) -> torch.Tensor:
        for block in blocks:
            x = block(x)
        ctx.y, ctx.blocks = x.detach(), blocks
        return x

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        y = ctx.y
        for block in ctx.blocks[::-1]:
            y, dy = block.backward_pass(y, dy)
        return dy, None


class Reversible(nn.Module):
    """Reversible layers after a branch on a buffer that the branch changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(_ReversibleBlock() for _ in range(2))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls >= 1:
            self.scale.copy_(self.scale * 2)
            self.calls.zero_()
        else:
            self.calls += 1
        return _ReversibleFunction.apply(self.first(x) * self.scale, self.blocks)


class Hooked(nn.Module):
    """Hooks on a parameter and on intermediate tensors, in their order; one was removed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.weight.register_hook(lambda g: g * 100)
        self.linear.weight.register_hook(lambda g: g + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        y.register_hook(lambda g: g * 3 + 1)
        y.register_hook(lambda g: g.clamp(-1, 1))
        y.register_hook(lambda g: g * 9).remove()
        view = y[1:]
        view.register_hook(lambda g: g * self.linear.bias)
        return (y * y).sum() + view.sin().sum()


class Penalty(nn.Module):
    """Gradients with respect to a leaf, and a tensor that it was made of, inside the program."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        leaf = x.detach().requires_grad_()
        hidden = leaf * 2
        hidden.retain_grad()
        score = self.critic(hidden.tanh()).sum() + (leaf**3).sum()
        grads = torch.autograd.grad(score, [leaf, hidden], create_graph=True)
        score.backward(inputs=[leaf, hidden], retain_graph=True)
        score.backward(inputs=leaf, retain_graph=True)
        nothing = torch.autograd.grad(score, hidden.detach().requires_grad_(), allow_unused=True)
        assert nothing == (None,)
        penalty = sum((g.norm(dim=1) - 1).square().sum() for g in grads)
        return score + penalty, leaf.grad, hidden.grad


class _Adjoint(torch.autograd.Function):
    """An ODE whose backward integrates back, as torchdiffeq does; its times are constants."""

    @staticmethod
    def forward(ctx: Any, field: Any, y: torch.Tensor, times: torch.Tensor, *weights: Any) -> Any:
        ctx.field = field
        with torch.no_grad():
            states = [y]
            for a, b in itertools.pairwise(times):
                states.append(states[-1] + (b - a) * field(a, states[-1]))
        out = torch.stack(states)
        ctx.save_for_backward(times, out, *weights)
        return out

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> Any:
        times, out, *weights = ctx.saved_tensors
        assert all(times[1:] > times[:-1])  # decided on the host
        adjoint, total = grads[-1], [torch.zeros_like(w) for w in weights]
        for i in range(len(times) - 2, -1, -1):
            step = float(times[i + 1] - times[i])
            with torch.enable_grad():
                t = times[i].detach().requires_grad_(True)
                y = out[i].detach().requires_grad_(True)
                value = ctx.field(t, y)
                of_time, of_y, *of_weights = torch.autograd.grad(
                    value, (t, y, *weights), adjoint, allow_unused=True, retain_graph=True
                )
            adjoint = adjoint + step * of_y + grads[i] + 0 * of_time
            pairs = zip(total, of_weights, strict=True)
            total = [w if g is None else w + step * g for w, g in pairs]
        return None, adjoint, None, *total


class Integrated(nn.Module):
    """A neural ODE by its adjoint."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.unused = nn.Linear(4, 4), nn.Linear(2, 2)

    def _field(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.net(y).tanh() * torch.cos(t)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = torch.linspace(0, 1, 4)
        return _Adjoint.apply(self._field, x, times, *self.parameters())


class Constants(nn.Module):
    """Gradients with respect to constants that were made leaves, none of whose aliases are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, x: torch.Tensor) -> Any:
        a, b, c = torch.ones(4, requires_grad=True), torch.ones(4), torch.linspace(0, 1, 4)
        b.requires_grad = True
        leaf = c.detach().requires_grad_()
        score = (x * a * self.weight * b.exp() * leaf.sin()).sum()
        found = torch.autograd.grad(score, [a, leaf], create_graph=True)
        score.backward(inputs=[b], retain_graph=True)
        assert leaf.requires_grad
        assert leaf.is_leaf
        assert not c.requires_grad
        return score, found[0], found[1], b.grad * sum(1 for value in c if value > 0.4)


MODELS = [Checkpointed, Reversible, Hooked, Penalty, Integrated, Constants, Reentrant]


def _loss(out: Any) -> Any:
    parts = out if isinstance(out, tuple) else (out,)
    return sum((one * one).sum() for one in parts)


# "Reversible" takes longest; its training below has its gradients.
SLOW = {Reversible}


@pytest.mark.parametrize(
    "build", [pytest.param(m, marks=[pytest.mark.slow] * (m in SLOW)) for m in MODELS]
)
def test_values_and_gradients_are_those_of_eager(build: type[nn.Module]):
    torch.manual_seed(0)
    model = build().eval()
    ported = tpuport.convert(model, verify=False)
    for _ in range(2):
        out = ported(X)
        expected = model(X)
        for name, got in zip("abcd", jax.tree.leaves(tpuport.to_numpy(out)), strict=False):
            want = expected if isinstance(expected, torch.Tensor) else expected["abcd".index(name)]
            np.testing.assert_allclose(got, want.detach(), rtol=1e-5, atol=1e-6)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    _loss(model(X)).backward()
    for name, buffer in before.items():
        model.get_buffer(name).copy_(buffer)

    def loss(params: Any) -> Any:
        return _loss(ported.apply(params, ported.buffers, None, X)[0])

    grads = jax.jit(jax.grad(loss))(ported.params)
    for name, parameter in model.named_parameters():
        want = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        np.testing.assert_allclose(grads[name], want, rtol=1e-4, atol=1e-4)


def test_a_reversible_layer_draws_the_same_numbers_in_its_backward():
    torch.manual_seed(0)
    ported = tpuport.convert(Reversible().train())
    ported.verify(X)  # gradients too: eager draws the numbers of the program
    assert any(one.path.startswith("grad.blocks.0.f") for one in ported.report.parity)


def test_the_gradients_of_a_reentrant_block_are_compared():
    torch.manual_seed(0)
    ported = tpuport.convert(Reentrant())
    ported.verify(X)
    compared = {one.path for one in ported.report.parity}
    assert {"grad.layers.1.weight", "grad.layers.2.weight"} <= compared


def test_a_function_that_somebody_put_around_backward_is_known_in_a_program(monkeypatch: Any):
    original, calls = torch.autograd.backward, []

    @functools.wraps(original)
    def noted(tensors: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(tensors)
        original(tensors, *args, **kwargs)

    torch.manual_seed(0)
    ported = tpuport.convert(Reentrant())
    monkeypatch.setattr(torch.autograd, "backward", noted)
    ported.verify(X)
    assert calls
    assert {"grad.layers.1.weight"} <= {one.path for one in ported.report.parity}


def test_a_reversible_layer_behind_no_parameter_has_eagers_gradients():
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([_ReversibleBlock()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _ReversibleFunction.apply(x, self.blocks)

    torch.manual_seed(0)
    ported = tpuport.convert(First().train())
    ported.verify(normal(3, 4).requires_grad_())
    assert any(one.path.startswith("grad.blocks.0.f") for one in ported.report.parity)


@pytest.mark.parametrize("build", [Checkpointed, Reversible, Hooked, Reentrant])
def test_training_steps_and_scripts_are_those_of_eager(build: type[nn.Module]):
    torch.manual_seed(0)
    models = [build().eval() for _ in range(3)]
    for other in models[1:]:
        other.load_state_dict(models[0].state_dict())
    eager, script, trained = models
    ported = tpuport.convert(trained)
    step = make_train_step(
        ported,
        lambda m, b: _loss(m(b)),
        from_torch(ported, torch.optim.SGD(trained.parameters(), 1e-3)),
    )
    state = step.init(seed=0)
    for model in (eager, script):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            context = tpuport.porting() if model is script else torch.enable_grad()
            with context:
                for _ in range(2):
                    optimizer.zero_grad()
                    _loss(model(X)).backward()
                    optimizer.step()
    for _ in range(2):
        state, _ = step(state, X)
    for name, parameter in eager.named_parameters():
        for got in (script.get_parameter(name).detach().cpu(), state.params[name]):
            np.testing.assert_allclose(np.asarray(got), parameter.detach(), rtol=1e-4, atol=1e-5)


class _Run(nn.Module):
    def __init__(self, run: Any, *layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.run = nn.Sequential(*layers), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.layers, x)


def _early_hook(f: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = f(x)
    z = y * 2
    y.register_hook(lambda g: g * 2)
    return y + z


def _looking_hook(f: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = f(x)
    y.register_hook(lambda g: None)
    return y


def _hook_on_a_weight(f: Any, x: torch.Tensor) -> torch.Tensor:
    f[0].weight.register_hook(lambda g: g * 2)
    return f(x)


def _backward_to_weights(f: nn.Module, x: torch.Tensor) -> torch.Tensor:
    leaf = x.detach().requires_grad_()
    f(leaf).sum().backward()
    return leaf.grad  # pyright: ignore[reportReturnType]


REFUSED = {
    "hook after a use": (_early_hook, "right after the line"),
    "hook that returns None": (_looking_hook, "returns None"),
    "hook on a weight in forward": (_hook_on_a_weight, "each call adds one more"),
    "backward() to the weights": (_backward_to_weights, "inputs=\\[x\\]"),
    "state written in a backward": (
        lambda f, x: Checkpoint.apply(f, 1, x, *f.parameters()),
        "backward pass returns only gradients",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_remedy(name: str):
    run, message = REFUSED[name]
    layers = [nn.Linear(4, 4)] + ([nn.BatchNorm1d(4)] if name.startswith("state") else [])
    ported = tpuport.convert(_Run(run, *layers), verify=False)

    def loss(params: Any) -> Any:
        return ported.apply(params, ported.buffers, None, X)[0].sum()

    with pytest.raises(PortError, match=message) as refused:
        jax.jit(jax.grad(loss))(ported.params)
    assert refused.value.code == "TPU403"


class Transformed(nn.Module):
    """Transformations of torch.func and torch.autograd.functional around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        def run(y: torch.Tensor) -> torch.Tensor:
            return self.layer(y).tanh()

        def of_weights(weights: Any) -> torch.Tensor:
            return func.functional_call(self.layer, weights, (x,)).tanh().sum()

        weights = dict(self.layer.named_parameters())
        return (
            func.grad(lambda y: run(y).sum())(x) + func.vmap(run)(x),
            func.vjp(run, x)[1](torch.ones_like(x))[0],
            func.grad(of_weights)(weights)["weight"] + func.jacrev(run)(x).sum(),
            functional.hessian(lambda y: run(y).sum(), x, create_graph=True).sum((2, 3)),
        )


def test_transformations_inside_a_program_are_those_of_eager():
    torch.manual_seed(0)
    ported = tpuport.convert(Transformed())
    ported.verify(X)  # gradients too
    assert any(one.path == "grad.layer.weight" for one in ported.report.parity)
