"""`torch.utils.checkpoint` rematerialises, and changes neither values nor randomness nor state.

The batch statistics inside a checkpointed stretch move once for each call, as in eager's forward
(eager moves them again when its backward computes the stretch a second time).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from transformers import LlamaConfig, LlamaForCausalLM

import tpuport
from tests.exactness.plain_torchax import PlainTorchax, environment
from tests.exactness.scenario import (
    Scenario,
    assert_same,
    by_tpuport,
    check_calls,
    check_gradients,
    expect_torchax_wrong,
    normal,
    to_jax,
)

X, Y = normal(4, 6), normal(4, 6, seed=2)


class Block(nn.Module):
    """Batch norm and dropout, checkpointed."""

    def __init__(self, *, reentrant: bool, p: float = 0.0) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.body = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(p), nn.Linear(16, 6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.body, x, use_reentrant=self.reentrant)


def _jaxpr(ported: Any, *args: torch.Tensor) -> str:
    def loss(params: Any) -> Any:
        return ported.apply(params, ported.buffers, jax.random.key(0), *args)[0].sum()

    return str(jax.make_jaxpr(jax.grad(loss))(ported.params))


@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
def test_checkpoint_rematerialises(reentrant):
    scenario = Scenario("block", lambda: Block(reentrant=reentrant), ((X,), (Y,)), rtol=1e-4)
    if not reentrant:
        check_calls(scenario, by_tpuport)
    ported = by_tpuport(Block(reentrant=reentrant))
    # Of a reentrant block, eager runs the backward only if an input requires grad.
    text = _jaxpr(ported, X.clone().requires_grad_())
    assert "checkpoint" in text or "remat" in text
    assert ("remat" in _jaxpr(ported, X)) is not reentrant
    assert "checkpoint" not in _jaxpr(by_tpuport(Block(reentrant=reentrant).body), X)


class Held(nn.Module):
    """Holds `checkpoint` where no module of Python has it, as transformers' layers do."""

    static = staticmethod(checkpoint)

    def __init__(self, how: str, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.how, self.options = how, {"use_reentrant": reentrant}
        self.partial, self.own = functools.partial(checkpoint, **self.options), checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.how == "partial":
            return self.partial(self.body, x)
        call = self.own if self.how == "attribute" else self.static
        return call(lambda y: self.body(y) * 2, x, **self.options)


@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
@pytest.mark.parametrize("how", ["partial", "attribute", "static"])
def test_whoever_holds_the_function_rematerialises(how: str, reentrant: bool):
    def gradients(device: str) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        module = Held(how, reentrant=reentrant).to(device)
        for _ in range(2):
            module(X.to(device)).square().sum().backward()
        return tuple(parameter.grad.cpu() for parameter in module.parameters())

    ported = by_tpuport(Held(how, reentrant=reentrant))
    assert "remat" in _jaxpr(ported, X.clone().requires_grad_())
    with tpuport.porting():
        ours = gradients("cuda")
    torch.testing.assert_close(ours, gradients("cpu"), rtol=1e-5, atol=1e-5)


def test_layers_of_transformers_rematerialise():
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = LlamaForCausalLM(config).train()
    model.activation_checkpointing_enable()
    ported, tokens = by_tpuport(model), jnp.arange(6)[None]

    def loss(params: Any) -> Any:
        arguments = {"input_ids": tokens, "labels": tokens}
        out, _ = ported.apply(params, ported.buffers, jax.random.key(0), **arguments)
        return out.loss

    assert "remat" in str(jax.make_jaxpr(jax.grad(loss))(ported.params))


def test_checkpoint_gradient_is_eagers():
    class WithoutNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            def run(x: torch.Tensor, *, extra: dict[str, torch.Tensor]) -> Any:
                return self.body(x) * extra["y"], x.detach()

            return checkpoint(run, x, extra={"y": y}, use_reentrant=False)

    check_gradients(Scenario("without_norm", WithoutNorm, ((X, Y),), rtol=1e-4), by_tpuport)


def test_checkpoint_leaves_views_and_caches_of_outer_tensors_usable():
    """Values read inside the stretch for the first time must not be the ones used after it."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.kept: torch.Tensor | None = None

        def run(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.linear(x)
            self.kept = x[1:]
            return self.linear(x) - target

        def forward(self, x: torch.Tensor) -> Any:
            view = x[1:]
            x[0] = 2
            out = checkpoint(self.run, x, use_reentrant=False)
            with torch.no_grad():
                again = self.linear(x)
            return out, again, view * 2, self.kept * 3

    class Fresh(Shared):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x * 1)

    check_gradients(Scenario("shared", Fresh, ((X,),), rtol=1e-4), by_tpuport)


def test_checkpoint_draws_the_same_mask_when_it_recomputes():
    """With dropout alone inside, the gradient by x is the mask that made the output."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda t: F.dropout(t, 0.5) * torch.rand(64), x, use_reentrant=False)

    port = by_tpuport(program)
    for key in (0, 1):
        value, pull = jax.vjp(
            lambda x, k=key: port.apply({}, {}, jax.random.key(k), x)[0], jnp.ones(64)
        )
        assert_same(pull(jnp.ones(64))[0], value, "gradient")
    first, second = port(torch.ones(64)), port(torch.ones(64))
    assert not torch.equal(first.torch(), second.torch())


def test_checkpoint_with_batch_norm_moves_the_statistics_once():
    torch.manual_seed(0)
    eager = Block(reentrant=False)
    ported = by_tpuport(eager)

    @jax.jit
    def step(params: Any, buffers: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            out, new = ported.apply(params, buffers, None, x)
            return out.sum(), new

        return jax.value_and_grad(loss, has_aux=True)(params)

    (_, buffers), _ = step(ported.params, ported.buffers, to_jax(X))
    eager(X)
    assert int(buffers["body.1.num_batches_tracked"]) == 1
    assert_same(buffers["body.1.running_var"], eager.body[1].running_var, "running variance", 1e-4)


def test_checkpoint_sequential_and_module_flag():
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    ported = by_tpuport(lambda x: checkpoint_sequential(layers, 2, x, use_reentrant=False))
    assert_same(ported(X), layers(X), "output", 1e-4)


@expect_torchax_wrong("nothing is rematerialised")
def test_checkpoint_under_plain_torchax():
    port = PlainTorchax(Block(reentrant=False).eval())
    with environment():
        text = str(
            jax.make_jaxpr(jax.grad(lambda p: port.pure(p, port.buffers, to_jax(X))[0].sum()))(
                port.params
            )
        )
    assert "checkpoint" in text or "remat" in text


class Selecting(nn.Module):
    """Sizes that depend on data, and branches on values, inside a checkpointed stretch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(3, 3), kind

    def body(self, x, mask):
        rows = self.linear(x[mask])
        if self.kind == "rows":
            return rows
        if self.kind == "written":
            out = x.clone()
            out[mask] = rows
            return out
        out = self.linear(x)
        found = []
        for limit in (0.0, 0.5):
            try:
                found.append(out.sum() if out.sum() > limit else out.mean() * 3)
            finally:
                out = out * 2
        return torch.stack(found)

    def forward(self, x):
        mask = x[:, 0] > 0
        out = torch.utils.checkpoint.checkpoint(self.body, x, mask, use_reentrant=False)
        return out.sum(0) * (x[mask].sum() + mask.sum())


@pytest.mark.parametrize("kind", ["rows", "written", "branch"])
def test_data_decides_inside_a_checkpoint(kind: str):
    torch.manual_seed(0)
    ported = tpuport.convert(Selecting(kind))
    for seed in range(3):
        torch.manual_seed(seed)
        assert ported.verify(torch.randn(6, 3)).verified
    assert ported.report.shims


class Branching(nn.Module):
    """A function in a forward that branches on data, and changes what it closes over."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.count = nn.Linear(3, 3), how, 0
        self.kept = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if y.sum() < 0:
                if self.how == "number":
                    self.count += 1
                else:
                    self.kept = y.sum().detach()
            return y.tanh()

        function = functools.partial(run) if self.how == "number" else run
        return checkpoint(function, x, use_reentrant=False)


@pytest.mark.parametrize("how", ["number", "tensor"])
def test_a_branch_changes_what_the_function_closes_over(how: str):
    """jax called the tensor or number of the one side an unexpected tracer."""

    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        module, seen = Branching(how).to(device), []
        for factor in (3, -3, 3):
            module(torch.randn(4, 3).to(device) * factor)
            seen.append((module.count, round(module.kept.item(), 4)))
        return seen

    with tpuport.porting():
        ours = run("cuda")
    assert ours == run("cpu")
    assert ours[0] != ours[-1]
