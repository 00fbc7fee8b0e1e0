"""Reshapes that split sizes which depend on data, or merge them with dims before."""

from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients, normal


def rows(*counts: int) -> torch.Tensor:
    """Return samples of which so many rows each begin with a positive number, among others."""
    made = normal(len(counts), 6, 4, seed=sum(counts))
    made[..., 0] = made[..., 0].abs()
    for sample, count in enumerate(counts):
        made[
            sample, torch.randperm(6, generator=torch.Generator().manual_seed(sample))[count:], 0
        ] *= -1
    return made


class Shuffled(nn.Module):
    """As masked autoencoders do: rows are dropped, transformed, and put among mask tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.token = nn.Linear(4, 4), nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: torch.Tensor) -> Any:
        is_kept = x[..., 0] > 0
        seen = x[is_kept.nonzero(as_tuple=True)].reshape(len(x), -1, 4)
        y = torch.softmax(seen @ seen.transpose(1, 2), -1) @ self.lin(seen)
        whole = self.token.repeat(len(x), x.shape[1], 1)
        whole[is_kept.nonzero(as_tuple=True)] = y.reshape(y.shape[0] * y.shape[1], y.shape[2])
        return whole, y.mean(1)


class Merged(Shuffled):
    """Lengths merge with the batch, and split again."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.lin(x[:, x[0, :, 0] > 0])
        flat = y.reshape(-1, 4)
        back = flat.reshape(2, y.shape[1], 2, 2)
        return flat.cumsum(0).mean(0), (back * 2).sum((0, 1)), y.reshape(-1).sum()


class Written(Shuffled):
    """A write to the reshaped tensor reaches the one that it is a view of."""

    def forward(self, x: torch.Tensor) -> Any:
        y = x[(x[..., 0] > 0).nonzero(as_tuple=True)] * 2
        y.reshape(2, -1, 4)[:, 0] += 1  # it is a view
        turned = y.t().reshape(2, 2, -1)
        turned.mul_(3)
        return y.sum(0), turned.sum(-1)


class Heads(Shuffled):
    """What -1 stands for does not depend on data, so that what follows has static sizes."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.lin(x[:, x[0, :, 0] > 0])
        heads = y.view(*y.shape[:-1], -1, 2)
        again = y.reshape(-1, y.size(1), 1, heads.size(2), 2)
        table = [y.new_zeros(heads.shape[2]) for _ in range(heads.size(2))]  # Python knows it
        torn = y.unflatten(-1, (2, -1)).transpose(1, 2).softmax(-1)
        return heads.sum(1), (again * 2).sum((1, 2)), torch.stack(table), torn.sum(2)


@pytest.mark.parametrize("kind", [Shuffled, Merged, Written, Heads])
def test_a_reshape_of_a_size_that_depends_on_data(kind: type[nn.Module]) -> None:
    calls = tuple((rows(n, n),) for n in (3, 6, 1, 4))
    ported = check_calls(Scenario("reflow", kind, calls), by_tpuport)
    assert not ported.report.retraces
    check_gradients(Scenario("reflow", kind, calls[:1]), by_tpuport)


def test_rows_that_do_not_fit_raise_as_in_eager() -> None:
    ported = tpuport.convert(Shuffled(), verify=False)
    ported(rows(2, 2))
    with pytest.raises(RuntimeError, match="invalid"):
        ported(rows(2, 3))


class Gaps(Shuffled):
    """A part of a longer tensor is reshaped, which is a copy, and written."""

    def forward(self, x: torch.Tensor) -> Any:
        part = (x * 2)[:, : (x[0, :, 0] > 0).sum()]
        part.reshape(-1, 4).add_(1)
        return part.sum(1)


def test_a_write_to_what_may_be_a_view_is_refused() -> None:
    ported = tpuport.convert(Gaps())
    with pytest.raises(tpuport.PortError):
        ported(rows(2, 2))


class Grouped(Shuffled):
    """Columns that are kept are filled up to whole groups, as TabPFN does with features."""

    def forward(self, x: torch.Tensor) -> Any:
        picked = self.lin(x)[:, x[0, :, 0] > 0].transpose(1, 2)
        filled = nn.functional.pad(picked, (0, -picked.shape[-1] % 3))
        rows, columns, count = filled.shape
        groups = filled.reshape(rows, columns * (count // 3), 3)
        return groups.sum(-1), groups.reshape(rows, columns, count // 3, 3).mean(1)


def test_groups_of_a_size_that_depends_on_data() -> None:
    calls = tuple((rows(n, n),) for n in (3, 6, 1, 4))
    ported = check_calls(Scenario("grouped", Grouped, calls), by_tpuport)
    assert not ported.report.retraces


class Viewed(Shuffled):
    """`view`, `flatten` and `ravel` merge a size with dims before it, as `reshape` does."""

    def forward(self, x: torch.Tensor) -> Any:
        picked = self.lin(x[:, x[0, :, 0] > 0])
        pairs = torch.stack((x[..., 0] > 0).nonzero(as_tuple=True))
        order, places = pairs.view(-1).sort(stable=True)
        flat = picked.flatten(0, 1)
        whole = torch.flatten(picked, start_dim=1) * 2
        return order.view(2, -1), places, flat.cumsum(0).mean(0), whole.ravel().sum()


def test_a_view_that_merges_a_size_that_depends_on_data() -> None:
    calls = tuple((rows(n, n),) for n in (3, 6, 1, 4))
    ported = check_calls(Scenario("viewed", Viewed, calls), by_tpuport)
    assert not ported.report.retraces


class Sums(Viewed):
    def forward(self, x: torch.Tensor) -> Any:
        return [part.float().sum() for part in super().forward(x)]


class GroupSums(Grouped):
    def forward(self, x: torch.Tensor) -> Any:
        return [part.square().sum() for part in super().forward(x)]


@pytest.mark.parametrize("kind", [Sums, GroupSums])
def test_the_gradient_of_such_a_view(kind: type[nn.Module]) -> None:
    check_gradients(Scenario("sums", kind, ((rows(3, 3),),)), by_tpuport)


def test_a_view_that_does_not_fit_raises_as_in_eager() -> None:
    ported = tpuport.convert(lambda x: x[x > 0].view(2, -1).sum(1), verify=False)
    ported(torch.tensor([1.0, 2, -1]))
    with pytest.raises(RuntimeError, match="invalid"):
        ported(torch.tensor([1.0, 2, 3]))
