"""Sparse tensors: those of the host are constants of a program, and answer as in eager PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import (
    Scenario,
    assert_same,
    by_tpuport,
    check_gradients,
    normal,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (invariant|CSR|CSC)")
DENSE = torch.tensor([[0.0, 2.0, 0.0], [0.5, 0.0, 0.0], [1.0, 0.0, 3.0]])
X = normal(3, 4)
LAYOUTS = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
}
Use = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# What code does with an adjacency matrix and the features of nodes.
USES: dict[str, Use] = {
    "spmm": lambda a, x: torch.spmm(a, x),
    "operator": lambda a, x: a @ x + a.t() @ x,
    "sparse_mm": lambda a, x: torch.sparse.mm(a, x),
    "sparse_addmm": lambda a, x: torch.sparse.addmm(x, a, x, alpha=0.5),
    "scaled": lambda a, x: (a * 2) @ x,
    "branch": lambda a, x: x * 2 if a.is_sparse or a.layout is torch.sparse_csr else x * 3,
    "dense": lambda a, x: a.to_dense() @ x,
    "made": lambda a, x: torch.eye(3).to_sparse() @ x * a.size(0),
}
ONLY_COO: dict[str, Use] = {
    "indices": lambda a, x: x[a.coalesce().indices()[1]] * a.coalesce().values()[:, None],
    "parts": lambda a, x: x.index_add(0, a._indices()[0], x[a._indices()[1]]) * a._nnz(),
    "degrees": lambda a, x: x / (1 + torch.sparse.sum(a, 1).to_dense()[:, None]),
    "squared": lambda a, x: torch.sparse.mm(a, a) @ x,
    "rebuilt": lambda a, x: torch.sparse_coo_tensor(a._indices(), a._values() * 2, (3, 3)) @ x,
}


class Buffer(nn.Module):
    def __init__(self, use: Use, adjacency: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.lin, self.use = nn.Linear(4, 4), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.adjacency, self.lin(x))


class Attribute(Buffer):
    def __init__(self, use: Use, adjacency: torch.Tensor) -> None:
        super().__init__(use, torch.zeros(1))
        del self._buffers["adjacency"]
        self.adjacency = adjacency


class Argument(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.lin, self.use = nn.Linear(4, 4), use

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return self.use(adjacency, self.lin(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_uses_of_a_layout(layout):
    def build() -> nn.Module:
        uses = [*USES.values(), *(ONLY_COO.values() if layout == "coo" else ())]
        adjacency = LAYOUTS[layout](DENSE)
        return Attribute(lambda a, x: torch.cat([use(a, x) for use in uses]), adjacency)

    check_gradients(Scenario("uses", build, ((X,),)), by_tpuport)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_argument(layout):
    adjacency = LAYOUTS[layout](DENSE)
    model = Argument(lambda a, x: torch.spmm(a, x).relu())
    ported = by_tpuport(model)
    for a in (adjacency, adjacency, LAYOUTS[layout](DENSE.t() * 2)):
        assert_same(ported(X, a), model(X, a), "output")
    assert len(ported.report.retraces) == 1, "the same adjacency matrix made a new program"


def test_a_write_to_the_values_counts_at_the_next_call():
    adjacency = DENSE.to_sparse()
    model = Buffer(USES["spmm"], adjacency)
    ported = by_tpuport(model)
    for _ in range(2):
        assert_same(ported(X), model(X), "output")
        adjacency._values().mul_(3)


def test_a_large_one_that_is_written_counts_too():
    dense = torch.eye(2000)
    adjacency = dense.to_sparse()
    ported = by_tpuport(lambda x: adjacency @ x)
    x = normal(2000, 2)
    for factor in (1.0, 3.0):
        assert_same(ported(x), x * factor, "output")
        adjacency._values().mul_(3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "program",
    [lambda a, x: a * x, lambda a, x: x + a, lambda a, x: torch.add(x, a), lambda a, x: x.mul_(a)],
    ids=["mul", "plus", "add", "in_place"],
)
def test_a_result_that_may_be_sparse_is_refused(program: Use, layout: str):
    adjacency = LAYOUTS[layout](DENSE)

    def line(x: torch.Tensor) -> torch.Tensor:
        return program(adjacency, x * 1)

    with pytest.raises(tpuport.PortError, match="of a sparse tensor and a value") as refused:
        tpuport.convert(line, verify=False)(normal(3, 3))
    assert refused.value.line == program.__code__.co_firstlineno


def test_values_of_the_program_make_no_sparse_tensor():
    def program(x: torch.Tensor) -> Any:
        index = torch.arange(3)
        return torch.sparse_coo_tensor(torch.stack([index, index]), x[:, 0]) @ x

    def remedy(x: torch.Tensor) -> Any:
        index = torch.arange(3)
        return x.new_zeros(3, 4).index_add(0, index, x[:, 0][:, None] * x[index])

    with pytest.raises(tpuport.PortError, match=r"sparse_coo_tensor.* of values") as refused:
        tpuport.convert(program)(X)
    assert refused.value.line == program.__code__.co_firstlineno + 2
    assert "index_add" in str(refused.value)
    assert_same(tpuport.convert(remedy)(X), program(X), "what it says to do")


class Gives(nn.Module):
    """Returns a sparse matrix that it keeps beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.adjacency = DENSE.to_sparse()

    def forward(self, x: torch.Tensor) -> Any:
        return self.adjacency @ x, self.adjacency


def test_a_sparse_constant_is_a_result_under_porting_and_refused_else():
    with pytest.raises(tpuport.PortError, match=r"returns .* which is sparse"):
        tpuport.convert(Gives())(X)
    with tpuport.porting():
        product, adjacency = Gives()(X.to("cuda"))
    assert_same(product.cpu(), DENSE @ X, "output")
    assert adjacency.layout is torch.sparse_coo
