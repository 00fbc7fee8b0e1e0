"""Which way attention takes in a program for a TPU, by its sizes."""

from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F

import tpuport
from tests.attention_call.programs import arrays, kernels, of_scores_size
from tests.program.small import needs_libtpu
from tpuport.aot.entry_points import forward_step
from tpuport.sharding import make_mesh

HEADS, SIZE = 2, 64


class Attends(torch.nn.Module):
    """Attention of queries to keys, with a weight, and a mask for as many."""

    def __init__(self, mask: Any = None) -> None:
        super().__init__()
        self.mask = mask
        self.scale = torch.nn.Parameter(torch.ones(SIZE, dtype=torch.bfloat16))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Of queries (batch, heads, queries, size), and of as many keys as values."""
        return F.scaled_dot_product_attention(
            q * self.scale, k, v, attn_mask=None if self.mask is None else self.mask(q.shape[-2])
        )


def traced(queries: int, keys: int, *, axis: str = "data", mask: Any = None, **options: Any) -> Any:
    """The program for a TPU."""
    with tpuport.attention_options(**options):
        with torch.device("meta"):
            ported = tpuport.convert(Attends(mask))
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


def causal_by_places(length: int) -> torch.Tensor:
    """A mask that the code makes of places, on the host."""
    place = torch.arange(length)
    return place[:, None] >= place[None, :]


@needs_libtpu
@pytest.mark.filterwarnings("error::tpuport.kernels.attention.dispatch.AttentionWarning")
@pytest.mark.parametrize("length", [4096, 12288])
def test_long_masks_of_the_host_are_read(length: int):
    program = traced(length, length, mask=causal_by_places)
    assert kernels(program) > 0
    assert of_scores_size(program, length) == []


class Block(torch.nn.Module):
    """Attention with a mask that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(SIZE)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


class Packed(torch.nn.Module):
    """Blocks that share a mask of documents and of places, which is the same for all examples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        mask = ids[:, None, :, None] == ids[:, None, None, :]
        mask = mask & causal_by_places(ids.shape[1])
        for block in self.blocks:
            x = block(x, mask)
        return x


@needs_libtpu
@pytest.mark.filterwarnings("error::tpuport.kernels.attention.dispatch.AttentionWarning")
@pytest.mark.parametrize("batch", [4, 32])
def test_blocks_read_a_mask_that_examples_share(batch: int):
    with torch.device("meta"):
        ported = tpuport.convert(Packed())
    tpuport.shard(ported, make_mesh({"data": 4}, "v6e-4"), "replicated")
    shapes = ((batch, HEADS, 512, SIZE), "float32"), ((batch, 512), "int32")
    inputs = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
    step = forward_step(ported, "forward", inputs)
    program = jax.jit(step.function).trace(*step.arguments.values()).jaxpr.jaxpr
    assert kernels(program) > 0
    inside = [shape for shape in of_scores_size(program, 512) if len(shape) == 4 and shape[0] > 1]
    assert inside == []
