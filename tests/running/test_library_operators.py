"""Operators and tensors that packages make by lower parts of torch, as `torch.library`."""

import jax
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


def keep(ctx, inputs, keyword_only_inputs, output):
    ctx.save_for_backward(*inputs, output[1])
    ctx.times = keyword_only_inputs["times"]


def pulled_back(ctx, g, h):
    x, y, summed = ctx.saved_tensors
    assert ctx.needs_input_grad == (True, True)
    return g * y * ctx.times * 2 + h, g * x + h * summed


@torch.library.custom_op("tpuport_tests::product", mutates_args=())
def product(
    x: torch.Tensor, y: torch.Tensor, *, times: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    return x * y * times, (x + y).sum(0)


@product.register_fake
def _(x, y, *, times=3):
    return torch.empty_like(x), x.new_empty(x.shape[1:])


product.register_autograd(pulled_back, setup_context=keep)


@torch.library.custom_op("tpuport_tests::joined", mutates_args=())
def joined(tensors: list[torch.Tensor], scale: float) -> torch.Tensor:
    return torch.cat(tensors) * scale


@joined.register_fake
def _(tensors, scale):
    return torch.cat(tensors)


def keep_lengths(ctx, inputs, output):
    ctx.lengths = [len(one) for one in inputs[0]]


joined.register_autograd(
    lambda ctx, g: ([5 * one for one in g.split(ctx.lengths)], None), setup_context=keep_lengths
)


def keep_slope(ctx, inputs, output):
    ctx.slope = inputs[1]


LIBRARY.define("turned(Tensor x, float slope=2.0) -> Tensor")
torch.library.impl(LIBRARY, "turned", "CompositeExplicitAutograd")(
    lambda x, slope=2.0: torch.ops.aten.alias(x)
)
torch.library.register_autograd(
    "tpuport_tests::turned",
    lambda ctx, g: (-ctx.slope * g, None),
    setup_context=keep_slope,
    lib=LIBRARY,
)


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
        return torch.ops.tpuport_tests.bent(self.layer(x))


class Registered(Uses):
    """Gradients go through each operator whose backward is registered."""

    def forward(self, x):
        h = self.layer(x)
        first = both(h, x)[0] + torch.ops.tpuport_tests.turned(h)
        second, summed = product(first, torch.ops.tpuport_tests.turned(h, 0.5), times=4)
        return joined([first, second * summed], 0.3)


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


def test_gradients_are_those_of_the_backward_that_is_registered():
    expected = trained(Registered, "cpu")
    torch.manual_seed(0)
    net, x = Registered(), torch.randn(2, 3)
    ported = tpuport.convert(net)
    torch.testing.assert_close(tpuport.to_torch(ported(x)), expected[0])

    def summed(params):
        return ported.apply(params, ported.buffers, None, x)[0].sum()

    found = jax.jit(jax.grad(summed))(ported.params)
    gradients = [tpuport.to_torch(found[name]) for name, _ in net.named_parameters()]
    torch.testing.assert_close(gradients, expected[1:])
    with tpuport.porting() as run:
        torch.testing.assert_close(trained(Registered, "cuda"), expected)
    assert not run.report.descended


def test_gradients_without_a_registered_backward_are_refused():
    with pytest.raises(PortError, match="TPU403 a gradient goes through tpuport_tests::bent"):
        tpuport.convert(Differentiates())(torch.randn(2, 3))


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
