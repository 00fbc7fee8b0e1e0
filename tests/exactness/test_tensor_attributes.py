"""Attributes that code sets on tensors of a module, as mup sets `weight.infshape`."""

from typing import Any

import pytest
import torch
from torch import nn

import tpuport


class Scaled(nn.Module):
    """Reads attributes of a parameter and of a frozen one, one of them by a default."""

    weight: Any
    frozen: Any

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.weight.scale = 2.0
        self.weight._kind = {"power": 2}
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.frozen.shift = torch.full((3,), 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight * self.weight.scale + self.frozen * self.frozen.shift.to(x.device)
        return y ** getattr(self.weight, "_kind", {"power": 1})["power"]


class Layers(nn.Module):
    """Layers that differ only in what is set on their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        for at, layer in enumerate(self.layers):
            layer.weight.scale = 1.0 + at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * layer.weight.scale
        return x


class Counting(nn.Module):
    """Counts its calls in an attribute of its weight."""

    weight: Any

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.weight.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.calls += 1
        return x * self.weight * self.weight.calls


@pytest.mark.parametrize("kind", [Scaled, Layers])
def test_a_program_and_the_eager_copies_have_them(kind: type[nn.Module]) -> None:
    model = kind()
    ported = tpuport.convert(model)
    x = torch.randn(2, 3)
    torch.testing.assert_close(tpuport.to_torch(ported(x)), model(x).detach())
    torch.testing.assert_close(ported.to_torch()(x), model(x))


def _step(model: Scaled, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    y = model(x)
    y.sum().backward()
    return [y.detach().cpu(), model.weight.grad.cpu().clone()]


def _change(model: Scaled, number: int) -> None:
    if number == 1:
        model.weight.scale = 5.0
    elif number == 2:
        model.weight._kind["power"] = 3
    elif number == 3:
        model.frozen.shift = torch.full((3,), 4.0)
    elif number == 4:
        del model.weight._kind


def test_a_script_trains_with_them_and_changes_them() -> None:
    eager, model = Scaled(), Scaled()
    model.load_state_dict(eager.state_dict())
    x = torch.randn(2, 3)
    with tpuport.porting():
        model = model.cuda()
        for number in range(5):
            _change(eager, number)
            _change(model, number)
            for ours, theirs in zip(_step(model, x.cuda()), _step(eager, x), strict=True):
                torch.testing.assert_close(ours, theirs)


def test_one_that_the_call_sets_is_refused() -> None:
    model = Counting()
    with pytest.raises(tpuport.PortError, match=r"TPU402 the call sets weight\.calls"):
        tpuport.convert(model)(torch.ones(3))
    assert model.weight.calls == 0


class Marks(nn.Module):
    """Sets an attribute on its result, or on its argument."""

    def __init__(self, *, result: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.result = result

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        (y if self.result else x).scale = 3.0
        return y


class Marked(nn.Module):
    """Reads an attribute of its argument, with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.linear(x) * getattr(x, "scale", 1.0)


class Passed(nn.Module):
    """Hands a tensor with an attribute from one module to another, inside."""

    def __init__(self) -> None:
        super().__init__()
        self.marks, self.marked = Marks(result=True), Marked()

    def forward(self, x: Any) -> Any:
        return self.marked(self.marks(x)) * 2


def test_those_of_tensors_inside_are_kept() -> None:
    model, x = Passed(), torch.randn(2, 3)
    torch.testing.assert_close(tpuport.to_torch(tpuport.convert(model)(x)), model(x).detach())


def test_those_of_arguments_and_results_are_refused() -> None:
    x: Any = torch.randn(2, 3)
    for model in (Marks(result=True), Marks(result=False)):
        with pytest.raises(tpuport.PortError, match="TPU402 the call sets the attribute 'scale'"):
            tpuport.convert(model)(torch.randn(2, 3))
    ported = tpuport.convert(Marked())
    ported(x)  # It has none yet.
    x.scale, x.other = 4.0, 5.0
    with pytest.raises(tpuport.PortError, match="TPU402 the attribute 'scale' is set on a tensor"):
        ported(x)


@pytest.mark.filterwarnings("ignore:Mark")
def test_a_script_hands_them_from_module_to_module() -> None:
    marks, marked, x = Marks(result=True), Marked(), torch.randn(2, 3)
    expected = marked(marks(x))
    with tpuport.porting():
        y = marks.cuda()(x.cuda())
        assert y.scale == 3.0
        torch.testing.assert_close(marked.cuda()(y).cpu(), expected)
        y.scale = 5.0
        torch.testing.assert_close(marked(y).cpu(), expected / 3 * 5, rtol=1e-5, atol=1e-6)


def test_those_that_torch_sets_are_no_reason_to_refuse() -> None:
    ported = tpuport.convert(Marked())
    x = torch.nn.Buffer(torch.randn(2, 3))
    torch._dynamo.mark_dynamic(x, 0)
    assert vars(x)
    ported(x)
