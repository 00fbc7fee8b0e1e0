"""What eager PyTorch raises in a backward pass, and gradients of some of several outputs.

Contents:
    SAVED               values that are written in place after an operation kept them for backward
    test_a_write_*      weights and arguments that are written between forward and backward
    test_*_written_*    the same error at the same moment, at each call, and only there
    test_one_output_*   the others, with infinite derivatives, get no gradient of zeros
"""

import copy
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch import nn

import tpuport
from tpuport import PortError
from tpuport.model.parity.saved_inputs import saved_inputs
from tpuport.model.parity.verify import Reference

X = torch.tensor([1.0, 2.0, 3.0])


def of_result(y: Any, write: Any) -> Any:
    write(y)
    return y.sum()


def of_operand(y: Any, factor: Any) -> Any:
    z = y * factor
    factor.add_(1)
    return z.sum()


def under_no_grad(y: Any) -> Any:
    z = (y**2).sum()
    with torch.no_grad():
        y.zero_()
    return z


SAVED: dict[str, Callable[[Any, Any], Any]] = {
    "exp": lambda w, x: of_result((w * x).exp(), lambda y: y.mul_(2)),
    "relu": lambda w, x: of_result((w * x).relu(), lambda y: y[:2].zero_()),
    "detach": lambda w, x: of_result((w * x).softmax(0).exp(), lambda y: y.detach().add_(1)),
    "operand": lambda w, x: of_operand(w, x * 1),
    "no_grad": lambda w, x: under_no_grad(w * x),
}


class Outputs(nn.Module):
    """The first output is right to differentiate; the second raises, or has no finite gradient."""

    def __init__(self, second: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.0, 1.0, 2.0]))
        self.second = second

    def forward(self, x: torch.Tensor) -> Any:
        return (self.w * x).sum(), self.second(self.w, x)


@pytest.mark.parametrize("name", SAVED)
def test_a_written_value_raises_in_the_backward_of_a_script(name: str):
    with tpuport.porting():
        model = Outputs(SAVED[name]).cuda()
        for _ in range(2):
            model.w.grad = None
            good, _ = model(X.cuda())
            good.backward()
            assert model.w.grad is not None
            assert model.w.grad.tolist() == X.tolist()
            _, bad = model(X.cuda())
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                bad.backward()


class Layers(nn.Module):
    """Two layers, a factor that is nowhere linear, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.factor, self.frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        written.add_(1)
        y = self.norm(self.last(self.first(x).tanh())) * self.frozen * scale * written
        return (y * self.factor.sin()).sum()


def outcome(model: nn.Module, device: str, leaf: bool, name: str) -> Any:
    """Write to one tensor between forward and backward; return the gradients or what is raised."""
    x = torch.tensor([[1.0, 2, 3], [3, 1, 0]]).to(device).requires_grad_(leaf)
    scale, written = torch.ones(3).to(device), torch.ones(3).to(device)
    model.zero_grad()
    loss = model(x, scale, written)
    tensors = {**dict(model.named_parameters()), "x": x, "scale": scale}
    with torch.no_grad():
        tensors.get(name, torch.ones(1)).mul_(2)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return {key: tensor.grad for key, tensor in tensors.items()}


NAMES = [name for name, _ in Layers().named_parameters()]


@pytest.mark.parametrize("leaf", [False, True])
def test_a_write_before_the_backward_pass_raises_where_eager_does(leaf: bool):
    torch.manual_seed(0)
    eager = Layers()
    with tpuport.porting():
        model = copy.deepcopy(eager).cuda()
        raised = set()
        for name in ["nothing", *NAMES, "x", "scale", "nothing"]:
            want, got = outcome(eager, "cpu", leaf, name), outcome(model, "cuda", leaf, name)
            if isinstance(want, str):
                raised.add(name)
                assert isinstance(got, str), name
                text = "modified by an inplace operation"
                assert got.partition(text)[:2] == want.partition(text)[:2]
            else:
                assert not isinstance(got, str), f"{name}: {got}"
                torch.testing.assert_close(got, want, check_device=False, rtol=1e-4, atol=1e-5)
    assert {"last.weight", "factor", "frozen", "x", "scale"} <= raised
    assert ("first.weight" in raised) is leaf
    assert not {"first.bias", "last.bias", "nothing"} & raised


def test_what_eager_saves_is_found_by_its_memory():
    x, w = torch.ones(3, 3), torch.ones(3, 3, requires_grad=True)
    for out, saved in [(x.t() @ w, {0}), (x * w[0].exp(), {0}), (w.sin() + x, {1})]:
        found = saved_inputs(Reference(out, None, ((x, w), {}), 0.0))
        assert (found.names, found.arguments) == (set(), saved)
    sparse = x.to_sparse()
    product = torch.sparse.mm(sparse, w)
    assert saved_inputs(Reference(product, None, ((sparse, w), {}), 0.0)).arguments == set()


def test_a_written_value_raises_at_each_gradient_of_apply():
    ported = tpuport.convert(Outputs(SAVED["exp"]))

    def loss(params: Any) -> Any:
        return sum(ported.apply(params, {}, None, X)[0])

    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            jax.grad(loss)(ported.params)


def test_one_output_is_differentiated():
    with tpuport.porting():
        model = Outputs(lambda w, x: (w / w, w.sqrt())).cuda()
        model(X.cuda())[0].backward()
        assert model.w.grad is not None
        assert model.w.grad.tolist() == X.tolist()


class Hidden(nn.Module):
    """Keeps a module in a plain list: no parameter of it is one of this module."""

    def __init__(self, grad: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.hidden, self.grad = [nn.Linear(2, 2).cuda()], grad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.grad):
            target = self.hidden[0](x)
        return (self.w * target).sum()


def test_a_gradient_that_a_program_does_not_return_is_refused():
    with tpuport.porting():
        x, model = torch.ones(2).cuda(), Hidden(True).cuda()
        with pytest.raises(PortError, match="its gradient would be lost") as caught:
            model(x)
        assert caught.value.source_line == "target = self.hidden[0](x)"
        model.hidden[0].requires_grad_(False)
        model(x).backward()
        assert model.w.grad is not None
        Hidden(False).cuda()(x).backward()
