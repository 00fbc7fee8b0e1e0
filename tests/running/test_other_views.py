"""Results of one call that are views of one another with other dtypes, or overlap, are written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError

Pair = tuple[torch.Tensor, torch.Tensor]


def joined(y: torch.Tensor) -> torch.Tensor:
    return torch.complex(y, y + 1)


def both(make: Callable[[torch.Tensor], Any], of: Callable[[torch.Tensor], Any]) -> Any:
    def pair(y: torch.Tensor) -> Pair:
        whole = make(y)
        return whole, of(whole)

    return pair


def same(y: torch.Tensor) -> torch.Tensor:
    return y


VIEWS: dict[str, Callable[[torch.Tensor], Pair]] = {
    "real": both(joined, lambda c: c.real),
    "row of imag": both(joined, lambda c: c.imag[1]),
    "view_as_real": both(joined, lambda c: torch.view_as_real(c).transpose(0, 1)),
    "view_as_complex": both(lambda y: y.reshape(2, 2, 2), torch.view_as_complex),
    "ints": both(same, lambda y: y.view(torch.int32)[:, 1:]),
    "halves": both(same, lambda y: y.view(torch.int16)),
}
# None of the two is the whole memory.
PARTS: dict[str, Callable[[torch.Tensor], Pair]] = {
    "rows": lambda y: ((y * 2).view(-1)[:6], (y * 2).view(-1)[2:]),
    "overlapping": lambda y: (lambda z: (z[:6], z[2:]))((y * 2).view(-1)),
    "columns": lambda y: (lambda z: (z[:, 1:], z[:1]))(y * 2),
    "ints of a part": lambda y: (lambda z: (z[1:], z[1:].view(torch.int32)))(y * 2),
}


class Returns(nn.Module):
    """Computes whole numbers, whose bits are the same everywhere."""

    def __init__(self, views: Callable[[torch.Tensor], Pair]) -> None:
        super().__init__()
        self.weight, self.views = nn.Parameter(torch.full((4,), 2.0)), views

    def forward(self, x: torch.Tensor) -> Pair:
        return self.views(x * self.weight)


def written(views: Any, device: str, *, first: bool, graph: bool) -> list[Any]:
    net = Returns(views).to(device)
    x = torch.arange(1.0, 9.0).view(2, 4).to(device)
    with torch.set_grad_enabled(graph):
        one, other = net(x)
        (one if first else other).mul_(3)
    found = [one.detach().cpu().clone(), other.detach().cpu().clone()]
    if graph:
        real = [torch.view_as_real(t) if t.is_complex() else t for t in (one, other)]
        sum((t * t).sum() for t in real if t.requires_grad).backward()  # type: ignore[union-attr]
        found.append(net.weight.grad)
    return found


@pytest.mark.parametrize("graph", [False, True])
def test_a_write_to_one_shows_in_the_other(graph: bool):
    cases = [(name, first) for name in VIEWS for first in (True, False)]
    for name, first in cases:
        expected = written(VIEWS[name], "cpu", first=first, graph=graph)
        with tpuport.porting(verify=False) as block:
            found = written(VIEWS[name], "cuda", first=first, graph=graph)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.cpu(), theirs), (name, first)
        assert [program.model for program in block.report.programs] == ["Returns"]


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_one_memory(name: str):
    for first in (True, False):
        expected = written(PARTS[name], "cpu", first=first, graph=False)
        with tpuport.porting():
            found = written(PARTS[name], "cuda", first=first, graph=False)
        assert all(map(torch.equal, found, expected))


def test_what_cannot_share_refuses_writes():
    with tpuport.porting():
        x = torch.arange(1.0, 9.0).view(2, 4).cuda()
        net = Returns(both(joined, lambda c: c.conj())).cuda()
        whole, conjugate = net(x)
        assert torch.equal(conjugate.detach().resolve_conj().imag, -whole.detach().imag)
        for one in (whole, conjugate):
            with torch.no_grad(), pytest.raises(PortError, match="shares its memory") as raised:
                one.mul_(2)
            assert raised.value.code == "TPU202"
            assert "one.mul_(2)" in str(raised.value)
        first, _ = Returns(PARTS["overlapping"]).cuda()(x)
        with pytest.raises(PortError, match="shares its memory"):
            first.mul_(2)
        (first * 2).sum().backward()


def test_convert_refuses_a_write_that_another_result_would_have_to_see():
    ported = tpuport.convert(Returns(both(joined, lambda c: c.conj())).eval(), verify=False)
    whole, conjugate = ported(torch.ones(2, 4))
    assert torch.equal(tpuport.to_torch(conjugate).imag, -tpuport.to_torch(whole).imag)
    with torch.no_grad(), pytest.raises(PortError, match="shares its memory"):
        conjugate.mul_(2)
    ported = tpuport.convert(Returns(PARTS["overlapping"]).eval(), verify=False)
    for one in ported(torch.ones(2, 4)):
        with torch.no_grad(), pytest.raises(PortError, match="shares its memory"):
            one.mul_(2)
