"""Modules that return functions or objects with them, as packages of normalizing flows do."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import tpuport


class Box:
    """An object that holds a function."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Maker(nn.Module):
    """Return a function of the weights and of the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def shifted(self, x: torch.Tensor, by: Any = 0) -> torch.Tensor:
        return self.line(x) * self.scale + by


class Partial(Maker):
    def forward(self, by: torch.Tensor) -> Any:
        return functools.partial(self.shifted, by=by)


class Closure(Maker):
    def forward(self, by: torch.Tensor) -> Any:
        scale = self.scale.t()
        return lambda x: self.line(x) * scale + by


class Method(Maker):
    def forward(self, by: torch.Tensor) -> Any:
        return Box(self.shifted)


class InObject(Maker):
    def forward(self, by: torch.Tensor) -> Any:
        return {"flow": Box(lambda x: self.shifted(x, by))}["flow"]


class Layer(Maker):
    def forward(self, by: torch.Tensor) -> Any:
        return Box(self.line)


class Network(nn.Module):
    """A network that is no program itself, because numpy reads a value of it."""

    def __init__(self, maker: type[Maker]) -> None:
        super().__init__()
        self.maker = maker()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        y = self.maker(x * 2)(x)
        return y, float(y.detach().cpu().numpy().sum())


MAKERS = [Partial, Closure, Method, InObject, Layer]


def trained(maker: type[Maker], device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net, found = Network(maker).to(device), []
    for x in torch.linspace(-1, 1, 12).reshape(2, 2, 3).to(device):
        net.zero_grad()
        y = net(x)[0]
        y.square().sum().backward()
        found += [y.detach(), *(p.grad for p in net.parameters())]
    return [one.cpu() for one in found]


@pytest.mark.filterwarnings("ignore::tpuport.compat.emulated.programs.PortWarning")
@pytest.mark.parametrize("maker", MAKERS)
def test_a_script_calls_a_function_that_a_module_returns(maker: type[Maker]) -> None:
    want = trained(maker, "cpu")
    with tpuport.porting():
        got = trained(maker, "cuda")
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("maker", MAKERS)
def test_such_a_function_of_a_converted_module_says_why_it_cannot_run(maker: type[Maker]) -> None:
    x = torch.ones(2, 3)
    function = tpuport.convert(maker())(x)
    with pytest.raises(tpuport.PortError, match=r"TPU402.*a function that the call returned"):
        function(x)


class Iterators(nn.Module):
    """Return what gives its items once."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.names = ["a", "b"]

    def zipped(self, x: torch.Tensor) -> Any:
        return self.line(x), zip(self.names, (1, 2), strict=True)

    def mapped(self, x: torch.Tensor) -> Any:
        return {"y": self.line(x), "names": map(str.upper, self.names)}

    def walked(self, x: torch.Tensor) -> Any:
        return self.line(x), iter(self.names)

    def stream(self, x: torch.Tensor, n: int = 3) -> Any:
        for _ in range(n):
            x = torch.cat([x, self.line(x[-1:])])
            yield x[-1]

    def passed_on(self, x: torch.Tensor) -> Any:
        return self.stream(x)

    def used(self, x: torch.Tensor) -> Any:
        return torch.stack(list(self.stream(x))), list(zip(self.names, (1, 2), strict=True))


@pytest.mark.parametrize("method", ["zipped", "mapped", "walked", "stream", "passed_on"])
def test_an_iterator_that_the_first_call_would_use_up_is_refused(method: str) -> None:
    ported = tpuport.convert(Iterators(), methods=(method,))
    with pytest.raises(tpuport.PortError, match=r"TPU402 the call returns an iterator"):
        getattr(ported, method)(torch.ones(2, 3))


def test_an_iterator_inside_of_a_call_is_none_of_its_results() -> None:
    net = Iterators()
    ported = tpuport.convert(net, methods=("used",))
    for x in torch.randn(2, 2, 3):
        ours, names = ported.used(x)
        torch.testing.assert_close(tpuport.to_torch(ours), net.used(x)[0])
        assert names == [("a", 1), ("b", 2)]


def test_a_method_that_streams_runs_in_the_script() -> None:
    torch.manual_seed(0)
    eager, x = Iterators(), torch.randn(2, 3)
    with torch.no_grad():
        expected = [y for n in (2, 4) for y in eager.stream(x, n)]
    with tpuport.porting() as scope, torch.no_grad():
        net = Iterators().cuda()
        net.load_state_dict(eager.state_dict())
        given = [y for n in (2, 4) for y in net.stream(x.cuda(), n)]
    for ours, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    assert not scope.report.descended
