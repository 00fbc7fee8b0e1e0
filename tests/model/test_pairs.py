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
from tpuport.tracing.patterns import rewritten

FOR_TPU: Any = SimpleNamespace(
    options=SimpleNamespace(target="tpu"),
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
    ported = tpuport.convert(Turned(turn), verify=False)
    state = ported.params, ported.buffers, jax.random.key(0)

    def run(x: Any, sin: Any) -> Any:
        return ported.apply(*state, x, sin)[0]

    before = jax.make_jaxpr(run)(x, sin)
    after = rewritten(before, FOR_TPU)
    assert (after is not before) == is_found
    if not is_found:
        return
    assert "stack" not in str(after)
    assert "concatenate" not in str(after)
    assert ",2] = " not in str(after)

    def by(program: Any) -> list[Any]:
        def summed(x: Any, sin: Any) -> Any:
            (out,) = jax.core.eval_jaxpr(program.jaxpr, program.consts, x, sin)
            return jnp.nansum(jnp.where(jnp.isfinite(out), out, 0)), out

        gradients, out = jax.jit(jax.grad(summed, (0, 1), has_aux=True))(x, sin)
        return [out, *gradients]

    for got, want in zip(by(after), by(before), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float64), np.asarray(want, np.float64))


@needs_libtpu
def test_a_program_for_a_tpu_has_no_array_of_pairs():
    x, sin = torch.zeros(1, 512, 8, 128), torch.zeros(512, 1, 128)
    report = tpuport.compile_for(tpuport.convert(Turned(of_pairs)), "v6e-1", inputs=(x, sin))
    assert report.fits
    assert report.work is not None
    # The argument, the sine and the result, and one more copy at most.
    assert report.work.hbm_bytes < 3.5 * x.numel() * 4
