"""Attention as few write it, but PyTorch takes: scalars in masks, finite numbers that hide beside a
bias, batches and heads that are broadcast, nothing to attend to, lengths that no tile divides.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tpuport
from tests.attention_call.programs import KERNELS
from tpuport.foundation.errors import UsageError
from tpuport.tracing.attention.masks.graph import Graph
from tpuport.tracing.attention.masks.two_valued import conditions

pytestmark = pytest.mark.filterwarnings(
    "ignore::tpuport.kernels.attention.dispatch.AttentionWarning"
)

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_finite_number_hides_no_score_that_is_as_large(kernel: str, dtype: torch.dtype):
    def call(q: Any, k: Any, v: Any) -> Any:
        causal = torch.full((S, S), -1e4, dtype=dtype).triu(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal, scale=1.0)

    q, k, v = (x.to(dtype) for x in operands())
    # Scores of up to about 2e4: of many rows the largest is one that -1e4 is added to.
    q, k = 50 * q, 50 * k
    with tpuport.attention_options(**KERNELS[kernel]):
        got = tpuport.convert(call, verify=False)(q, k, v)
    want = call(q, k, v)
    hidden = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    assert (hidden - want).abs().max() > 1
    np.testing.assert_allclose(got.float().numpy(), want.float().numpy(), rtol=1e-2, atol=1e-2)


def test_two_finite_numbers_that_hide_add_up_to_a_third():
    causal, found = np.triu(np.full((S, S), LOWEST / 8, np.float32), 1), []

    def mask(m: jax.Array) -> jax.Array:
        both = jnp.where(m[:, None, None], 0.0, LOWEST / 8) + causal
        # True where both hide, too.
        seen = both != LOWEST / 8
        found.extend(conditions(Graph(frozen=True).of(seen)))
        return seen

    jax.make_jaxpr(mask)(jnp.asarray(VALID.numpy()))
    assert [(node.name, node.shape) for node in found] == [("ne", (B, 1, S, S))]


WRAPPING = {
    "uint8": (torch.uint8, 16),
    "int16": (torch.int16, 256),
    "int32": (torch.int32, 1 << 16),
    "int64": (torch.int64, 1 << 16),
    "int32 of int16": (torch.int16, 1 << 14),
}


@pytest.mark.parametrize("name", WRAPPING)
def test_products_of_whole_numbers_wrap_as_eager_has_them(name: str):
    dtype, large = WRAPPING[name]

    def mask(m: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        m = m.int() if name.startswith("int32 of") else m
        return (m[:, None, :, None] * m[:, None, None, :]).bool()

    ids = torch.where(VALID, 3, 0).to(dtype)
    ids[1, ::2] = large
    with tpuport.attention_options(**KERNELS["blockwise"]):
        ported = tpuport.convert(Attends(mask))
        ported(*operands(), ids, VALID)
    assert ported.report.ok, ported.report
    (call,) = ported.report.attention
    # int64 does not wrap of what 32 bits hold, nor does int32 of what 16 bits hold.
    is_sure = "int64" in name or " of " in name
    structure = "padded keys, padded queries" if is_sure else "further conditions"
    assert call.mask == structure


def test_a_product_of_int64_is_read_in_repeated_blocks():
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = torch.nn.Linear(D, D)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.mix(F.scaled_dot_product_attention(x, x, x, attn_mask=mask))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block() for _ in range(4)])

        def forward(self, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            mask = (m[:, None, :, None] * m[:, None, None, :]).bool()
            for block in self.blocks:
                x = block(x, mask)
            return x

    with tpuport.attention_options(**KERNELS["blockwise"]):
        ported = tpuport.convert(Model())
        ported(operands()[0], VALID.long())
    assert ported.report.ok, ported.report
    (call,) = ported.report.attention
    assert (call.mask, call.calls) == ("padded keys, padded queries", 4)
    assert [(record.programs, record.shared) for record in ported.report.blocks] == [(1, 3)]


SHAPES = {
    "no heads": ((S, D), (S, D), (S, D)),
    "keys without heads": ((B, H, S, D), (S, D), (S, D)),
    "queries without heads": ((S, D), (B, H, S, D), (H, S, D)),
    "batches of keys and of values": ((1, H, S, D), (B, 1, S, D), (1, 1, S, D)),
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


def test_queries_of_any_rank_are_served_by_the_kernel():
    for shapes in SHAPES.values():
        args = operands(*shapes)
        with tpuport.attention_options("splash", **KERNELS["splash"]):
            ported = tpuport.convert(F.scaled_dot_product_attention)
            ported(*args)
        assert ported.report.ok, ported.report
        used = [call.kernel for call in ported.report.attention]
        assert used == (["splash"] if all(x.numel() for x in args) else ["full"])


REFUSED = {
    "more than bands and segments": lambda q, m, flag: F.scaled_dot_product_attention(
        q, q, q, attn_mask=m[:, None, None] | torch.ones(S, S).tril().bool()
    ),
    "a bias": lambda q, m, flag: F.scaled_dot_product_attention(q, q, q, attn_mask=q @ q.mT),
    "dropout": lambda q, m, flag: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1),
    "float16 operands": lambda q, m, flag: F.scaled_dot_product_attention(*[q.half()] * 3),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_splash_by_name_refuses_at_the_users_line(reason: str):
    call = REFUSED[reason]
    first = call.__code__.co_firstlineno

    def forgiving(*args: Any) -> Any:
        try:
            return call(*args)
        except Exception:
            return args[0]

    for model in (call, forgiving):
        with (
            tpuport.attention_options("splash", **KERNELS["splash"]),
            pytest.raises(UsageError, match="Splash attention cannot serve") as refused,
        ):
            tpuport.convert(model, verify=False)(operands()[0], VALID, torch.tensor(True))
        assert reason in str(refused.value)
        file, line, _ = str(refused.value).split(":", 2)
        assert file == __file__
        assert first <= int(line) <= first + 2


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
