"""Gathers by a known index that repeats itself: values, gradients, and what the program holds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import tpuport

IDS = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(i)) for i in (0, 1)])
WIDTH = 96  # an index of 2 * 40 * 96 numbers is no literal

# Each with the numbers that the program needs of its index.
INDICES: dict[str, tuple[Callable[[], torch.Tensor], int, int]] = {
    "rows, as masked autoencoders": (lambda: IDS.unsqueeze(-1).repeat(1, 1, WIDTH), 1, 80),
    "expanded rows": (lambda: IDS.unsqueeze(-1).expand(-1, -1, WIDTH), 1, 80),
    "some rows, some more than once": (
        lambda: (IDS[:, :30] // 2)[..., None].repeat(1, 1, WIDTH),
        1,
        60,
    ),
    "the same rows in all samples": (lambda: IDS[:1, :, None].repeat(2, 1, WIDTH), 1, 40),
    "fewer columns than x has": (lambda: IDS.unsqueeze(-1).repeat(1, 1, WIDTH - 6), 1, 80),
    "the last dim": (lambda: torch.arange(WIDTH).flip(0).repeat(2, 40, 1), 2, WIDTH),
    "one row for all": (lambda: torch.full((2, 40, WIDTH), 7), 1, 40),
    "no repetition": (
        lambda: torch.arange(2 * 40 * WIDTH).reshape(2, 40, WIDTH) % 37,
        1,
        2 * 40 * WIDTH,
    ),
}


class Gather(torch.nn.Module):
    def __init__(self, index: Callable[[], torch.Tensor], dim: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(2, 40, WIDTH))
        self.index, self.dim = index, dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.gather(x * self.weight, self.dim, self.index())
        return found.square() * torch.linspace(1, 2, found.numel()).reshape(found.shape)


@pytest.mark.parametrize(("index", "dim", "needed"), INDICES.values(), ids=INDICES)
def test_a_repeated_index_is_short(
    index: Callable[[], torch.Tensor], dim: int, needed: int
) -> None:
    torch.manual_seed(0)
    model, x = Gather(index, dim), torch.randn(2, 40, WIDTH)
    expected = model(x)
    expected.sum().backward()
    ported = tpuport.convert(model, verify=False)

    def loss(params: Any, x: Any) -> Any:
        out, _ = ported.apply(params, ported.buffers, None, x)
        return out.sum(), out

    given = jnp.asarray(x.numpy())
    gradients, out = jax.grad(loss, has_aux=True)(ported.params, given)
    torch.testing.assert_close(tpuport.to_torch(out), expected.detach())
    assert model.weight.grad is not None
    torch.testing.assert_close(tpuport.to_torch(gradients["weight"]), model.weight.grad)
    program = jax.make_jaxpr(loss)(ported.params, given)
    held = [value.size for value in program.consts if value.dtype == "int32"]
    assert sum(held) in (0, needed)
    assert max(held, default=0) <= needed


def test_an_index_out_of_range_is_an_error_as_before() -> None:
    ported = tpuport.convert(Gather(lambda: torch.full((2, 40, WIDTH), 40), 1), verify=False)
    with pytest.raises((RuntimeError, IndexError), match="out of range"):
        ported(torch.randn(2, 40, WIDTH))
