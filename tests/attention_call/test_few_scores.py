"""A handful of queries: for a TPU, too, the matrix of scores, smaller than keys and values."""

from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F

import tpuport
from tests.attention_call.programs import arrays, kernels
from tests.program.small import needs_libtpu
from tpuport.program.step import forward_step
from tpuport.sharding import make_mesh

HEADS, SIZE = 2, 64


class Attends(torch.nn.Module):
    """Attention of queries to keys, with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Of queries (batch, heads, queries, size), and of as many keys as values."""
        return F.scaled_dot_product_attention(q * self.scale, k, v)


def traced(queries: int, keys: int, axis: str = "data", **options: Any) -> Any:
    """The program for a TPU."""
    with tpuport.attention_options(**options):
        with torch.device("meta"):
            ported = tpuport.convert(Attends())
        tpuport.shard(ported, make_mesh({axis: 4}, "v6e-4"), "replicated")
        inputs = tuple(
            jax.ShapeDtypeStruct((4, HEADS, length, SIZE), "bfloat16")
            for length in (queries, keys, keys)
        )
        step = forward_step(ported, "forward", inputs)
        return jax.jit(step.function).trace(*step.arguments.values()).jaxpr.jaxpr


@needs_libtpu
@pytest.mark.parametrize(("queries", "keys"), [(8, 2800), (1, 4096), (2800, 8), (8, 8)])
def test_few_scores_need_no_kernel(queries: int, keys: int):
    program = traced(queries, keys)
    assert kernels(program) == 0
    assert (4, HEADS, queries, keys) in arrays(program)


@needs_libtpu
@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [
        (128, 2800, {}),
        (512, 512, {}),
        (8, 2800, {"kernel": "splash"}),
        (8, 2800, {"axis": "sequence"}),
    ],
    ids=["many queries", "as many of both", "by name", "a sequence that is spread"],
)
def test_others_have_the_kernel(queries: int, keys: int, options: dict[str, Any]):
    program = traced(queries, keys, **options)
    assert kernels(program) > 0
    assert not any(shape[-2:] == (queries, keys) for shape in arrays(program))
