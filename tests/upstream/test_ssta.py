"""HunyuanVideo-1.5's sparse attention, as it is, by the provided flex_block_attn.

Takes upstream's code as test_hyvideo.py does. The reference is upstream's function in eager
PyTorch, with flex_block_attn as its own tests write it: `scaled_dot_product_attention`, and blocks
written out as pairs.
"""

import contextlib
import functools
import importlib
import math
import sys
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tpuport
from tests.upstream.test_hyvideo import pytestmark as needs_hyvideo
from tpuport.compat.emulated.programs import PortWarning, programs
from tpuport.sharding import ShardingRules, SpecRule, count_collectives, make_mesh

pytestmark = [
    *needs_hyvideo,
    pytest.mark.filterwarnings(f"error::{PortWarning.__module__}.PortWarning"),
]

# Eight tiles, all of them padded, and a block of text, padded too. With 6 x 8 x 8, as upstream has
# it, eager PyTorch takes nine times the work over all pairs: the slow cases have such tiles.
SMALL, AS_UPSTREAM = ((3, 9, 10), (2, 8, 8)), ((7, 9, 10), (6, 8, 8))
TEXT = 20
MOBA = {"sampling_type": "importance", "lambda_": 0.7, "mask_share_within_head": 0}
CASES: dict[str, dict[str, Any]] = {
    "ssta": {"sparse_type": "ssta", **MOBA, "with_mask": True},
    "ssta, repeated": {"sparse_type": "ssta", **MOBA, "pad_type": "repeat"},
    "ssta by similarity": {
        "sparse_type": "ssta",
        "sampling_type": "similarity",
        "mask_share_within_head": 0,
        "with_mask": True,
    },
    "sta": {"sparse_type": "sta", "sampling_type": "similarity"},
    "moba": {"sparse_type": "block_attn", **MOBA},
}
SLOW = {"ssta, repeated", "ssta by similarity", "moba"}


def sizes_and_tile(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return AS_UPSTREAM if name in SLOW else SMALL


def pairs(q: Any, k: Any, v: Any, q_size: int, kv_size: int, blocks: torch.Tensor) -> torch.Tensor:
    blocks = blocks if blocks.dim() == 4 else blocks[None, None]
    seen = blocks.repeat_interleave(q_size, 2).repeat_interleave(kv_size, 3)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class Sparse(torch.nn.Module):
    """One attention with a weight before it, for gradients."""

    def __init__(self, function: Any, name: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, 128))
        self.function, self.case = function, dict(CASES[name])
        self.sizes, self.tile = sizes_and_tile(name)
        self.with_mask = self.case.pop("with_mask", False)

    def forward(self, q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
        sizes = {"tile_thw": self.tile, "kernel_thw": (1, 1, 1), "text_len": TEXT, "topk": 2}
        mask = mask if self.with_mask else None
        given = (q * self.weight, k, v, self.sizes)
        out, ratio = self.function(*given, text_mask=mask, **sizes, **self.case)
        del ratio
        return out


def outcome(name: str, device: str) -> tuple[list[torch.Tensor], Sparse]:
    """The output with the gradients of queries, keys, values and the weight; and the module."""
    module = importlib.import_module("hyvideo.models.transformers.modules.ssta_attention")
    generator = torch.Generator().manual_seed(0)
    shape = (2, 2, math.prod(sizes_and_tile(name)[0]) + TEXT, 128)
    q, k, v = (torch.randn(shape, generator=generator).to(device) for _ in range(3))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = (torch.arange(TEXT) < torch.tensor([[7], [20]])).long().to(device)
    net = Sparse(module.ssta_3d_attention, name).to(device)
    out = net(*inputs, mask)
    found = torch.autograd.grad((out * out).sum(), [*inputs, net.weight])
    return [out.detach().cpu(), *(x.cpu() for x in found)], net


@contextlib.contextmanager
def fresh() -> Any:
    """Import upstream's modules anew, and forget them."""
    kept = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in ("hyvideo", "loguru")}
    for name in kept:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] in ("hyvideo", "loguru")]:
            del sys.modules[name]
        sys.modules.update(kept)


@functools.cache
def reference(name: str) -> list[torch.Tensor]:
    stand_ins = {"flex_block_attn": ModuleType("flex_block_attn"), "loguru": ModuleType("loguru")}
    vars(stand_ins["flex_block_attn"])["flex_block_attn_func"] = pairs
    vars(stand_ins["loguru"])["logger"] = None
    with fresh():
        sys.modules.update(stand_ins)
        try:
            return outcome(name, "cpu")[0]
        finally:
            for one in stand_ins:
                sys.modules.pop(one, None)


@pytest.fixture(autouse=True)
def _checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.upstream.test_hyvideo import CHECKOUT

    if CHECKOUT is not None:
        monkeypatch.syspath_prepend(CHECKOUT)


@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "pairs"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
def test_it_equals_upstreams_function_in_eager_pytorch(name: str, by_kernel: bool):
    wanted = reference(name)
    chosen = tpuport.attention_options(interpret=True) if by_kernel else contextlib.nullcontext()
    with fresh(), tpuport.porting("hyvideo", absent=["loguru"]), chosen:
        found, net = outcome(name, "cuda")
        (program,) = programs()
        kernels = [one.kernel for one in program.report.attention]
        assert "block-sparse" in kernels if by_kernel else not kernels
        assert program.report.verified
    del net
    for one, other in zip(found, wanted, strict=True):
        # Of the largest: sums over tiles, in another order than over all pairs, in float32.
        scale = other.abs().max()
        torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["sta", "ssta"])
def test_one_program_over_chips_exchanges_tokens_for_heads_before_they_are_sorted(name: str):
    wanted = reference(name)[0]
    mesh = make_mesh({"sequence": 2}, jax.devices()[:2])
    with fresh(), tpuport.porting("hyvideo", absent=["loguru"], port_modules=False):
        module = importlib.import_module("hyvideo.models.transformers.modules.ssta_attention")
        ported = tpuport.convert(Sparse(module.ssta_3d_attention, name), verify=False)
        tpuport.shard(ported, mesh, ShardingRules([SpecRule("**", P())], name="whole"))
        tokens = NamedSharding(mesh, P(None, None, "sequence"))
        generator = torch.Generator().manual_seed(0)
        given = [torch.randn(wanted.shape, generator=generator).numpy() for _ in range(3)]
        mask = (np.arange(TEXT) < [[7], [20]]).astype(int)
        given = [*(jax.device_put(x, tokens) for x in given), mask]

        def run(*given: Any) -> Any:
            out, _ = ported.apply(ported.params, ported.buffers, None, *given)
            return jax.lax.with_sharding_constraint(out, tokens)

        with tpuport.attention_options(interpret=True, sequence_parallel="ulysses"):
            compiled = jax.jit(run).lower(*given).compile()
    if name == "sta":
        # The other's masks are made of means over tiles, which are sent, too.
        assert set(count_collectives(str(compiled.as_text()))) == {"all-to-all"}
    scale = float(wanted.abs().max())
    np.testing.assert_allclose(compiled(*given) / scale, wanted / scale, rtol=0, atol=2e-5)
