"""Later calls after a script has replaced functions and methods of torch or a library."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import NewGELUActivation

import tpuport


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.norm = nn.Linear(3, 3), NewGELUActivation(), nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(torch.tanh(F.linear(self.layer(x), self.layer.weight))))
        return F.scaled_dot_product_attention(x, x, x)


def seen(how: str, owner: Any, name: str) -> list[torch.Tensor]:
    """Return the results of three calls, in the second of which a function gives three times more.

    Args:
        how: "eager", "convert" or "porting".
        owner: a module or class.
        name: the name of the function in it.
    """
    torch.manual_seed(0)
    net = Net().eval().to("cuda" if how == "porting" else "cpu")
    called = tpuport.convert(net) if how == "convert" else net
    x = torch.linspace(-1, 1, 6).reshape(1, 2, 3).to(next(net.parameters()).device)
    found = [called(x)]
    with pytest.MonkeyPatch.context() as patch:
        old = getattr(owner, name)
        patch.setattr(owner, name, lambda *given: old(*given) * 3)
        found.append(called(x))
    found.append(called(x))
    return [tpuport.to_torch(one).detach().cpu() for one in found]


REPLACED: list[tuple[Any, str]] = [
    (nn.Linear, "forward"),
    (NewGELUActivation, "forward"),
    (nn.BatchNorm1d, "forward"),  # which it inherits
    (F, "linear"),
    (F, "scaled_dot_product_attention"),
    (torch, "tanh"),
]


@pytest.mark.parametrize(("owner", "name"), REPLACED)
@pytest.mark.parametrize("how", ["convert", "porting"])
def test_a_function_that_a_script_replaces_counts_at_the_next_call(
    how: str, owner: Any, name: str
) -> None:
    want = seen("eager", owner, name)
    assert not torch.allclose(want[0], want[1])
    if how == "porting":
        with tpuport.porting():
            have = seen(how, owner, name)
    else:
        have = seen(how, owner, name)
    for one, other in zip(want, have, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
