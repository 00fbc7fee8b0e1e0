"""What one registered op is tested with, and how it is run: eager, ported, and by plain torchax."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.newer_versions import fusion_emitters
from tests.exactness.scenario import (
    RTOL,
    assert_same,
    by_tpuport,
    cotangents,
    host,
    leaves_of,
    pure_call,
    to_jax,
    zero_if_none,
)
from tpuport.foundation.interop import backend

BF16 = torch.bfloat16
# Compiling dominates these tests, and what is compiled runs once on a few numbers.
QUICK: Any = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    **fusion_emitters(used=False),
}


@dataclass(frozen=True)
class Call:
    """Arguments of one call of an op; tensors may also stand in lists."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


@dataclass(frozen=True)
class Case:
    """A registered op and the calls it is tested with, all in one program.

    Attributes:
        op: An ATen overload, or a packet that is registered whole.
        calls: Calls that eager PyTorch accepts.
        run: What is called, where it is not the op itself; it must reach the op.
        grad: Compare gradients of the floating arguments; False where eager PyTorch has none.
        outputs: How many of the outputs have a gradient in eager PyTorch (None: all).
        rtol: Tolerance of float32 results relative to the largest element.
        bf16: The same of bfloat16 results; None for ops that round once, to equal numbers.
    """

    op: Any
    calls: tuple[Call, ...]
    run: Callable[..., Any] | None = None
    grad: bool = True
    outputs: int | None = None
    rtol: float = 1e-5
    bf16: float | None = None

    def __str__(self) -> str:
        return str(self.op).removeprefix("aten.")


def case(op: Any, *calls: Call, **options: Any) -> Case:
    return Case(op, calls, **options)


def f(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def b(*shape: int, seed: int = 1) -> torch.Tensor:
    """Standard normal numbers in bfloat16."""
    return f(*shape, seed=seed, dtype=BF16)


def i(*shape: int, low: int = -5, high: int = 6, seed: int = 1) -> torch.Tensor:
    """Integers in [low, high)."""
    return torch.from_numpy(np.random.default_rng(seed).integers(low, high, shape))


def mask(*shape: int, seed: int = 1) -> torch.Tensor:
    return f(*shape, seed=seed) > 0


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same values with the memory order of the first and last dim exchanged."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def t(*values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A vector of the numbers given."""
    return torch.tensor(values, dtype=dtype)


# -- running ---------------------------------------------------------------------------------------


class Program:
    """All calls of a case as one function of the tensors in them."""

    def __init__(self, of: Case) -> None:
        self.run = of.op if of.run is None else of.run
        self.calls = of.calls
        self.tensors: list[torch.Tensor] = []
        self.is_turned: list[bool] = []
        for one in of.calls:
            _map(self._collect, [one.args, one.kwargs])

    def _collect(self, tensor: torch.Tensor) -> None:
        # A JAX array has no memory order: the program makes it.
        is_turned = not tensor.is_contiguous()
        self.is_turned.append(is_turned)
        self.tensors.append(tensor.transpose(0, -1).contiguous() if is_turned else tensor)

    def __call__(self, *tensors: torch.Tensor) -> list[Any]:
        rest = iter(zip(tensors, self.is_turned, strict=True))

        def take(_: torch.Tensor) -> torch.Tensor:
            tensor, is_turned = next(rest)
            return tensor.transpose(0, -1) if is_turned else tensor

        return [self.run(*_map(take, one.args), **_map(take, one.kwargs)) for one in self.calls]


def _map(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple | list):
        return type(value)(_map(fn, v) for v in value)
    if isinstance(value, dict):
        return {k: _map(fn, v) for k, v in value.items()}
    return value


class Together:
    """The programs of several cases as one; each tensor and each output has its case."""

    def __init__(self, cases: list[Case]) -> None:
        self.programs = [Program(of) for of in cases]
        self.tensors = [x for program in self.programs for x in program.tensors]
        pairs = list(zip(cases, self.programs, strict=True))
        self.case_of_tensor = [of for of, program in pairs for _ in program.tensors]
        self.outputs = [
            (of, f"{of}, call {index}") for of in cases for index in range(len(of.calls))
        ]

    def __call__(self, *tensors: torch.Tensor) -> list[Any]:
        rest = iter(tensors)
        return [
            out
            for program in self.programs
            for out in program(*(next(rest) for _ in program.tensors))
        ]


def check(
    cases: list[Case],
    port: Callable[[Any], Any] = by_tpuport,
    *,
    values_first: bool = False,
) -> None:
    """Outputs of all calls, and gradients of their floating arguments, are those of eager.

    All cases are one program, and all or none have gradients. With `values_first` no gradient is
    compiled where the values are wrong already.
    """
    program = Together(cases)
    (has_grad,) = {of.grad for of in cases}
    given = [x.detach().clone() for x in program.tensors]
    floating = [n for n, x in enumerate(given) if x.is_floating_point()]
    eager = [x.clone().requires_grad_(has_grad and n in floating) for n, x in enumerate(given)]
    want = program(*eager)
    weights = [
        _weights(out, of.outputs) for out, (of, _) in zip(want, program.outputs, strict=True)
    ]
    ported = port(program)

    def loss(floats: list[jax.Array]) -> Any:
        operands: list[Any] = list(given)
        for index, value in zip(floating, floats, strict=True):
            operands[index] = value
        out, _ = pure_call(ported, {}, operands)
        return _total(out, weights), out

    def compare(got: Any) -> None:
        for have, expected, (of, what) in zip(got, want, program.outputs, strict=True):
            _check_outputs(have, expected, what, of)

    arrays = [to_jax(given[n]) for n in floating]
    if values_first or not has_grad:
        compare(jax.jit(loss, compiler_options=QUICK)(arrays)[1])
    if has_grad:
        run = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)
        (_, got), grads = run(arrays)
        compare(got)
        _backward(want, weights)
        for index, have in zip(floating, grads, strict=True):
            expected = zero_if_none(eager[index])
            of = program.case_of_tensor[index]
            limit = RTOL[expected.dtype] if expected.dtype is BF16 else of.rtol
            assert_same(have, expected, f"{of}, gradient of tensor {index} of all", limit, 1e-6)


def _weights(out: Any, count: int | None) -> list[Any]:
    made = cotangents(out)
    return [w if count is None or n < count else None for n, w in enumerate(made)]


def _check_outputs(got: Any, want: Any, what: str, of: Case) -> None:
    ours, theirs = leaves_of(got), leaves_of(want)
    assert len(ours) == len(theirs)
    for index, (have, expected) in enumerate(zip(ours, theirs, strict=True)):
        what = f"{what}, output {index}"
        if not isinstance(expected, torch.Tensor):
            assert have == expected, what
            continue
        assert have.dtype == backend.jax_dtype(expected.dtype), f"{what}: {have.dtype}"
        if expected.dtype is BF16 and of.bf16 is None:
            assert_equal(host(have), expected.detach(), what)
        else:
            limit = of.bf16 if expected.dtype is BF16 else of.rtol
            assert_same(have, expected.detach(), what, limit)


def assert_equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal numbers, NaN where there is NaN."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, eager {tuple(want.shape)}"
    same = (got == want) | (got.isnan() & want.isnan())
    assert same.all(), f"{what}: {got[~same]}, eager {want[~same]}"


def _total(outs: Any, weights: list[list[Any]]) -> jax.Array:
    total = jnp.zeros(())
    for out, ws in zip(outs, weights, strict=True):
        for leaf, w in zip(leaves_of(out), ws, strict=True):
            if w is not None:
                total = total + jnp.sum(jnp.real(leaf).astype(jnp.float32) * w)
    return total


def _backward(outs: list[Any], weights: list[list[Any]]) -> None:
    terms = [
        (leaf.real.float() * torch.from_numpy(w)).sum()
        for out, ws in zip(outs, weights, strict=True)
        for leaf, w in zip(leaves_of(out), ws, strict=True)
        if w is not None and leaf.requires_grad
    ]
    assert terms, "no output has a gradient in eager PyTorch"
    torch.stack(terms).sum().backward()
