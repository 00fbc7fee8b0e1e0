"""Convolutions, poolings and transforms on a mesh have the gradients of one device.

XLA's partitioner has a wrong gradient for them, without an error, where an array is divided along
one axis of the mesh and whole along another.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import tpuport
from tpuport.sharding import make_mesh
from tpuport.sharding.rule_table import ShardingRules

MESHES = {"two axes": {"data": 2, "tensor": 4}, "one axis": {"data": 8}}
SPECS = {
    "batch": P("data"),
    "channels": P(None, "data"),
    "places": P(None, None, "data"),
    "batch and channels": P("data", "tensor"),
    "batch and places": P("data", None, "tensor"),
}


class Layer(nn.Module):
    """A layer between two functions of which neither is linear."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(8, 8, 16) or (8, 8, 16, 16) to what the layer makes of it."""
        shape = (-1, *[1] * (x.ndim - 2))
        return torch.sin(2 * self.layer(torch.tanh(x * self.scale.reshape(shape))))


class Transformed(nn.Module):
    """A Fourier transform of the last dim, with a weight for each frequency."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, 16) to the same."""
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=16)


class EveryOther(nn.Module):
    """The even places minus the odd ones, and a product of all places before each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, C, 16) to (B, C, 8)."""
        return (x[..., ::2] - x[..., 1::2] * torch.cumprod(1 + 0.3 * x, -1)[..., 1::2]) * 0.5


LAYERS = {
    "a convolution": lambda: nn.Conv1d(8, 8, 3, padding=1),
    "of one place": lambda: nn.Conv1d(8, 8, 1),
    "of an image": lambda: nn.Conv2d(8, 8, 3, padding=1, stride=2),
    "in groups": lambda: nn.Conv1d(8, 16, 3, padding=1, groups=4),
    "in groups, dilated, of an image": lambda: nn.Conv2d(8, 8, 2, groups=2, dilation=2, stride=2),
    "by channel": lambda: nn.Conv1d(8, 8, 4, padding=3, groups=8),
    "by channel, of an image": lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "transposed": lambda: nn.ConvTranspose1d(8, 8, 4, stride=2, padding=1),
    "transposed, in groups": lambda: nn.ConvTranspose1d(8, 8, 4, stride=2, padding=1, groups=2),
    "the largest": lambda: nn.MaxPool1d(3, stride=1, padding=1),
    "the mean": lambda: nn.AvgPool2d(3, stride=2, padding=1),
    "every other place": EveryOther,
}


def inputs(name: str) -> torch.Tensor:
    torch.manual_seed(1)
    is_image = "image" in name or name == "the mean"
    return torch.randn(8, 8, *([16, 16] if is_image else [16]))


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("layer", LAYERS)
def test_values_and_gradients_are_those_of_one_device(layer: str, axes: str):
    torch.manual_seed(0)
    model = Layer(LAYERS[layer]())
    x = inputs(layer)
    mesh = make_mesh(MESHES[axes])
    ported = tpuport.convert(model)
    tpuport.shard(ported, mesh, ShardingRules({"**": P()}))
    expected = model(x)
    cotangent = torch.randn(expected.shape)
    expected.backward(cotangent)

    def loss(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = ported.apply(params, ported.buffers, None, x)[0]
        return (out * cotangent.numpy()).sum(), out

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for spec in SPECS.values():
        if axes == "one axis" and "tensor" in spec:
            continue
        placed = jax.device_put(jnp.asarray(x.numpy()), NamedSharding(mesh, spec))
        (_, out), gradients = step(ported.params, placed)
        np.testing.assert_allclose(out, expected.detach(), rtol=1e-4, atol=1e-5)
        for name, parameter in model.named_parameters():
            largest = parameter.grad.abs().max().item()
            np.testing.assert_allclose(gradients[name], parameter.grad, atol=1e-4 * largest)


@pytest.mark.parametrize("axes", MESHES)
def test_a_transform_of_a_divided_dim_runs(axes: str):
    torch.manual_seed(0)
    model = Transformed()
    x = torch.randn(8, 8, 16)
    mesh = make_mesh(MESHES[axes])
    ported = tpuport.convert(model)
    tpuport.shard(ported, mesh, ShardingRules({"**": P()}))
    model(x).sum().backward()

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return ported.apply(params, ported.buffers, None, x)[0].sum()

    placed = jax.device_put(jnp.asarray(x.numpy()), NamedSharding(mesh, SPECS["places"]))
    found = jax.jit(jax.grad(loss))(ported.params, placed)["weight"]
    assert model.weight.grad is not None
    np.testing.assert_allclose(found, model.weight.grad, rtol=1e-4, atol=1e-4)


def test_a_convolution_of_one_place_keeps_its_places_divided():
    mesh = make_mesh(MESHES["two axes"])
    ported = tpuport.convert(nn.Conv1d(8, 8, 1))
    tpuport.shard(ported, mesh, ShardingRules({"**": P()}))
    place = NamedSharding(mesh, SPECS["batch and places"])
    x = jax.ShapeDtypeStruct((8, 8, 16), "float32", sharding=place)
    run = jax.jit(lambda params, x: ported.apply(params, ported.buffers, None, x)[0])
    compiled = run.lower(ported.params, x).compile()
    assert "all-gather" not in (compiled.as_text() or "")


def test_a_kernel_has_second_derivatives_on_a_mesh():
    torch.manual_seed(0)
    model = Layer(nn.Conv1d(8, 8, 3, padding=1, groups=4))
    x = inputs("a convolution")
    ported = tpuport.convert(model)
    tpuport.shard(ported, make_mesh(MESHES["two axes"]), "ddp")
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return ported.apply(params, ported.buffers, None, jnp.asarray(x.numpy()))[0].sum()

    tangents = {name: jnp.asarray(value.numpy()) for name, value in direction.items()}
    _, found = jax.jit(lambda p: jax.jvp(jax.grad(loss), (p,), (tangents,)))(ported.params)
    parameters = dict(model.named_parameters())
    first = torch.autograd.grad(model(x).sum(), list(parameters.values()), create_graph=True)
    along = sum((g * d).sum() for g, d in zip(first, direction.values(), strict=True))
    for (name, _), second in zip(
        parameters.items(), torch.autograd.grad(along, list(parameters.values())), strict=True
    ):
        largest = second.abs().max().item()
        np.testing.assert_allclose(found[name], second, atol=1e-4 * largest)


def kernel_gradient(spec: P | None, groups: int) -> jax.Array:
    """Return the gradient of a kernel by plain jax, with the input divided by a spec."""
    mesh = make_mesh(MESHES["two axes"])
    x = jax.random.normal(jax.random.key(0), (4, 8, 16))

    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        if spec is not None:
            x = lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
        layout = ("NCH", "OIH", "NCH")
        out = lax.conv_general_dilated(
            x, kernel, (1,), [(1, 1)], dimension_numbers=layout, feature_group_count=groups
        )
        return jnp.sin(out).sum()

    kernel = jax.random.normal(jax.random.key(1), (8, 8 // groups, 3))
    return jax.jit(jax.grad(loss))(kernel, x)


@pytest.mark.xfail(strict=True, reason="jax 0.10.2: convolutions in tracing/patterns/windows.py")
@pytest.mark.parametrize(("spec", "groups"), [(SPECS["places"], 1), (SPECS["batch"], 2)])
def test_the_partitioner_adds_a_gradient_up_once(spec: P, groups: int):
    expected = kernel_gradient(None, groups)
    np.testing.assert_allclose(kernel_gradient(spec, groups), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.xfail(strict=True, reason="jax 0.10.2: pooling in tracing/patterns/windows.py")
def test_the_partitioner_gives_the_gradient_of_the_largest_to_its_place():
    mesh = make_mesh(MESHES["one axis"])
    x = jax.random.normal(jax.random.key(0), (8, 8, 16))
    weights = jax.random.normal(jax.random.key(1), x.shape)

    def gradient(place: NamedSharding | None) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            x = x if place is None else lax.with_sharding_constraint(x, place)
            edges = ((0, 0), (0, 0), (1, 1))
            out = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3), (1, 1, 1), edges)
            return (out * weights).sum()

        return jax.jit(jax.grad(loss))(x)

    found = gradient(NamedSharding(mesh, SPECS["places"]))
    np.testing.assert_allclose(found, gradient(None), rtol=1e-5, atol=1e-5)
