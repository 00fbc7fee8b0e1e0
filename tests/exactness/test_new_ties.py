"""Calls that make two names of the state one tensor: equal to eager on later calls, or refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tpuport
from tpuport.compat.emulated.programs import PortWarning
from tpuport.foundation.errors import PortError


class Pair(nn.Module):
    """Two layers and two plain attributes; `change` is what the forward pass does to them."""

    def __init__(self, change: Any, first: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
        self.w = nn.Parameter(torch.ones(3))
        self.p, self.q = first, copy.copy(first)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head(self.embed(x))
        if self.p is not None:
            y = y + self.p + 2 * self.q
        self.change(self, y.detach().mean(0))
        return y


def _weights(m: Any, y: torch.Tensor) -> None:
    m.head.weight = m.embed.weight


def _bias(m: Any, y: torch.Tensor) -> None:
    m.head.bias = m.w


def _both(m: Any, y: torch.Tensor) -> None:
    m.p = m.q = y


@pytest.mark.parametrize("change", [_weights, _bias, _both])
def test_new_ties_are_refused(change: Any) -> None:
    with pytest.raises(PortError, match="one tensor"):
        tpuport.convert(Pair(change, torch.zeros(3)))(torch.ones(2, 3))


def _first_name(m: Any, y: torch.Tensor) -> None:
    m.extra = m.embed.weight  # comes before `embed.weight` among the names


def _last_name(m: Any, y: torch.Tensor) -> None:
    m.head.extra = m.embed.weight


def _buffer_name(m: Any, y: torch.Tensor) -> None:
    m.register_buffer("extra", m.scale)


@pytest.mark.parametrize("change", [_first_name, _last_name, _buffer_name])
def test_new_names_of_parameters_are_refused(change: Any) -> None:
    model = Pair(change, None)
    model.embed.register_buffer("scale", torch.ones(3))
    model.register_buffer("scale", model.embed.get_buffer("scale"))
    with pytest.raises(PortError, match=r"registers the parameter or buffer .* as '.*extra' too"):
        tpuport.convert(model)(torch.ones(2, 3))


def _in_a_tuple(m: Any, y: torch.Tensor) -> None:
    m.extra = (m.embed.weight,)


def _in_a_list_beside_a_table(m: Any, y: torch.Tensor) -> None:
    m.extra = [m.table["w"], m.embed.weight]


@pytest.mark.parametrize("change", [_in_a_tuple, _in_a_list_beside_a_table])
def test_a_tuple_or_list_may_keep_a_parameter(change: Any) -> None:
    eager: Any = Pair(change, None)
    eager.table = {"w": eager.w}
    ported = tpuport.convert(copy.deepcopy(eager))
    for seed in range(3):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(tpuport.to_torch(ported(x)), eager(x))


class TiedInForward(nn.Module):
    """Layers that are given one weight before they are called, and one that takes a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.back = nn.Linear(3, 3), nn.Linear(3, 3), Returning()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.head.weight = self.back.weight = self.embed.weight
        hidden = self.embed(x).tanh()
        same, scaled = self.back(hidden)
        return self.head(same) + scaled


class Returning(nn.Module):
    """A module that returns its argument beside a result, and has a weight that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.ones(3, 3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x * self.scale


@pytest.mark.parametrize("verify", ["first", "always"])
def test_parts_that_are_tied_in_forward_are_compared_with_their_own_gradients(verify: str) -> None:
    eager = TiedInForward()
    with tpuport.porting(verify=verify):
        ported = copy.deepcopy(eager).to("cuda")
        with pytest.warns(PortWarning, match="TiedInForward is not one program"):
            _compare(eager, ported)
        _compare(eager, ported)
        _compare(eager, ported)


@pytest.mark.parametrize("change", [_first_name, _weights])
def test_under_porting_the_parts_of_a_refused_module_are_programs(change: Any) -> None:
    eager = Pair(change, None)
    with tpuport.porting():
        ported = copy.deepcopy(eager).to("cuda")
        with pytest.warns(PortWarning, match="Pair is not one program"):
            _compare(eager, ported)
        _compare(eager, ported)
        _compare(eager, ported)
    assert [n for n, _ in ported.named_parameters()] == [n for n, _ in eager.named_parameters()]


def _compare(eager: nn.Module, ported: nn.Module) -> None:
    want, got = eager(torch.ones(2, 3)), ported(torch.ones(2, 3, device="cuda"))
    torch.testing.assert_close(got.cpu(), want)
    got.sum().backward()
    want.sum().backward()
    for mine, theirs in zip(ported.parameters(), eager.parameters(), strict=True):
        grads = [None if p.grad is None else p.grad.cpu() for p in (mine, theirs)]
        torch.testing.assert_close(*grads)


def test_attributes_that_are_made_as_one_tensor_stay_one() -> None:
    eager = Pair(_both, None)
    ported = tpuport.convert(copy.deepcopy(eager))
    for seed in range(3):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(tpuport.to_torch(ported(x)), eager(x))
