"""A training step raises what eager PyTorch raises for values, without waiting for the device."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpuport
from tpuport.training import make_train_step


class _Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.linear(self.table(tokens)), target)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_failed_step_changes_nothing_and_raises_later(accumulate: int) -> None:
    torch.manual_seed(0)
    ported = tpuport.convert(_Classifier(), verify=False)
    step = make_train_step(ported, accumulate=accumulate)
    right = torch.tensor([0, 4, 2, 1]), torch.tensor([0, 2, -100, 1])
    state, metrics = step(step.init(), *right)
    assert not metrics["skipped"]
    before = _numbers(state.params)
    state, metrics = step(state, right[0] + torch.tensor([0, 0, 0, 4]), right[1])
    assert set(metrics) == {"loss", "grad_norm", "skipped"}
    assert metrics["skipped"]
    np.testing.assert_array_equal(before, _numbers(state.params))
    with pytest.raises(IndexError, match="expected 0 <= index < 5"):
        step(state, *right)
    state, _ = step(state, right[0], right[1] + 1)
    with pytest.raises(IndexError, match="expected 0 <= target < 3"):
        step.load_state(state)
    step.load_state(state)


def _numbers(params: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.asarray(p).ravel() for p in params.values()])


def test_without_checks() -> None:
    ported = tpuport.convert(_Classifier(), verify=False, checks=False)
    step = make_train_step(ported)
    wrong = torch.tensor([9]), torch.tensor([0])
    state, metrics = step(step.init(), *wrong)
    assert not metrics["skipped"]
    step.load_state(state)
