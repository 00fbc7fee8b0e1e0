"""In-place writes to tensors that have a graph: state and arguments that others computed."""

import warnings

import pytest
import torch
from torch import nn

import tpuport
from tpuport.compat.emulated.programs import PortWarning
from tpuport.foundation.errors import PortError


class Keeps(nn.Module):
    """Keeps what it computed with its graph, which the next call writes to."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0).reshape(3, 3) / 9)
        self.hidden, self.items = None, []

    def forward(self, x):
        if self.hidden is None:
            self.hidden = x @ self.weight
        return self.step(x)


class Adds(Keeps):
    def step(self, x):
        self.hidden.mul_(0.5).add_(x @ self.weight)
        return self.hidden * 2


class BindsAfterwards(Keeps):
    def step(self, x):
        self.hidden += x
        out = self.hidden * 2
        self.hidden = x @ self.weight
        return out


class WritesToARow(Keeps):
    def step(self, x):
        self.hidden[0].mul_(0.5).add_((x @ self.weight)[1])
        return self.hidden * 3


class WritesUnderNoGrad(Keeps):
    def step(self, x):
        with torch.no_grad():
            self.hidden.mul_(0.5)
        return self.hidden * 2


class WritesToData(Keeps):
    def step(self, x):
        self.hidden.data.mul_(0.5)
        return self.hidden * 3


class Returns(Keeps):
    def step(self, x):
        return self.hidden.mul_(0.5).add_(x @ self.weight)


class ReturnsARow(Keeps):
    def step(self, x):
        self.hidden.mul_(0.5).add_(x @ self.weight)
        return self.hidden[0]


class Balances(nn.Module):
    """Adds a value with a gradient to a buffer and an attribute that had none."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0).reshape(3, 3) / 9)
        self.register_buffer("loads", torch.zeros(3))
        self.hidden = torch.zeros(2, 3)

    def forward(self, x):
        found = x @ self.weight
        self.loads.mul_(0.5).add_(found.sum(0))
        self.hidden.mul_(0.5).add_(found)
        return self.hidden * 2 + self.loads


class InAList(Keeps):
    def step(self, x):
        if self.items:
            self.items[0].mul_(x).add_(x @ self.weight)
        else:
            self.items.append(self.hidden * 2)
        return self.items[0] * 2


def gradient_of(net, value):
    net.weight.grad = None
    try:
        value.sum().backward(retain_graph=True)
    except RuntimeError as error:
        return str(error)[:60]
    return net.weight.grad.tolist()


def seen(make, device):
    """What a script sees of four calls, and what gradients it gets through them."""
    torch.manual_seed(0)
    net, found, results = make().to(device), [], []
    net.hidden = None if net.hidden is None else net.hidden.to(device)
    for value in (1.0, 2.0, 3.0, 4.0):
        out = net(torch.full((2, 3), value, device=device))
        results.append(out)
        found += [out.detach().tolist(), net.hidden.tolist()]
        found.append([net.hidden.requires_grad, net.hidden.is_leaf, out is net.hidden])
    found += [gradient_of(net, out * out) for out in (results[-1], results[1], net.hidden)]
    with torch.no_grad():
        results[-1].zero_()
    return [*found, net.hidden.tolist()]


@pytest.mark.parametrize("make", [*Keeps.__subclasses__(), Balances])
def test_state_with_a_graph_is_written_in_place_as_in_eager(make):
    expected = seen(make, "cpu")
    with tpuport.porting():
        ours = seen(make, "cuda")
    assert len(ours) == len(expected) == 16
    for one, other in zip(ours, expected, strict=True):
        if isinstance(other, list):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
        else:
            assert one == other


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 3))


class Doubles(Weighted):
    def forward(self, x):
        x.mul_(2)
        return x * self.weight


class GivesBack(Weighted):
    def forward(self, x):
        return x.mul_(self.weight)


class WritesARow(Weighted):
    def forward(self, x):
        x[0] = x[1] * self.weight
        return x * 2


class GivesBoth(Weighted):
    def forward(self, x):
        x += self.weight
        return x, x * 2


class GivesNothing(Weighted):
    def forward(self, x):
        x.mul_(self.weight)


class DoublesUnderNoGrad(Weighted):
    def forward(self, x):
        with torch.no_grad():
            x.mul_(2)
        return x * self.weight


def given(kind, body, data):
    """What a module is given, and the tensor whose memory that is."""
    hidden = body(data)
    if kind == "slice":
        whole = torch.cat([hidden, hidden * 2])
        return whole[1:3], whole
    if kind == "saved":  # by what computed it, for its own backward pass
        hidden = torch.sigmoid(hidden)
    elif kind == "data":
        hidden = data * 2
    elif kind == "leaf":
        hidden = (data * 1).requires_grad_()
    return hidden, hidden


def of_a_step(make, kind, device):
    torch.manual_seed(0)
    body, net, found = nn.Linear(3, 3).to(device), make().to(device), []
    for step in range(3):
        body.zero_grad(), net.zero_grad()
        x, whole = given(kind, body, torch.arange(6.0, device=device).reshape(2, 3) / 6 + step)
        try:
            out = net(x)
            results = [] if out is None else out if isinstance(out, tuple) else [out]
            found.append((x.requires_grad, x.is_leaf, [result is x for result in results]))
            found += [x.tolist(), whole.tolist()]
            (sum(result.sin().sum() for result in results) + whole.square().sum()).backward()
        except RuntimeError as error:
            found.append(str(error)[:60])
            continue
        gradients = (body.weight.grad, net.weight.grad)
        found += [[] if gradient is None else gradient.tolist() for gradient in gradients]
    return found


@pytest.mark.parametrize("kind", ["hidden", "slice", "saved", "data", "leaf"])
def test_an_argument_that_a_call_writes_to_passes_gradients_on_as_in_eager(kind):
    for make in Weighted.__subclasses__():
        if (make, kind) == (DoublesUnderNoGrad, "leaf"):
            continue  # refused: below
        expected = of_a_step(make, kind, "cpu")
        with tpuport.porting():
            ours = of_a_step(make, kind, "cuda")
        assert len(ours) == len(expected) >= 3
        for one, other in zip(ours, expected, strict=True):
            if isinstance(other, list):
                torch.testing.assert_close(torch.tensor(one), torch.tensor(other))
            else:
                assert one == other


def test_a_module_that_begins_with_a_write_is_one_program():
    def gradients(device):
        torch.manual_seed(0)
        body, head = nn.Linear(3, 3), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3))
        body.to(device), head.to(device)
        hidden = body(torch.ones(2, 3, device=device))
        (head(hidden).sum() + hidden.sum() * 2).backward()
        return [hidden.detach().cpu(), body.weight.grad.cpu(), head[1].weight.grad.cpu()]

    expected = gradients("cpu")
    with warnings.catch_warnings(), tpuport.porting():
        warnings.simplefilter("error", PortWarning)
        for one, other in zip(gradients("cuda"), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_second_derivatives_through_a_written_argument_are_those_of_eager():
    def penalty(device):
        torch.manual_seed(0)
        body, net = nn.Linear(3, 3).to(device), GivesBack().to(device)
        x = torch.linspace(-1, 1, 6, device=device).reshape(2, 3).requires_grad_()
        hidden = body(x).tanh() * 1
        net(hidden)
        (gradient,) = torch.autograd.grad(hidden.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return [gradient.detach().cpu(), net.weight.grad.cpu(), body.weight.grad.cpu()]

    expected = penalty("cpu")
    with tpuport.porting():
        for one, other in zip(penalty("cuda"), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_a_value_with_a_gradient_that_a_leaf_is_given_under_no_grad_is_refused():
    with tpuport.porting():
        leaf = torch.ones(2, 3, device="cuda", requires_grad=True)
        with pytest.raises(PortError, match=r"args\[0\] is given a tensor with a gradient"):
            DoublesUnderNoGrad().cuda()(leaf)


class BindsToData(nn.Module):
    """Gives what a gradient flows to another value, which gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.line(x)
        h.data = h.data + self.scale
        return h * h


def test_a_value_that_data_is_bound_to_gets_no_gradient() -> None:
    def gradients(device: str) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        model = BindsToData().to(device)
        model(torch.ones(2, 3, device=device)).sum().backward()
        return [p.grad if p.grad is None else p.grad.cpu() for p in model.parameters()]

    expected = gradients("cpu")
    with tpuport.porting():
        found = gradients("cuda")
    assert [g is None for g in found] == [g is None for g in expected] == [True, False, False]
    torch.testing.assert_close(found[1:], expected[1:])


def test_weights_in_float64_are_trained_for_more_than_one_step() -> None:
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 3)).double().to(device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            x = torch.linspace(-1, number, 6, dtype=torch.float64, device=device).reshape(2, 3)
            net(x).square().sum().backward()
            optimizer.step()
        return [p.detach().cpu() for p in net.parameters()]

    want = trained("cpu")
    with tpuport.porting():
        have = trained("cuda")
    for one, other in zip(want, have, strict=True):
        # A program computes in float32.
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
