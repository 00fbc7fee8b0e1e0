"""Layers that call what torchax has no lowering for are found where they are made."""

import pytest
import torch
from torch import nn

from tpuport.rules._apply import find
from tpuport.rules.unlowered_call import LAYERS, UnloweredCall
from tpuport.testing import equivalence

MODEL = """
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(4, 2)])
        self.bags = [nn.EmbeddingBag(4, 2, mode="sum") for _ in range(3)]


criterion = nn.CTCLoss(zero_infinity=True)
"""


def test_the_line_that_makes_one_is_found():
    found = find(MODEL, rules=[UnloweredCall])
    assert [MODEL.splitlines()[one.line - 1].strip() for one in found] == [
        'self.bags = [nn.EmbeddingBag(4, 2, mode="sum") for _ in range(3)]',
        "criterion = nn.CTCLoss(zero_infinity=True)",
    ]


def _called(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "EmbeddingBag":
        return nn.functional.embedding_bag(x.flatten().long() % 3, x, (x[0] * 0).long())
    if name == "CTCLoss":
        sizes = torch.tensor([2]), torch.tensor([1])
        return nn.CTCLoss()(x[:, None].log_softmax(2), torch.tensor([[1]]), *sizes)
    return nn.RReLU()(x)


@pytest.mark.parametrize(
    ("layer", "error"),
    [
        ("torch.nn.CTCLoss", "OperatorNotFound"),
        ("torch.nn.EmbeddingBag", "TracerArrayConversionError"),
        ("torch.nn.RReLU", "OperatorNotFound"),
    ],
)
def test_plain_torchax_still_fails_there(layer: str, error: str):
    assert layer in LAYERS
    x = torch.arange(9.0).reshape(3, 3)
    with pytest.raises(Exception, match=r".") as raised:
        equivalence.plain_jit(lambda x: _called(layer.rpartition(".")[2], x), (x,))
    assert type(raised.value).__name__ == error
