"""Attention as few write it, but PyTorch takes: scalars in masks, finite numbers that hide beside a
bias, batches and heads that are broadcast, nothing to attend to, lengths that no tile divides.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tpuport
from tests.attention_call.programs import KERNELS

pytestmark = pytest.mark.filterwarnings("ignore::tpuport.attention.dispatch.AttentionWarning")

B, H, S, D = 2, 2, 20, 8
INF = float("-inf")
VALID = torch.ones(B, S, dtype=torch.bool)
VALID[0, :3] = False
LOWEST = torch.finfo(torch.float32).min


class Attends(torch.nn.Module):
    """Attention with the mask that `make` gives of two arguments."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, q: Any, k: Any, v: Any, m: torch.Tensor, flag: torch.Tensor) -> Any:
        """Of queries, keys and values (B, heads, sequence, D)."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.make(m, flag))


def operands(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in shapes or ((B, H, S, D),) * 3]


def check(model: Any, *args: Any, kernel: str = "blockwise") -> None:
    """The first call is compared with eager PyTorch."""
    with tpuport.attention_options(**KERNELS[kernel]):
        ported = tpuport.convert(model)
        ported(*args)
    assert ported.report.ok, ported.report


def padding(m: torch.Tensor, value: float = INF) -> torch.Tensor:
    return torch.zeros(B, 1, 1, S).masked_fill(~m[:, None, None], value)


SCALARS = {
    "plus a number": lambda m, flag: padding(m) + 1.0,
    "plus a tensor": lambda m, flag: padding(m) + torch.tensor(1.0),
    "and a flag": lambda m, flag: m[:, None, None] & flag,
    "and a constant": lambda m, flag: m[:, None, None] & False,
    "where of a flag": lambda m, flag: torch.where(flag & m[:, None, None], 0.0, INF),
    "all or none": lambda m, flag: torch.where(flag, padding(m), INF),
}


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("make", SCALARS.values(), ids=SCALARS)
def test_a_mask_may_have_scalars_in_it(make: Any, flag: bool):
    check(Attends(make), *operands(), VALID, torch.tensor(flag))


@pytest.mark.parametrize("hidden", [-1e4, LOWEST / 2, LOWEST])
def test_what_a_finite_number_hides_is_seen_where_all_else_is_hidden_more(hidden: float):
    causal = torch.full((S, S), hidden).triu(1)
    check(Attends(lambda m, flag: causal + m), *operands(), padding(VALID), VALID)
    check(Attends(lambda m, flag: causal + m), *operands(), padding(VALID, hidden), VALID)
    biases = 3e4 * torch.randn(B, 1, S, S)
    check(Attends(lambda m, flag: causal + m), *operands(), biases, VALID)


SHAPES = {
    "queries are broadcast": ((1, H, S, D), (B, H, S, D), (B, H, S, D)),
    "keys are broadcast": ((B, H, S, D), (1, H, S, D), (1, H, S, D)),
    "heads of queries": ((B, 1, S, D), (B, 4, S, D), (B, 4, S, D)),
    "heads of values": ((B, 2, S, D), (B, 2, S, D), (B, 1, S, D)),
    "no queries": ((B, H, 0, D), (B, H, S, D), (B, H, S, D)),
    "no keys": ((B, H, S, D), (B, H, 0, D), (B, H, 0, D)),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_shapes_that_eager_takes_are_taken(shapes: Any):
    for kernel in KERNELS:
        check(F.scaled_dot_product_attention, *operands(*shapes), kernel=kernel)


@pytest.mark.parametrize("length", [21, 1100])
def test_a_bias_over_a_mesh_may_have_any_length(length: int):
    from tpuport.sharding import make_mesh

    class Biased(torch.nn.Module):
        """With a weight, so that there is something to spread."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(D))

        def forward(self, q: Any, k: Any, v: Any, bias: Any) -> Any:
            """Attention with a bias."""
            return F.scaled_dot_product_attention(q * self.scale, k, v, attn_mask=bias)

    (q, k, v), bias = operands(*(((B, 2, length, D),) * 3)), torch.randn(1, 1, length, length)
    with tpuport.attention_options(**KERNELS["blockwise"]):
        ported = tpuport.convert(Biased(), verify=False)
        tpuport.shard(ported, make_mesh({"data": 2, "tensor": 2, "sequence": 2}), "replicated")
        got = ported(q, k, v, bias)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-4, atol=1e-5)
