"""Compiled programs name their instructions after the user's modules."""

import re

import jax
import torch

import tpuport


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Inner(), Inner()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x).sum() + self.blocks[1](x).sum()


def names_of(text: str, op: str) -> set[str]:
    """The `op_name`s of a kind of operation in a program's text."""
    return {name for name in re.findall(r'op_name="([^"]*)"', text) if name.endswith(f"/{op}")}


def test_instructions_carry_the_modules_that_they_come_from_forward_and_backward():
    ported = tpuport.convert(Outer())
    x = jax.numpy.ones((4, 8))

    def loss(params: dict) -> jax.Array:
        return ported.apply(params, ported.buffers, None, x)[0]

    text = jax.jit(jax.grad(loss)).lower(ported.params).compile().as_text()
    products = names_of(text, "dot_general")
    for block in ("blocks.0", "blocks.1"):
        ours = [name for name in products if f"/{block}/{block}.up/" in name]
        assert any("transpose(" in name for name in ours)


def test_the_ported_call_itself_is_named_too():
    ported = tpuport.convert(Outer())
    ported(torch.ones(4, 8))
    (compiled,) = ported._cache.values()
    state = {name: ported._values()[name] for name in compiled.names}
    lowered = compiled.run.lower(state, jax.random.key(0), [jax.numpy.ones((4, 8))])
    text = lowered.compile().as_text()
    assert {n for n in names_of(text, "dot_general") if "/blocks.1/blocks.1.up/" in n}
