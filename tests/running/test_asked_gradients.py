"""Gradients that a script asks of what a call returns or keeps, beside those of its weights."""

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import tpuport
from benchmarks.asked_gradients import Maker, judged
from tpuport.foundation.errors import PortError


class Net(nn.Module):
    """Returns a hidden tensor that its output is computed from, and keeps it."""

    def __init__(self, how):
        super().__init__()
        self.how, self.kept, self.seen = how, None, None
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        if self.how == "requires_grad_ of the argument":
            x.requires_grad_()
        h = torch.tanh(self.first(x))
        if self.how == "retain_grad inside":
            h.retain_grad()
        self.kept = h
        other = torch.sin(self.middle(h))
        return self.last(other), h, other


def asked(how, net, x, outputs, found):
    """Ask for gradients in one way, and return the loss."""
    y, h, other = outputs
    if how == "retain_grad outside":
        h.retain_grad()
        other.retain_grad()
    if how == "retain_grad of an attribute":
        net.kept.retain_grad()
    if how == "hooks":
        h.register_hook(lambda g: found.append(g.clone()))
        other.register_hook(lambda g: g * 3)
        h.register_hook(lambda g: g * 2)
        h.register_hook(lambda g: found.append(g.clone())).remove()
    if how == "grad":
        found += torch.autograd.grad(y.sum(), [h, net.first.weight, other], retain_graph=True)
        found += torch.autograd.grad((h**2).sum() + y.sum(), h, retain_graph=True)
        (none,) = torch.autograd.grad(h.sum(), other, retain_graph=True, allow_unused=True)
        assert none is None
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            torch.autograd.grad(h.sum(), other, retain_graph=True)
    if how == "penalty":
        (g,) = torch.autograd.grad((y**2).sum(), h, create_graph=True)
        return (g**2).sum() + y.sum()
    return (y**2).sum() + (h * 0.5).sum()


def seen(device, how):
    """What a script sees of two calls and their gradients."""
    torch.manual_seed(0)
    net, found = Net(how).to(device), []
    x = torch.linspace(-1, 1, 15).reshape(5, 3).to(device)
    for _ in range(2):
        net.zero_grad()
        outputs = net(x)
        asked(how, net, x, outputs, found).backward()
        tensors = [outputs[1], outputs[2], net.kept, x] if "retain" in how else [x]
        found += [t.grad if t.grad is not None else torch.zeros(0) for t in tensors]
        found += [p.grad for p in net.parameters()]
    return [one.detach().cpu().clone() for one in found]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "how",
    [
        *("requires_grad_ of the argument", "retain_grad inside", "retain_grad outside"),
        *("retain_grad of an attribute", "hooks", "grad", "penalty"),
    ],
)
def test_a_script_gets_the_gradients_of_results_that_others_are_computed_from(how):
    expected = seen("cpu", how)
    with tpuport.porting():
        ours = seen("cuda", how)
    assert len(ours) == len(expected) >= 14
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # other orders of sums


class Coordinates(nn.Module):
    """A network of coordinates that makes them a leaf, as SIREN does."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 16), nn.Linear(16, 1)

    def forward(self, coordinates):
        coordinates = coordinates.clone().detach().requires_grad_(True)
        return self.last(torch.sin(3 * self.first(coordinates))), coordinates


def trained(device):
    """The losses of a script that fits gradient and Laplacian, and those it saw last."""
    torch.manual_seed(0)
    net, x = Coordinates().to(device), torch.rand(5, 2).to(device)
    optimizer, losses = torch.optim.Adam(net.parameters(), 1e-2), []
    g = c = x
    for _ in range(3):
        y, c = net(x)
        (g,) = torch.autograd.grad(y, c, torch.ones_like(y), create_graph=True)
        seconds = [torch.autograd.grad(g[:, k].sum(), c, create_graph=True)[0] for k in range(2)]
        laplacian = seconds[0][:, 0] + seconds[1][:, 1]
        loss = (g**2).sum() + ((y - 1) ** 2).mean() + (laplacian**2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert c.grad is not None
    return losses, g.flatten().tolist(), c.grad.flatten().tolist(), c.is_leaf


def test_coordinates_that_a_call_makes_a_leaf_have_derivatives_of_all_orders():
    *expected, is_leaf = trained("cpu")
    with tpuport.porting():
        *ours, ours_is_leaf = trained("cuda")
    assert is_leaf
    assert ours_is_leaf
    for one, other in zip(ours, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4)  # three steps of Adam on what sums differ by


def keeps_zeros(self, x):
    self.kept = torch.zeros(4, device=x.device, requires_grad=True)
    return x * self.weight + self.kept * 3


def returns_a_copy(self, x):
    copied = x.clone().requires_grad_()
    self.kept = copied
    return copied * self.weight


def keeps_both(self, x):
    self.kept = x.detach().requires_grad_()
    return self.kept**2 * self.weight + self.kept[1:].sum()


def makes(forward, device):
    """The gradients of leaves that calls make and keep, call by call."""

    class Makes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(4.0))
            self.kept: Any = None

    Makes.forward = forward
    net, found = Makes().to(device), []
    for call in range(3):
        net(torch.ones(4, device=device) + call).sum().backward()
        found += [(net.kept.is_leaf, net.kept.tolist(), net.kept.grad.tolist())]
        assert net.weight.grad is not None
        found += [net.weight.grad.tolist()]
    return found


@pytest.mark.parametrize("forward", [keeps_zeros, returns_a_copy, keeps_both])
@pytest.mark.parametrize("verify", [True, False])
def test_a_leaf_that_a_call_makes_gets_its_gradient(forward, verify):
    expected = makes(forward, "cpu")
    with tpuport.porting(verify=verify):
        assert makes(forward, "cuda") == expected


class Frozen(nn.Module):
    """Makes its argument a leaf, and has no weight that requires grad."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1).requires_grad_(False)

    def forward(self, x):
        x.requires_grad_()
        return self.inner(x)


def test_the_argument_of_a_frozen_network_gets_its_gradient():
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        with tpuport.porting() if device == "cuda" else contextlib.nullcontext():
            x = torch.ones(2, 3, device=device)
            Frozen().to(device)(x).sum().backward()
            assert x.grad is not None
            found.append(x.grad.flatten().tolist())
    assert found[0] == pytest.approx(found[1])


class Checkpointed(nn.Module):
    """Computes a result from another one in a region that runs again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def both(self, x):
        h = self.first(x)
        return self.last(h), h

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.both, x, use_reentrant=False)


@pytest.mark.parametrize(
    "ask",
    [
        lambda y, h: h.retain_grad(),
        lambda y, h: h.register_hook(print),
        lambda y, h: torch.autograd.grad(y.sum(), h),
    ],
)
def test_a_result_that_a_region_makes_with_others_is_refused(ask):
    with tpuport.porting():
        y, h = Checkpointed().cuda()(torch.ones(2, 3).cuda())
        with pytest.raises(PortError, match="a checkpointed region makes together with others"):
            ask(y, h)


def test_random_scripts_see_what_they_see_in_eager_pytorch(tmp_path):
    kinds = []
    for seed in range(2000, 2005):
        found = judged(Maker(seed).script(), tmp_path)
        assert found.kind != "differs", f"{found.what}\n{found.shown}"
        kinds.append(found.kind)
    assert kinds.count("passes") >= 3


class Copies(nn.Module):
    """Returns a clone, and a result that is computed from the tensor that was cloned."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)

    def forward(self, x):
        h = self.first(x)
        return torch.sin(h), h.clone()


def test_a_result_that_is_a_copy_of_what_others_are_computed_from_is_refused():
    with tpuport.porting():
        _, copied = Copies().cuda()(torch.ones(2, 3).cuda())
        with pytest.raises(PortError, match="a copy or a view of all of another tensor"):
            copied.retain_grad()


def test_a_backward_pass_that_ends_at_such_a_result_is_refused():
    with tpuport.porting():
        net = Net("").cuda()
        y, h, _ = net(torch.ones(2, 3).cuda())
        with pytest.raises(PortError, match=r"(?s)backward\(inputs=.*retain_grad"):
            y.sum().backward(inputs=[h])


@pytest.mark.parametrize("is_program", [False, True])
def test_a_gradient_is_where_its_tensor_is(is_program: bool) -> None:
    """As for a saliency map: the picture is on the host, what the network saw is a copy of it."""
    torch.manual_seed(0)
    network, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)

    def outcome(device: str) -> tuple[list[Any], torch.Tensor]:
        network.to(device)
        network.zero_grad()
        x.grad = None

        def loss() -> torch.Tensor:
            there = x.to(device)
            return (network(there) if is_program else there * 2).sin().sum()

        (first,) = torch.autograd.grad(loss(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        for _ in range(2):
            loss().backward()
        assert x.grad is not None
        assert x.grad is x.grad
        assert [one.device.type for one in (first, second, x.grad)] == ["cpu"] * 3
        for p in network.parameters() if is_program else ():
            assert p.grad is not None
            assert p.grad.device.type == device
        (moved,) = (x.to(device),)
        (inside,) = torch.autograd.grad(moved.sin().sum(), moved)
        assert inside.device.type == device
        found = [first, second, x.grad]
        return [one.detach().numpy() for one in found], inside.cpu()

    expected, of_copy = outcome("cpu")
    with tpuport.porting():
        found, of_moved = outcome("cuda")
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_moved, of_copy)
