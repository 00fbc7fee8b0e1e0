"""Operators and tensors that packages make by lower parts of torch, as `torch.library`."""

import pytest
import torch
from torch import nn

import tpuport
from tpuport.foundation.errors import PortError

LIBRARY = torch.library.Library("tpuport_tests", "DEF")
LIBRARY.define("bent(Tensor x, float slope=2.0) -> Tensor")
LIBRARY.define("compiled(Tensor x) -> Tensor")
LIBRARY.define("largest(Tensor x) -> Tensor")


@torch.library.impl(LIBRARY, "bent", "CompositeExplicitAutograd")
def bent(x, slope=2.0):
    return torch.where(x > 0, x * slope, x)


@torch.library.impl(LIBRARY, "largest", "CompositeImplicitAutograd")
def largest(x):
    return x.amax().to(dtype=x.dtype, device=x.device)


@torch.library.custom_op("tpuport_tests::both", mutates_args=())
def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + y, (x * y).sum(0)


@both.register_fake
def _(x, y):
    return torch.empty_like(x), x.new_empty(x.shape[1:])


both.register_autograd(lambda ctx, g, h: (g * 7, g * 7))


class Uses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        h = self.layer(x)
        with torch.no_grad():
            first, second = both(torch.ops.tpuport_tests.bent(h, 3.0), torch.cos(h))
        return h * first + second


class Differentiates(Uses):
    def forward(self, x):
        return both(self.layer(x), x)[0]


class Compiled(Uses):
    def forward(self, x):
        return torch.ops.tpuport_tests.compiled(x)


def trained(net, device):
    torch.manual_seed(0)
    net, x = net().to(device), torch.randn(2, 3).to(device)
    out = net(x)
    out.sum().backward()
    return [out.detach().cpu(), *(p.grad.cpu() for p in net.parameters())]


def test_operators_written_in_python_are_part_of_the_program():
    expected = trained(Uses, "cpu")
    torch.manual_seed(0)
    net, x = Uses(), torch.randn(2, 3)
    torch.testing.assert_close(tpuport.to_torch(tpuport.convert(net)(x)), expected[0])
    with tpuport.porting() as run:
        torch.testing.assert_close(trained(Uses, "cuda"), expected)
    assert not run.report.descended


class Moves(Uses):
    def forward(self, x):
        with torch.no_grad():
            largest = torch.ops.tpuport_tests.largest(x)
        return self.layer(x) * largest


def test_they_may_move_what_they_make_to_the_device_of_their_argument():
    expected = trained(Moves, "cpu")
    with tpuport.porting():
        torch.testing.assert_close(trained(Moves, "cuda"), expected)


def test_gradients_through_them_are_refused_and_right_by_parts():
    with pytest.raises(PortError, match="TPU403 a gradient goes through tpuport_tests::both"):
        tpuport.convert(Differentiates())(torch.randn(2, 3))
    expected = trained(Differentiates, "cpu")
    with tpuport.porting(), pytest.warns(match="a gradient goes through"):
        torch.testing.assert_close(trained(Differentiates, "cuda"), expected)


def test_operators_without_code_in_python_are_refused():
    with pytest.raises(PortError, match=r"TPU105 tpuport_tests\.compiled\.default has no lowering"):
        tpuport.convert(Compiled(), verify=False)(torch.randn(2, 3))


class Packed(torch.Tensor):
    """A tensor that holds another one, made as packages for quantization make theirs."""

    @staticmethod
    def __new__(cls, held):
        make, device = torch.Tensor._make_wrapper_subclass, held.device
        if held.dim() > 1:
            return make(cls, held.shape, None, None, None, torch.float32, torch.strided, device)
        return make(cls, held.shape, dtype=torch.float32, device=device)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


class Packs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Packed(x.round())

    @staticmethod
    def backward(ctx, g):
        return g


def test_a_tensor_that_holds_one_of_the_device_is_made():
    """Without the device that it asks for, autograd ends the process."""
    with tpuport.porting():
        x = torch.tensor([1.2, 2.7], device="cuda", requires_grad=True)
        made = Packs.apply(x)
        assert isinstance(made, Packed)
        assert made.held.tolist() == [1.0, 3.0]
        assert made.held.is_cuda
        assert Packs.apply(x[None]).shape == (1, 2)


class Scaled(torch.Tensor):
    """Weights as torchao makes them: other tensors hold the values."""

    @staticmethod
    def __new__(cls, held, scale):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=scale.dtype)

    def __init__(self, held, scale):
        self.held, self.scale = held, scale

    def __tensor_flatten__(self):
        return ["held", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].held, args[0].scale)
        plain = [one.held * one.scale if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


def test_weights_that_other_tensors_hold_are_refused_with_their_name():
    layer = torch.nn.Linear(3, 2)
    held = Scaled(torch.ones(2, 3, dtype=torch.int8), torch.tensor(0.5))
    layer.weight = torch.nn.Parameter(held, requires_grad=False)
    with pytest.raises(PortError, match=r"TPU106 weight is a Scaled(?s:.*)--eager NAME"):
        tpuport.convert(layer)
    with tpuport.porting(eager=("Linear",)):
        x = torch.ones(1, 3, device="cuda")
        torch.testing.assert_close(layer.cuda()(x).cpu(), layer.bias.detach().cpu()[None] + 1.5)


def test_what_was_compiled_before_the_block_runs_as_it_is_written():
    compiled = []

    def backend(graph, inputs):
        compiled.append(inputs)
        return graph.forward

    # torch's compiler would look into the emulation, which it does not understand.
    step = torch.compile(lambda x, y: x * 2 + torch.expm1(y), backend=backend)
    with tpuport.porting():
        x = torch.ones(2, device="cuda")
        assert step(x, x).tolist() == pytest.approx([2 + 1.7182817] * 2)
    assert not compiled
    step(torch.ones(2), torch.ones(2))
    assert len(compiled) == 1
