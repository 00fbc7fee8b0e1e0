"""One scenario, run three ways: eager PyTorch (the reference), the port, and plain torchax.

The reference here is computed by these lines alone: nothing of the verification inside the package
takes part.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torchax
from torch import nn

import tpuport
from tests.exactness.plain_torchax import PlainTorchax, to_jax, to_torch

RTOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.complex64: 1e-5}


@dataclass(frozen=True)
class Scenario:
    """What to run.

    Attributes:
        name: Name in the test id.
        build: Makes the module or function; called under a fixed seed, once for each way of
            running.
        calls: Arguments of successive calls.
        torchax: Why plain torchax is wrong, or None where it is right (then it is not run).
        eval_last: Switch to evaluation mode before the last call.
        grads: Compare gradients as well.
        rtol: Tolerance relative to the largest element, where the dtype's own does not fit.
    """

    name: str
    build: Callable[[], Any]
    calls: tuple[tuple[Any, ...], ...]
    torchax: str | None = None
    eval_last: bool = False
    grads: bool = True
    rtol: float | None = None
    train: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers that do not depend on torch's global generator."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


# Tests of what plain torchax does run no line of the package: another torchax alone can change
# them, and its version is pinned.


def against_torchax(scenarios: list[Scenario]) -> list[Any]:
    """The scenarios that plain torchax gets wrong, each as a strict expected failure, slow."""
    return [
        pytest.param(
            s,
            id=s.name,
            marks=[pytest.mark.slow, pytest.mark.xfail(strict=True, reason=s.torchax)],
        )
        for s in scenarios
        if s.torchax is not None
    ]


def expect_torchax_wrong(reason: str) -> Callable[[Any], Any]:
    """Mark a test that shows what plain torchax does wrong; it is slow."""
    wrong = pytest.mark.xfail(strict=True, reason=f"plain torchax: {reason}")
    return lambda test: pytest.mark.slow(wrong(test))


def built(scenario: Scenario) -> Any:
    """The scenario's module, always with the same weights."""
    torch.default_generator.manual_seed(0)
    made = scenario.build()
    return made.train(scenario.train) if isinstance(made, nn.Module) else made


def leaves_of(out: Any) -> list[Any]:
    """Tensors or arrays of an output made of tuples, lists and dicts."""
    return jax.tree.leaves(out, is_leaf=lambda x: isinstance(x, torch.Tensor))


def host(value: Any) -> torch.Tensor:
    """Any tensor or array as a plain CPU tensor."""
    if isinstance(value, jax.Array):
        return to_torch(value)
    return tpuport.to_torch(value).detach()


def assert_same(
    got: Any, want: Any, what: str, rtol: float | None = None, atol: float = 0.0
) -> None:
    """Equal shape, equal NaNs, and close relative to the largest element.

    Exact for integers and bools.
    """
    got, want = host(got), host(want)
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, eager {tuple(want.shape)}"
    if not (want.is_floating_point() or want.is_complex()):
        assert torch.equal(got.to(want.dtype), want), f"{what}: {got}, eager {want}"
        return
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, eager {want.dtype}"
    limit = RTOL.get(want.dtype, 1e-5) if rtol is None else rtol
    wide = torch.complex128 if want.is_complex() else torch.float64
    finite = torch.isfinite(want)
    assert torch.equal(torch.isfinite(got), finite), f"{what}: {got}, eager {want}"
    if not want.is_complex():
        assert torch.equal(got[~finite].nan_to_num(), want[~finite].nan_to_num()), what
    got, want = got[finite].to(wide), want[finite].to(wide)
    if want.numel():
        error, size = float((got - want).abs().max()), float(want.abs().max())
        assert error <= limit * size + max(atol, 1e-7), f"{what}: off by {error:.2e} of {size:.2e}"


def assert_outputs_same(got: Any, want: Any, rtol: float | None = None) -> None:
    """The same leaves in the same order."""
    ours, theirs = leaves_of(got), leaves_of(want)
    assert len(ours) == len(theirs)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(b, torch.Tensor):
            assert (a.item() if isinstance(a, jax.Array) else a) == b
            continue
        assert_same(a, b, f"output {index}", rtol)


def assert_buffers_same(got: dict[str, Any], module: Any, rtol: float | None = None) -> None:
    """Every buffer of the eager module has the same value."""
    if not isinstance(module, nn.Module):
        return
    for name, buffer in module.named_buffers():
        assert name in got, f"{name} is missing"
        assert_same(got[name], buffer, f"buffer {name}", rtol, atol=1e-6)


def check_calls(scenario: Scenario, port: Callable[[Any], Any]) -> Any:
    """Successive calls give eager's outputs, and the buffers are eager's after each.

    Gives the port.
    """
    eager, ported = built(scenario), port(built(scenario))
    for index, args in enumerate(scenario.calls):
        if scenario.eval_last and index == len(scenario.calls) - 1:
            eager.eval()
            ported = evaluated(ported)
        want = eager(*copy.deepcopy(args))
        got = ported(*copy.deepcopy(args))
        assert_outputs_same(got, want, scenario.rtol)
        assert_buffers_same(ported.buffers, eager, scenario.rtol)
    return ported


def check_together(scenarios: list[Scenario], check: Callable[[Scenario], Any]) -> None:
    """Check functions of one tensor, called once each, as one program.

    Where that fails each is checked by itself, and the first that fails is named.
    """

    def all_of_them(*given: torch.Tensor) -> list[Any]:
        return [one.build()(x) for one, x in zip(scenarios, given, strict=True)]

    arguments = tuple(one.calls[0][0] for one in scenarios)
    try:
        check(Scenario("together", lambda: all_of_them, (arguments,)))
    except Exception:
        for one in scenarios:
            try:
                check(one)
            except Exception as error:
                raise AssertionError(f"{one}: {error}") from error
        raise


def evaluated(ported: Any) -> Any:
    """The port in evaluation mode.

    A torchax jit cannot see the mode, so it is made again with the same buffers.
    """
    if isinstance(ported, PlainTorchax):
        buffers = ported.buffers
        ported = PlainTorchax(ported.target.eval())
        ported.buffers = buffers
        return ported
    return ported.eval()


def cotangents(out: Any) -> list[Any]:
    """Fixed weights for each floating leaf of an output (None for others)."""
    made = []
    for index, leaf in enumerate(leaves_of(out)):
        floating = isinstance(leaf, torch.Tensor) and (
            leaf.is_floating_point() or leaf.is_complex()
        )
        draw = (
            np.random.default_rng(1000 + index).standard_normal(tuple(leaf.shape))
            if floating
            else None
        )
        made.append(None if draw is None else draw.astype(np.float32))
    return made


def eager_gradients(
    module: Any, args: tuple[Any, ...]
) -> tuple[Any, dict[str, Any], list[Any], list[Any]]:
    """Eager's output, its gradients by parameter and floating argument, the cotangents used."""
    args = tuple(
        a.detach().clone().requires_grad_()
        if isinstance(a, torch.Tensor) and a.is_floating_point()
        else a
        for a in args
    )
    out = module(*args)
    weights = cotangents(out)
    total = sum(
        (leaf.real.float() * torch.from_numpy(w)).sum()
        for leaf, w in zip(leaves_of(out), weights, strict=True)
        if w is not None
    )
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    params = dict(module.named_parameters()) if isinstance(module, nn.Module) else {}
    grads = {n: zero_if_none(p) for n, p in params.items() if p.requires_grad}
    inputs = [
        zero_if_none(a) for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()
    ]
    return out, grads, inputs, weights


def zero_if_none(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's gradient; zeros where autograd never reached it."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def check_gradients(scenario: Scenario, port: Callable[[Any], Any]) -> None:
    """One call under `jax.jit(jax.value_and_grad)`.

    Output, buffers and all gradients are eager's.
    """
    eager, ported = built(scenario), port(built(scenario))
    args = scenario.calls[0]
    want, grads, input_grads, weights = eager_gradients(eager, copy.deepcopy(args))
    floating = [
        i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()
    ]

    def loss(params: Any, floats: list[jax.Array]) -> Any:
        given = list(args)
        for index, value in zip(floating, floats, strict=True):
            given[index] = value
        out, buffers = pure_call(ported, params, given)
        terms = [
            jnp.sum(jnp.real(leaf).astype(jnp.float32) * w)
            for leaf, w in zip(leaves_of(out), weights, strict=True)
            if w is not None
        ]
        return sum(terms, jnp.zeros(())), (out, buffers)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    with jax.default_matmul_precision("highest"):
        (_, (out, buffers)), (got, got_inputs) = step(
            ported.params, [to_jax(args[i]) for i in floating]
        )
    assert_outputs_same(out, want, scenario.rtol)
    assert_buffers_same(buffers, eager, scenario.rtol)
    assert set(got) == set(grads), "other parameters are differentiated than in eager"
    sizes = [float(g.abs().max()) for g in [*grads.values(), *input_grads] if g.numel()]
    atol = 1e-6 * max(sizes, default=0.0)
    for name, grad in grads.items():
        assert_same(got[name], grad, f"gradient of {name}", scenario.rtol, atol)
    for index, (have, grad) in enumerate(zip(got_inputs, input_grads, strict=True)):
        assert_same(have, grad, f"gradient of argument {index}", scenario.rtol, atol)


def pure_call(ported: Any, params: Any, args: list[Any]) -> tuple[Any, Any]:
    """The port's pure function, with whatever key it wants."""
    if isinstance(ported, PlainTorchax):
        args = [to_jax(a) if isinstance(a, torch.Tensor) else a for a in args]
        with torchax.default_env():
            return ported.pure(params, ported.buffers, *args)
    return ported.apply(params, ported.buffers, jax.random.key(0), *args)


def by_tpuport(target: Any) -> Any:
    """The port under test, without its own verification."""
    return tpuport.convert(target, verify=False)
