"""Modules whose hooks and functions find them under a global name of the script."""

import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport.model.parity.global_names import of_copy

HELD: dict[str, Any] = {}
KEPT = types.SimpleNamespace(net=None)
ROW: list[Any] = [None]
NET: Any = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.add_(x.mean(0))
        return self.layer(x) - self.mean


def put_in_place(net: Net) -> None:
    net.forward = lambda x: Net.forward(NET, x) * 2


def hooked(net: Net) -> None:
    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        NET.mean.add_(1)
        return out + args[0] @ NET.layer.weight

    net.layer.register_forward_hook(hook)


def in_a_dict(net: Net) -> None:
    net.layer.register_forward_hook(lambda module, args, out: HELD["net"].mean.add_(1) + out)


def in_a_list(net: Net) -> None:
    net.layer.register_forward_hook(lambda module, args, out: ROW[0].mean.add_(1) + out)


def in_an_object(net: Net) -> None:
    net.layer.register_forward_hook(lambda module, args, out: KEPT.net.mean.add_(1) + out)


class Sealed:
    """An object of a script that answers no question about its attributes."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


GONE = weakref.proxy(Sealed())
SEALED = Sealed()


def trained(device: str, edit: Callable[[Net], None]) -> list[torch.Tensor]:
    global NET
    torch.manual_seed(0)
    NET = HELD["net"] = KEPT.net = ROW[0] = Net().to(device)
    edit(NET)
    seen = []
    for number in range(3):
        NET.zero_grad()
        out = NET(torch.full((2, 3), number + 1.0, device=device))
        out.square().sum().backward()
        seen += [out.detach().cpu(), NET.layer.weight.grad.cpu(), NET.mean.cpu().clone()]
    return seen


@pytest.mark.parametrize("edit", [put_in_place, hooked, in_a_dict, in_a_list, in_an_object])
def test_a_copy_that_is_compared_leaves_the_module_of_a_global_name_alone(edit: Any) -> None:
    want = trained("cpu", edit)
    with tpuport.porting():
        have = trained("cuda", edit)
    net = NET
    for one, other in zip(want, have, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    assert net is HELD["net"] is KEPT.net is ROW[0]


def test_a_comparison_beside_the_script_leaves_its_names_alone() -> None:
    global NET
    NET = Net()
    hooked(NET)
    other, seen = Net(), []

    def compare() -> None:
        with of_copy(NET, other):
            seen.append(NET)

    thread = threading.Thread(target=compare)
    thread.start()
    thread.join()
    assert seen == [NET]
    hooked(other)
    with of_copy(NET, other):
        seen.append(NET)
    assert seen == [NET, other]
