"""Later calls of a model whose layers a script has put in further places, or in another order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpuport


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.named = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Tanh()})
        self.extra: nn.Module | None = None
        self.scales = nn.Module()
        self.scales.register_buffer("one", torch.ones(3))
        self.scales.register_buffer("two", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        for name in self.named:
            x = self.named[name](x)
        for scale in self.scales.buffers():
            x = (x + scale) * scale
        return x if self.extra is None else self.extra(x)


EDITS: dict[str, Callable[[Any], Any]] = {
    "appended": lambda net: net.blocks.append(net.blocks[0]),
    "inserted": lambda net: net.blocks.insert(0, net.blocks[1]),
    "entry": lambda net: net.named.update({"c": net.blocks[0]}),
    "attribute": lambda net: setattr(net, "extra", net.blocks[1]),
    "order": lambda net: net.named.update({"a": net.named.pop("a")}),
    "buffers": lambda net: net.scales._buffers.update({"one": net.scales._buffers.pop("one")}),
    "exchanged": lambda net: net.blocks.__setitem__(0, net.blocks[1]),
}


def eager(device: str, edit: str) -> list[torch.Tensor]:
    """Return the results of two calls with an edit between them, and their gradients."""
    torch.manual_seed(0)
    net, seen = Stack().to(device), []
    for change in (None, EDITS[edit]):
        if change is not None:
            change(net)
        net.zero_grad()
        out = net(torch.linspace(-1, 1, 6, device=device).reshape(2, 3))
        out.square().sum().backward()
        seen += [out.detach(), *(p.grad.detach().clone() for p in net.parameters())]
    return [one.cpu() for one in seen]


@pytest.mark.parametrize("edit", EDITS)
def test_a_layer_in_one_more_place_counts_at_the_next_call(edit: str) -> None:
    want = eager("cpu", edit)
    with tpuport.porting():
        have = eager("cuda", edit)
    for one, other in zip(want, have, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("edit", EDITS)
def test_a_converted_model_follows_the_places_of_its_layers(edit: str) -> None:
    torch.manual_seed(0)
    net, x = Stack(), torch.linspace(-1, 1, 6).reshape(2, 3)
    ported = tpuport.convert(net)
    ported(x)
    EDITS[edit](ported.module)
    EDITS[edit](net)
    torch.testing.assert_close(tpuport.to_torch(ported(x)), net(x).detach(), rtol=1e-5, atol=1e-6)
