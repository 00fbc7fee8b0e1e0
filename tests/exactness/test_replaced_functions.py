"""Later calls after a script has replaced functions and methods of torch or a library."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation

import tpuport


@pytest.mark.parametrize("cls", [nn.Linear, NewGELUActivation])
@pytest.mark.parametrize("how", ["convert", "porting"])
def test_another_forward_of_a_class_counts_at_the_next_call(
    how: str, cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls(how: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), NewGELUActivation(), nn.Linear(3, 3))
        net = net.to("cuda") if how == "porting" else net
        called = tpuport.convert(net) if how == "convert" else net
        x = torch.linspace(-1, 1, 6).reshape(2, 3).to(next(net.parameters()).device)
        seen = [called(x)]
        with monkeypatch.context() as patch:
            old = cls.forward
            patch.setattr(cls, "forward", lambda self, x: old(self, x) * 3)
            seen.append(called(x))
        seen.append(called(x))
        return [tpuport.to_torch(one).detach().cpu() for one in seen]

    want = calls("eager")
    if how == "porting":
        with tpuport.porting():
            have = calls(how)
    else:
        have = calls(how)
    for one, other in zip(want, have, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)


OWNERS: dict[str, Any] = {"linear": F, "tanh": torch, "scaled_dot_product_attention": F}


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("how", ["convert", "porting"])
def test_another_function_of_torch_counts_at_the_next_call(
    how: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(F.linear(self.layer(x), self.layer.weight))
            return F.scaled_dot_product_attention(x, x, x)

    def calls(how: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net().to("cuda") if how == "porting" else Net()
        called = tpuport.convert(net) if how == "convert" else net
        x = torch.linspace(-1, 1, 6).reshape(1, 2, 3).to(next(net.parameters()).device)
        seen = [called(x)]
        with monkeypatch.context() as patch:
            old = getattr(OWNERS[name], name)
            patch.setattr(OWNERS[name], name, lambda *given: old(*given) * 3)
            seen.append(called(x))
        seen.append(called(x))
        return [tpuport.to_torch(one).detach().cpu() for one in seen]

    want = calls("eager")
    if how == "porting":
        with tpuport.porting():
            have = calls(how)
    else:
        have = calls(how)
    for one, other in zip(want, have, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
