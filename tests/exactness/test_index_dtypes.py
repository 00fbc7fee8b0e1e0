"""Errors that eager raises for the dtype of an index or a target, which meta functions take."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tests.exactness.scenario import normal

pytestmark = pytest.mark.filterwarnings("ignore:.*index_reduce.. is in beta")

T = torch.tensor
_X = normal(4, 3)

# Ops on x [4, 3] and an index or target [1], whose dtype the meta functions do not check.
_BY_DTYPE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index_add": lambda x, k: x.index_add(0, k, x[:1]),
    "index_copy": lambda x, k: x.index_copy(0, k, x[:1]),
    "index_copy_": lambda x, k: x.clone().index_copy_(0, k, x[:1]),
    "index_fill": lambda x, k: x.index_fill(0, k, 1.0),
    "index_fill_": lambda x, k: x.clone().index_fill_(0, k, 1.0),
    "index_reduce": lambda x, k: x.index_reduce(0, k, x[:1], "amax"),
    "index_select": lambda x, k: x.index_select(0, k),
    "put": lambda x, k: x.put(k, x[0, :1]),
    "x[k]": lambda x, k: x[k] if k.dtype not in (torch.uint8, torch.bool) else x,
    "x[k] = y": lambda x, k: x.index_put((k,), x[:1]) if k.dtype is not torch.bool else x,
    "nll_loss": lambda x, k: F.nll_loss(x[:1], k) if k.dtype is not torch.uint8 else x,
    "nll_loss of images": lambda x, k: F.nll_loss(x[:1, :, None], k[:, None]),
    "multi_margin_loss": lambda x, k: F.multi_margin_loss(x[:1], k),
}


class _ErrorsByOp(nn.Module):
    """The errors of all ops by name."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> dict[str, str]:
        found = {}
        for name, op in _BY_DTYPE.items():
            try:
                op(x, k.to(self.dtype))
            except (IndexError, RuntimeError) as error:
                found[name] = f"{type(error).__name__}: {error}"[:40]
        return found


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str
)
def test_dtypes_of_indices(dtype: torch.dtype) -> None:
    module, given = _ErrorsByOp(dtype), (_X, T([1]))
    found = tpuport.convert(module, verify=False)(*given)
    wanted = module(*given)
    other = {name for name in wanted if found.get(name) != wanted[name]}
    assert found.keys() == wanted.keys()
    # Where a meta function checks the dtype as well, it has a text of its own.
    assert all(found[n].split(":")[0] == wanted[n].split(":")[0] for n in wanted)
    assert other <= {"nll_loss", "nll_loss of images", "multi_margin_loss"}


def _reduced(x: torch.Tensor, m: torch.Tensor, few: bool) -> list[str]:
    empty, found = x[:0] if few else x, []
    for reduced in (
        lambda: empty.amax(0),
        lambda: empty.amin((1, -2)),
        lambda: empty.aminmax(dim=-2).max,
        lambda: x[m].kthvalue(1, 0).values,
    ):
        try:
            reduced()
        except IndexError as error:
            found.append(str(error))
    return found


def test_dims_without_elements():
    ported = tpuport.convert(_reduced, verify=False)
    for given in ((_X, T([True] * 4), False), (_X, T([False] * 4), True)):
        assert ported(*given) == _reduced(*given)


class _FillsInABranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        return out.index_fill(0, k, 2.0) if x.sum() > 0 else out * 3


class _TakesInABranch(_FillsInABranch):
    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        return out.take(k).sum() if x.sum() > 0 else out.sum() * 3


@pytest.mark.parametrize("kind", [_FillsInABranch, _TakesInABranch])
def test_an_int32_array_of_jax_decides_no_branch(kind: type[nn.Module]) -> None:
    module, x, k = kind(), _X.abs(), T([1, 3])
    module(x, k).sum().backward()
    ported = tpuport.convert(module)

    def loss(params: Any, x: jax.Array, k: jax.Array) -> jax.Array:
        return ported.apply(params, ported.buffers, jax.random.key(0), x, k)[0].sum()

    found = jax.jit(jax.grad(loss))(ported.params, jnp.asarray(x), jnp.asarray([1, 3]))
    want: Any = module.get_parameter("linear.weight").grad
    torch.testing.assert_close(tpuport.to_torch(found["linear.weight"]), want)
