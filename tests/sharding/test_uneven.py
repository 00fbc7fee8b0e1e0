"""Tokens that the chips do not divide are spread all the same, and nothing is computed twice."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport.sharding import make_mesh
from tpuport.sharding.rule_table import ShardingRules
from tpuport.sharding.spec_rule import SpecRule
from tpuport.sharding.strategies import sequence_activations

WIDTH, INNER, CHIPS = 16, 48, 8


class Block(nn.Module):
    """What a token goes through by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up_proj, self.down_proj = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, WIDTH) to the same."""
        return x + self.down_proj(torch.nn.functional.gelu(self.up_proj(self.norm(x))))


class Model(nn.Module):
    """Blocks in a list, as repeated ones are found."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, S, WIDTH) to the same."""
        for block in self.blocks:
            x = block(x)
        return x


def spread(model: nn.Module) -> tpuport.PortedModel:
    ported = tpuport.convert(model)
    whole = [SpecRule("**", jax.sharding.PartitionSpec(), "whole")]
    rules = ShardingRules(whole, name="tokens", activations=sequence_activations(model))
    tpuport.shard(ported, make_mesh({"sequence": CHIPS}), rules)
    return ported


@pytest.mark.parametrize("tokens", [13, 16, 8, 5])
def test_numbers_and_gradients_are_those_of_one_device(tokens: int):
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(2, tokens, WIDTH)
    ported = spread(model)

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return (ported.apply(params, ported.buffers, None, jnp.asarray(x.numpy()))[0] ** 2).sum()

    value, gradients = jax.jit(jax.value_and_grad(loss))(ported.params)
    expected = (model(x) ** 2).sum()
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("tokens", "of_a_chip"), [(13, 2), (16, 2), (33, 5)])
def test_a_chip_multiplies_its_own_tokens_only(tokens: int, of_a_chip: int):
    ported = spread(Model())

    def run(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return ported.apply(params, ported.buffers, None, x)[0]

    x = jax.ShapeDtypeStruct((1, tokens, WIDTH), "float32")
    text = str(jax.jit(run).lower(ported.params, x).compile().as_text())
    rows = {
        int(np.prod([int(n) for n in shape.split(",")[:-1]]))
        for shape in re.findall(r"= f32\[([\d,]+)\]\S* dot\(", text)
    }
    assert rows == {of_a_chip}
