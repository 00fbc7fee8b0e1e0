"""`type(x)` and `x.__class__` of traced tensors and numbers are what eager PyTorch has."""

import builtins
import copy
import numbers
from typing import Any

import torch
from torch import nn

import tpuport


class Kinds(nn.Module):
    """Asks for types in all the ways that a Python program can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("buffer", torch.ones(3))

    def forward(self, x: torch.Tensor, n: int) -> Any:
        number, made = x.sum().item(), x * self.weight
        asked = [type(v) is torch.Tensor for v in (x, made, self.weight, self.buffer, number, n)]
        asked += [type(v) == torch.Tensor for v in (x, self.weight, x[0], x.detach())]  # noqa: E721
        asked += [v.__class__ is torch.Tensor for v in (x, made, self.weight, n)]
        asked += [type(self.weight) is nn.Parameter, self.weight.__class__ is nn.Parameter]
        asked += [
            type(number) is float,
            type(int(number)) is int,
            type(x) is type(copy.deepcopy(x)),
        ]
        asked += [isinstance(made, nn.Parameter), isinstance(x, torch.Tensor), {type(x): 1} == {}]
        whole = int(number)
        asked += [isinstance(number, float), isinstance(number, int), isinstance(whole, int)]
        asked += [isinstance(whole, (str, float)), isinstance(whole, int | float)]
        asked += [isinstance(x[x > 1].shape[0], int), isinstance(x.max() > 0, bool)]
        asked += [isinstance(bool(x.max() > 0), bool), isinstance(whole, numbers.Integral)]
        # What `type` is otherwise.
        asked += [isinstance(Kinds, type), type(Kinds) is type, type(type) is type]
        asked += [issubclass(type, type), type("Made", (Kinds,), {}).__name__ == "Made"]
        asked += [list(map(type, [x, 1])) == [torch.Tensor, int], type(x).__name__ == "Tensor"]
        return made, asked


def test_types_are_those_of_eager():
    x = torch.tensor([1.0, 2.0, 3.0])
    _, want = Kinds()(x, 3)
    ported = tpuport.convert(Kinds())
    for scale in (1, 2):
        made, have = ported(x * scale, 3)
        assert have == want
        assert type(made) is not torch.nn.Parameter
    assert type is builtins.type
    assert isinstance is builtins.isinstance
    assert not {"type", "isinstance"} & globals().keys()
