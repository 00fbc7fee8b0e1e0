"""Pairs whose numbers change places are the same in a program for a TPU, without the pairs."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tpuport
from tests.program.small import needs_libtpu
from tpuport.tracing.core.context import TraceOptions
from tpuport.tracing.patterns import rewritten

FOR_TPU: Any = SimpleNamespace(
    options=TraceOptions(target="tpu"),
    recorder=SimpleNamespace(counters=SimpleNamespace(attention=[])),
)


def of_pairs(x: torch.Tensor) -> torch.Tensor:
    """As diffusers has it for Flux, CogVideoX and HunyuanVideo."""
    real, imaginary = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([-imaginary, real], dim=-1).flatten(3)


def every_second(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).reshape(x.shape)


def joined(x: torch.Tensor) -> torch.Tensor:
    """With cat, heads and numbers of a head in one dim before and after."""
    flat = x.flatten(2)
    pairs = flat.view(*flat.shape[:-1], -1, 2)
    return torch.cat((pairs[..., 1:], -pairs[..., :1]), dim=-1).view(flat.shape).view(x.shape)


def first_twice(x: torch.Tensor) -> torch.Tensor:
    pairs = x.unflatten(-1, (-1, 2))
    return torch.stack((pairs[..., 0], -pairs[..., 0]), dim=-1).flatten(-2)


def of_three(x: torch.Tensor) -> torch.Tensor:
    a, b, c = x.unflatten(-1, (-1, 3)).unbind(-1)
    return torch.stack((b, c, a), dim=-1).flatten(-2)


def of_halves(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def of_two(x: torch.Tensor) -> torch.Tensor:
    pairs = x.unflatten(-1, (-1, 2))
    other = (x + 1).unflatten(-1, (-1, 2))
    return torch.stack((pairs[..., 1], other[..., 0]), dim=-1).flatten(-2)


def of_complex(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As Llama's first code has it."""
    numbers = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turns = torch.complex(angles.cos(), angles.sin())[:, None]
    return torch.view_as_real(numbers * turns).flatten(3).type_as(x)


def of_complex_behind(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """One turn for all pairs, and heads joined with their numbers."""
    numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    turns = torch.polar(torch.ones_like(angles), angles)[:, None, :1]
    return torch.view_as_real(turns * numbers).flatten(2).view(x.shape).type_as(x)


def of_matrices(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """As Flux's own code has it."""
    cos, sin = angles.cos(), angles.sin()
    turns = torch.stack([cos, -sin, sin, cos], -1).reshape(1, -1, 1, cos.shape[-1], 2, 2)
    pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    out = turns[..., 0] * pairs[..., 0] + turns[..., 1] * pairs[..., 1]
    return out.reshape(*x.shape).type_as(x)


def of_other_matrices(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The second numbers first, and a factor that is not one of matrices."""
    pairs = x.unflatten(-1, (-1, 2))
    turns = torch.stack([angles, angles + 1], -1)[None, :, None]
    out = pairs[..., 1:] * turns + pairs[..., :1] * turns.cos()
    return out.flatten(-2)


class By(torch.nn.Module):
    def __init__(self, turn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.turn = turn

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return self.turn(x, angles)


class Turned(torch.nn.Module):
    def __init__(self, turn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.turn = turn

    def forward(self, x: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.turn(x) * sin


@pytest.mark.parametrize(
    ("turn", "is_found"),
    [
        (of_pairs, True),
        (every_second, True),
        (joined, True),
        (first_twice, True),
        (of_three, False),
        (of_halves, False),
        (of_two, False),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pairs_are_found_and_stay_equal(turn: Any, is_found: bool, dtype: str):
    x, sin = (jax.random.normal(jax.random.key(i), (2, 5, 3, 12)).astype(dtype) for i in (0, 1))
    # What is no number stays in its place.
    x = x.at[0, 0, 0, 3].set(jnp.nan).at[0, 1, 0, 4].set(jnp.inf)
    check(Turned(turn), (x, sin), is_found=is_found)


@pytest.mark.parametrize("turn", [of_complex, of_complex_behind, of_matrices, of_other_matrices])
def test_products_of_pairs_are_found_and_stay_equal(turn: Any):
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 12))
    x = x.at[0, 0, 0, 3].set(jnp.nan).at[0, 1, 0, 4].set(jnp.inf)
    angles = jax.random.normal(jax.random.key(1), (5, 6))
    # Sums may be rounded once or twice.
    check(By(turn), (x, angles), is_found=True, rtol=1e-5)


def check(
    model: torch.nn.Module, args: tuple[Any, ...], *, is_found: bool, rtol: float = 0
) -> None:
    ported = tpuport.convert(model, verify=False)
    state = ported.params, ported.buffers, jax.random.key(0)

    def run(*args: Any) -> Any:
        return ported.apply(*state, *args)[0]

    before = jax.make_jaxpr(run)(*args)
    after = rewritten(before, FOR_TPU)
    assert (after is not before) == is_found
    if not is_found:
        return
    pairs = [
        var.aval
        for eqn in after.jaxpr.eqns
        for var in eqn.outvars
        if var.aval.shape[-1:] == (2,) and var.aval.size >= args[0].size
    ]
    assert not pairs

    def by(program: Any) -> list[Any]:
        def summed(*args: Any) -> Any:
            (out,) = jax.core.eval_jaxpr(program.jaxpr, program.consts, *args)
            return jnp.nansum(jnp.where(jnp.isfinite(out), out, 0)), out

        gradients, out = jax.jit(jax.grad(summed, (0, 1), has_aux=True))(*args)
        return [out, *gradients]

    for got, want in zip(by(after), by(before), strict=True):
        got, want = (np.asarray(one, np.float64) for one in (got, want))
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


@needs_libtpu
def test_a_program_for_a_tpu_has_no_array_of_pairs():
    x, sin = torch.zeros(1, 512, 8, 128), torch.zeros(512, 1, 128)
    report = tpuport.compile_for(tpuport.convert(Turned(of_pairs)), "v6e-1", inputs=(x, sin))
    assert report.fits
    assert report.work is not None
    # The argument, the sine and the result, and one more copy at most.
    assert report.work.hbm_bytes < 3.5 * x.numel() * 4
