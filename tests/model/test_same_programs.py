"""Blocks that are one function are seen to be one, whatever their programs are made of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tpuport
from tests.program.small import needs_libtpu
from tpuport.tracing.scan_layers.jaxpr_equal import same_program

WIDTH, NUM_BLOCKS = 16, 4


class Block(torch.nn.Module):
    """A residual block around some function."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.linear(x))


class Stack(torch.nn.Module):
    """Blocks in a list."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([make() for _ in range(NUM_BLOCKS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def attended(x: torch.Tensor) -> torch.Tensor:
    heads = x[:, None]
    return F.scaled_dot_product_attention(heads, heads, heads)[:, 0]


def softmaxed(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x, -1, keepdim=True).expand_as(x)


def counted(ported: Any) -> list[tuple[int, int]]:
    return [(record.programs, record.shared) for record in ported.report.blocks]


@pytest.mark.parametrize("act", [F.relu, F.logsigmoid, softmaxed, attended, F.gelu, F.softplus])
def test_functions_with_rules_of_their_own(act: Any):
    model = Stack(lambda: Block(act))
    ported = tpuport.convert(model, blocks="once")
    x = torch.randn(2, 8, WIDTH)
    found = tpuport.to_torch(ported(x))
    assert counted(ported) == [(1, NUM_BLOCKS - 1)]
    torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", ["blockwise", "auto", "full"])
def test_attention_by_options(kernel: Any):
    model = Stack(lambda: Block(attended))
    ported = tpuport.convert(model, blocks="once")
    x = torch.randn(2, 8, WIDTH)
    with tpuport.attention_options(kernel=kernel):
        found = tpuport.to_torch(ported(x))
    assert counted(ported) == [(1, NUM_BLOCKS - 1)]
    torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-5)


def test_a_layer_of_torch():
    model = Stack(lambda: torch.nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, batch_first=True))
    ported = tpuport.convert(model, blocks="once")
    ported(torch.randn(2, 8, WIDTH))
    assert counted(ported) == [(1, NUM_BLOCKS - 1)]


class Wide(torch.nn.Module):
    """Attention of a size that a TPU's kernel serves."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(256, 768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part[:, None] for part in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v)[:, 0]


@needs_libtpu
def test_the_kernel_of_a_tpu_in_a_loop():
    ported = tpuport.convert(Stack(Wide).bfloat16().requires_grad_(False))
    x = torch.empty(4, 1024, 256, dtype=torch.bfloat16, device="meta")
    report = tpuport.compile_for(
        ported, "v6e-4", inputs=(x,), mesh={"data": -1}, rules="ddp", kernel_times=False
    )
    assert report.work is not None
    [attention] = report.work.attention
    assert (attention.module, attention.kernel) == ("blocks.*", "splash_mha_fwd_residuals")
    # Of every block on every chip; in the program there is one.
    assert attention.count == 4 * NUM_BLOCKS
    assert report.equations < 60


class Answers(torch.nn.Module):
    """Gives a value of its own for an attribute that is not there."""

    def __init__(self, tag: float) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.tag = tag

    def __getattr__(self, name: str) -> Any:
        return 7.0 if name == "tag" else super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.tag * torch.tanh(self.linear(x))


def test_a_hidden_attribute_that_the_class_answers_for():
    tags = iter(range(NUM_BLOCKS))
    model = Stack(lambda: Answers(float(next(tags))))
    ported = tpuport.convert(model, blocks="once", verify=False)
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(tpuport.to_torch(ported(x)), model(x), rtol=1e-5, atol=1e-5)


KEPT: dict[str, torch.Tensor] = {}


class Asserting(Block):
    """Checks that it was given what somebody else keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x is KEPT["x"]
        return super().forward(x)


class Keeping(Stack):
    """Keeps what it gives to its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            KEPT["x"] = x
            x = block(x)
        return x


@pytest.mark.slow
def test_an_assertion_that_stand_ins_do_not_pass():
    model = Keeping(lambda: Asserting(torch.tanh))
    ported = tpuport.convert(model, blocks="once", verify=False)
    x = torch.randn(2, WIDTH)
    try:
        torch.testing.assert_close(tpuport.to_torch(ported(x)), model(x), rtol=1e-5, atol=1e-5)
    finally:
        KEPT.clear()


def checkpointed(name: str) -> Any:
    policy = jax.checkpoint_policies.save_only_these_names(name)
    return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), policy=policy)


def scaled_back(factor: float, number: Any = 1.0) -> Any:
    """An identity whose cotangent is scaled, by something that only a closure holds."""
    function = jax.custom_vjp(lambda x: x * number)
    function.defvjp(lambda x: (x * number, None), lambda _, grad: (grad * factor,))
    return function


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        (checkpointed("a"), checkpointed("a"), True),
        (checkpointed("a"), checkpointed("b"), False),
        (scaled_back(2.0), scaled_back(2.0), True),
        (scaled_back(2.0), scaled_back(3.0), False),
        (scaled_back(0.0), scaled_back(-0.0), False),
        (scaled_back(2.0, np.float32(1)), scaled_back(2.0, np.float32(2)), False),
        (lambda x: x + 1, lambda x: x + 1, True),
        (lambda x: x + 1, lambda x: 1 + x, False),
        (lambda x: x + np.ones(3, "f4"), lambda x: x + np.ones(3, "f4"), True),
        (lambda x: x + np.ones(3, "f4"), lambda x: x + np.zeros(3, "f4"), False),
    ],
)
def test_programs_are_the_same_if_they_compute_and_differentiate_alike(
    ours: Any, theirs: Any, same: bool
):
    assert same_program(*(jax.make_jaxpr(f)(jnp.ones(3)) for f in (ours, theirs))) is same
