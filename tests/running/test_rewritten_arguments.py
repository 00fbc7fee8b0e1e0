"""Writes between a ported call and its backward pass, most of them past torch's version counter."""

from collections.abc import Callable

import pytest
import torch

import tpuport
from tpuport.foundation.errors import PortError


class Saves(torch.nn.Module):
    """Eager PyTorch keeps the input for the gradient of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class KeepsNothing(Saves):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear.bias


def by_data(x: torch.Tensor) -> None:
    x.data.masked_fill_(x.data < 0, 0.0)


def step(module: torch.nn.Module, change: Callable[[torch.Tensor], None], device: str) -> None:
    torch.manual_seed(1)
    x = torch.randn(3, 4).to(device)
    y = module(x)
    change(x)
    (y * x).sum().backward()


def gradient(
    kind: type[Saves], change: Callable[[torch.Tensor], None], device: str, rows: tuple[int, ...]
) -> torch.Tensor:
    """Return the gradient of the bias after calls with these numbers of rows, and a step."""
    torch.manual_seed(0)
    module = kind().to(device)
    for count in rows:
        module(torch.ones(count, 4).to(device)).sum().backward()
    step(module, change, device)
    bias = module.linear.bias.grad
    assert bias is not None
    return bias.cpu()


def test_a_write_to_what_eager_keeps_is_refused_in_each_step():
    with tpuport.porting():
        module = Saves().cuda()
        for _ in range(2):
            with pytest.raises(PortError, match="was written to") as raised:
                step(module, by_data, "cuda")
            assert "TPU406 args[0] of a call of Saves was written to, by .data" in str(raised.value)
            assert "tpuport run --eager Saves" in str(raised.value)
        step(module, lambda x: None, "cuda")
    assert module.linear.weight.grad is not None


def steps_that_write_a_weight(
    module: Saves, device: str, write: Callable[[torch.Tensor], None], after: bool
) -> None:
    for number in range(3):
        y = module(torch.full((3, 4), 0.5 + number).to(device))
        if number and not after:
            write(module.linear.weight)
        y.sum().backward()
        if after:
            write(module.linear.weight)


class Inner(Saves):
    """Eager PyTorch keeps the second weight for the gradient of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.first(x))


def halve(x: torch.Tensor) -> None:
    x.data.mul_(0.5)


def test_a_write_to_a_weight_that_eager_keeps_is_refused():
    with tpuport.porting():
        with pytest.raises(PortError, match=r"parameter 'linear\.weight' of a call of Inner was"):
            steps_that_write_a_weight(Inner().cuda(), "cuda", halve, after=False)


@pytest.mark.parametrize(("kind", "after"), [(Saves, False), (Inner, True)])
def test_other_writes_to_a_weight_leave_eagers_gradient(kind, after):
    """To a weight that eager does not keep, and after the backward pass."""
    modules = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        with tpuport.porting():
            modules.append(module := kind().to(device))
            steps_that_write_a_weight(module, device, halve, after)
    want, found = (module.linear.weight.grad for module in modules)
    assert torch.allclose(found.cpu(), want, rtol=1e-5, atol=1e-6)


def test_a_write_to_a_complex_argument_is_refused():
    class Complex(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).abs().sum()

    with tpuport.porting():
        module, x = Complex().cuda(), torch.complex(torch.rand(3, 4), torch.rand(3, 4)).cuda()
        y = module(x)
        halve(x)
        with pytest.raises(PortError, match=r"args\[0\] of a call of Complex was written to"):
            y.backward()


class Activations(Saves):
    """Eager PyTorch keeps results, a mask and a buffer among them, another buffer, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask, self.left = (x > 0).float(), torch.exp(self.linear(x))
        y = torch.tanh(self.left * mask)
        self.scale.mul_(0.9)
        return self.linear(y * self.table) * self.scale, y[2], mask, self.scale


RESULTS: list[tuple[str, Callable[[Activations, tuple[torch.Tensor, ...]], object]]] = [
    ("result 1", lambda module, out: halve(out[1])),
    ("result 1", lambda module, out: out[1].detach().mul_(0.5)),
    ("result 2", lambda module, out: halve(out[2])),
    ("result 3", lambda module, out: halve(out[3])),
    ("the buffer 'table'", lambda module, out: halve(module.table)),
    ("the attribute 'left'", lambda module, out: halve(module.left)),
]


def test_a_write_to_a_result_or_buffer_that_eager_keeps_is_refused():
    """And to others it leaves eager's gradient; a refusal changes nothing for the next step."""
    want = None
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        with tpuport.porting():
            module = Activations().to(device)
            x = torch.linspace(-1, 1, 12).reshape(3, 4).to(device)
            for what, write in RESULTS if device == "cuda" else ():
                out = module(x)
                write(module, out)
                with pytest.raises(PortError, match=f"{what} of a call of Activations was written"):
                    out[0].sum().backward()
            module.scale.fill_(1)
            module.table.fill_(2)
            out = module(x)
            halve(out[0])
            out[0].square().sum().backward()
        found = module.linear.weight.grad
        assert found is not None
        want = found if want is None else want
        assert torch.allclose(found.cpu(), want, rtol=1e-5, atol=1e-6)


def and_back(x: torch.Tensor) -> None:
    before = x.clone()
    by_data(x)
    x.data.copy_(before)


@pytest.mark.parametrize(
    ("kind", "change", "rows"),
    [(KeepsNothing, by_data, ()), (Saves, and_back, (2, 3, 4)), (Saves, and_back, (2, 5, 4))],
)
def test_other_writes_leave_eagers_gradient(kind, change, rows):
    """To what eager does not keep, and back to the values; also with lengths that vary."""
    want = gradient(kind, change, "cpu", rows)
    with tpuport.porting():
        found = gradient(kind, change, "cuda", rows)
    # Sums of up to eight rows, in the order of XLA.
    assert torch.allclose(found, want, rtol=1e-6, atol=1e-6)


def test_the_remedy_gives_eagers_gradient():
    modules = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        with tpuport.porting(eager=["Saves", "Linear"]):
            module = Saves().to(device)
            step(module, by_data, device)
        modules.append(module)
    want, found = (module.linear.weight.grad for module in modules)
    assert torch.equal(found.cpu(), want)
