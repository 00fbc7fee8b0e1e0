"""What gradients compute again of attention by a kernel, under each remat policy."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax.extend.core import jaxprs_in_params
from torch import nn

import tpuport
from tests.attention_call.programs import KERNELS, gradient_program

# Longer than a block of the kernel.
X = torch.randn(1, 200, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2)).tanh()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def names(jaxpr: Any) -> Iterator[str]:
    """Names of the kernels that a program calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield str(equation.params["name"])
        for inner in jaxprs_in_params(equation.params):
            yield from names(inner)


def gradients(policy: str) -> tuple[int, int, Any]:
    """Calls of kernels forward and backward for the gradients of two blocks, and the gradients."""
    ported = tpuport.convert(model(), verify=False)
    tpuport.remat(ported, policy)
    with tpuport.attention_options(**KERNELS["splash"]):
        called = list(names(gradient_program(ported, lambda out: (out**2).sum(), X)))

        def loss(params: Any) -> Any:
            out, _ = ported.apply(params, ported.buffers, jax.random.key(0), X)
            return (out**2).sum()

        found = jax.jit(jax.grad(loss))(ported.params)
    forward = sum("_fwd" in name for name in called)
    return forward, len(called) - forward, found


@pytest.fixture(scope="module")
def plain() -> Any:
    return gradients("none")


def test_without_a_policy_nothing_is_computed_again(plain: Any):
    # Causal attention of 2 by 2 blocks is two calls: what is seen whole, and the diagonal.
    assert plain[:2] == (2 * 2, 2 * 2 * 2)


@pytest.mark.parametrize(("policy", "times"), [("dots", 1), ("dots_offload", 1), ("full", 2)])
def test_a_policy_that_keeps_products_keeps_attention(policy: str, times: int, plain: Any):
    forward, backward, found = gradients(policy)
    assert (forward, backward) == (times * plain[0], plain[1])
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(close, found, plain[2])
