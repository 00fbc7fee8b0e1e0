"""Class dropout: which labels become null, in which mode, and which labels are refused."""

import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from recipes.mae_dit.stage2.conditioning import ClassConditional, check_labels, drop_labels
from recipes.mae_dit.stage2.diffusion import FlowMatching
from tpuport.foundation.errors import UsageError

CLASSES = 10


class ByLabel(nn.Module):
    """A denoiser that predicts its label."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Embedding(CLASSES + 1, 1)
        self.values.weight.data = torch.arange(CLASSES + 1.0)[:, None]

    def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.values(labels)[:, :, None, None].expand_as(x)


def test_labels_below_the_share_become_null() -> None:
    labels, uniform = torch.tensor([3, 0, 7, 9]), torch.tensor([0.05, 0.1, 0.0999, 0.9])
    assert drop_labels(labels, uniform, 0.1, CLASSES).tolist() == [10, 0, 10, 9]
    assert drop_labels(labels, torch.zeros(4), 0.0, CLASSES).tolist() == labels.tolist()
    many = drop_labels(torch.zeros(20000), torch.rand(20000), 0.1, CLASSES)
    assert (many == CLASSES).float().mean().item() == pytest.approx(0.1, abs=0.01)


def test_training_drops_and_evaluation_does_not() -> None:
    model = ClassConditional(ByLabel(), FlowMatching(), CLASSES, dropout=0.5)
    x, labels = torch.zeros(4, 1, 2, 2), torch.tensor([3, 0, 7, 9])
    given = (x, labels, torch.full((4,), 0.5), torch.zeros_like(x))
    uniform = torch.tensor([0.1, 0.9, 0.49, 0.5])
    for mode, want in ((True, [100, 0, 100, 81]), (False, [9, 0, 49, 81])):
        assert model.train(mode)(*given, uniform).total.tolist() == want
        ported = tpuport.convert(model, verify=False)
        assert tpuport.to_torch(ported(*given, uniform)).total.tolist() == want


def test_dropped_labels_train_the_null_class() -> None:
    model = ClassConditional(ByLabel(), FlowMatching(), CLASSES, dropout=0.5)
    x = torch.zeros(2, 1, 2, 2)
    given = (x, torch.tensor([3, 4]), torch.full((2,), 0.5), x, torch.tensor([0.1, 0.9]))
    model(*given).total.sum().backward()
    grad = model.get_parameter("denoiser.values.weight").grad
    assert grad is not None
    assert grad.nonzero()[:, 0].tolist() == [4, 10]


def test_labels_that_are_no_class_are_refused() -> None:
    check_labels(np.array([0, 9]), CLASSES)
    with pytest.raises(UsageError, match=r"label 10 of sample 1 \(2 of 3 like it\).* 0 to 9"):
        check_labels(np.array([2, 10, -1]), CLASSES)
    with pytest.raises(UsageError, match="class_dropout_prob=1: expected at least 0 and below 1"):
        ClassConditional(ByLabel(), FlowMatching(), CLASSES, dropout=1)
