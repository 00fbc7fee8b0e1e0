"""Remat policies of repeated blocks, which are one loop, and of one block that is called again and
again: each is computed again where it runs, within the loop.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.extend.core import jaxprs_in_params
from torch import nn

import tpuport
from tests.model.repeated import DIM, Block, Stack, loops, x_of
from tests.model.test_remat import kept_bytes

DEPTH = 5
# A block's input, all rows of it.
CARRIED = x_of().numel() * 4


class Reused(nn.Module):
    """One block with the weights of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = Block(), nn.Linear(DIM, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(DEPTH):
            x = self.block(x)
        return self.head(x)


MODELS = {"repeated": lambda: Stack(Block, DEPTH), "reused": Reused}


def ported_with(name: str, policy: str) -> Any:
    ported = tpuport.convert(MODELS[name](), blocks="scan", verify=False)
    tpuport.remat(ported, {"blocks.*" if name == "repeated" else "block": policy})
    return ported


def counted(jaxpr: Any, primitive: str, times: int = 1) -> int:
    """How often a program runs an operation."""
    total = 0
    for equation in jaxpr.eqns:
        total += times * (equation.primitive.name == primitive)
        inner = times * equation.params.get("length", 1)
        total += sum(counted(one, primitive, inner) for one in jaxprs_in_params(equation.params))
    return total


def gradients(ported: Any) -> Any:
    def loss(params: Any) -> Any:
        out, _ = ported.apply(params, ported.buffers, jax.random.key(0), x_of())
        return (out**2).sum()

    return jax.grad(loss)


@functools.cache
def program(name: str, policy: str) -> Any:
    """The program of the gradients of a model, and what it gives."""
    ported = ported_with(name, policy)
    closed = jax.make_jaxpr(gradients(ported))(ported.params)
    return closed, jax.jit(gradients(ported))(ported.params)


@pytest.mark.parametrize("policy", ["dots", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_computed_again_as_often_as_they_run(name: str, policy: str):
    closed, found = program(name, policy)
    plain, want = program(name, "none")
    tanh, product = (counted(closed.jaxpr, one) for one in ("tanh", "dot_general"))
    assert (counted(plain.jaxpr, "tanh"), tanh) == (DEPTH, 2 * DEPTH)
    # Of the two products of a block no gradient needs the second one's result.
    again = DEPTH if policy == "full" else 0
    assert product == counted(plain.jaxpr, "dot_general") + again
    for one, gradient in want.items():
        np.testing.assert_allclose(found[one], gradient, rtol=1e-5, atol=1e-6)


def test_the_loop_of_the_gradients_computes_its_block_again():
    for policy, again in {"none": 0, "dots": 1, "full": 1}.items():
        closed, _ = program("repeated", policy)
        assert loops(closed) == [DEPTH, DEPTH]
        forward, backward = (e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
        assert counted(forward.params["jaxpr"].jaxpr, "tanh") == 1
        assert counted(backward.params["jaxpr"].jaxpr, "tanh") == again


@pytest.mark.parametrize("name", MODELS)
def test_a_policy_keeps_no_more_than_it_says(name: str):
    kept = {
        policy: kept_bytes(ported_with(name, policy), x_of())["Device"]
        for policy in ("none", "dots", "full")
    }
    assert kept["none"] > kept["dots"] + DEPTH * CARRIED
    # The first product of a block is twice as wide as its input.
    assert kept["dots"] - kept["full"] == DEPTH * 2 * CARRIED
    if name == "reused":
        # The input of each block, and of the head.
        assert kept["full"] == (DEPTH + 1) * CARRIED
