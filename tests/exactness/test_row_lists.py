"""Lists of rows that data selects (`index.tolist()`), and such rows in `zip` and `enumerate`.

Each scenario is called with rows of both signs, none that is positive, and all of them.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tests.exactness.scenario import Scenario, by_tpuport, check_calls, check_gradients, normal
from tpuport.foundation.errors import PortError

MIXED = normal(5, 4)
CALLS = ((MIXED,), (-MIXED.abs(),), (MIXED.abs(),))


class ByLists(nn.Module):
    """The experts of Mixtral's first code and of Jamba: rows are taken by lists of numbers."""

    experts: Any

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        mask = F.one_hot(chosen, 3).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            idx, top = torch.where(mask[number])
            if top.shape[0] == 0:
                continue
            tops, ids = top.tolist(), idx.tolist()
            given = x[None, tops].reshape(-1, x.shape[-1])
            out.index_add_(0, top, expert(given) * weights[tops, ids, None])
        return out


def _lists(x: torch.Tensor) -> Any:
    i, j = torch.where(x > 0)
    rows, columns = i.tolist(), j.tolist()
    y = x * 2
    y[rows, columns] += 1
    z = x.clone()
    z[(x[:, 0] > 0).nonzero().flatten().tolist()] = 0
    first = x[x[:, 0].argsort()[:2].tolist()]
    again = x[torch.as_tensor(rows, dtype=torch.long)].sum(0)
    # More than the paths for each length could be.
    return x[rows, columns].sum(), y, z, first, again


def _asked(x: torch.Tensor) -> Any:
    rows = torch.where(x[:, 0] > 0)[0].tolist()
    mean = x.sum(0) / max(len(rows), 1)
    if 3 in rows:
        mean = mean * 2
    return x[rows].mean(0) if rows else mean


def _together(x: torch.Tensor) -> Any:
    x = x[:3, :2]
    total, out, first = x.sum(), torch.zeros_like(x), torch.zeros_like(x)
    i, j = torch.where(x > 0)
    for a, b in zip(i.tolist(), j.tolist(), strict=False):
        total = total + x[a, b] * x[b, a % 2]
    for k, row in enumerate(x[x[:, 0] > 0]):
        out[k] = row * (k + 1)
    for k, (a, b) in enumerate(zip(i, range(3), strict=False), 1):
        first[b] = first[b] + x[a] * k
    return total, out, first


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario("mixture by lists", ByLists, CALLS),
        *(Scenario(f.__name__, lambda f=f: f, CALLS) for f in (_lists, _asked, _together)),
    ],
    ids=lambda scenario: scenario.name,
)
def test_values_and_gradients(scenario):
    check_calls(scenario, by_tpuport)
    check_gradients(scenario, by_tpuport)


def _strict(x: torch.Tensor) -> Any:
    total = x.sum()
    for a, b in zip(torch.where(x[:, 0] > 0)[0], range(3), strict=True):
        total = total + x[a, b]
    return total


def _of_a_generator(x: torch.Tensor) -> Any:
    total = x.sum()
    for a, b in zip(torch.where(x[:, 0] > 0)[0], (n for n in range(3)), strict=False):
        total = total + x[a, b]
    return total


@pytest.mark.parametrize("function", [_strict, _of_a_generator])
def test_what_is_not_known_is_refused(function):
    with pytest.raises(PortError, match="a loop over rows whose number depends on data") as caught:
        tpuport.convert(function, verify=False)(MIXED)
    assert (caught.value.source_line or "").startswith("for a, b in")


def test_a_tensor_of_an_empty_list_has_no_dtype_of_its_own():
    ported = tpuport.convert(lambda x: torch.tensor(torch.where(x > 0)[0].tolist()).sum())
    assert int(ported(torch.tensor([1.0, -1.0, 1.0]))) == 2
    with pytest.raises(ValueError, match="pass a dtype"):
        ported(-torch.ones(3))
