"""Operations on windows, whose dims are whole on every chip of a mesh.

XLA's partitioner divides a convolution, a pooling or a step of a cumulative product along the dims
that its windows slide over by sending the edges to the neighbours, and jax 0.10.2 gets that wrong
without an error (see test_windows_on_meshes.py):

- where an array is divided along one axis of a mesh and whole along another, the parts of a
  kernel's gradient are added up over both axes: it is as many times too large as the second axis
  has chips, on TPUs too;
- the gradient of the largest in a window takes wrong places at the edges;
- for convolutions in groups, Fourier transforms and paddings between elements the process ends at
  a failed check.

So these dims are unsharded before and after such an operation, which holds for its derivative as
well; batch and channels stay as the partitioner wants them. On a mesh with one axis of several
chips the kernel's gradient is right, so convolutions without groups stay divided there.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.tracing.core.context import Trace
from tpuport.tracing.patterns.grouped_convolution import Convolution, grouped
from tpuport.tracing.patterns.program import FlatProgram, PatternMatch, RunningValues

_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
_POOLING = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
_SCATTERED = ("select_and_scatter_add", "select_and_gather_add")


def divides(mesh: Mesh | None) -> bool:
    """Return whether a mesh has several chips along an axis."""
    return mesh is not None and any(size > 1 for size in mesh.devices.shape)


def find_windows(program: FlatProgram, trace: Trace) -> Iterator[PatternMatch]:
    """Yield the operations of a program on a mesh that XLA's partitioner takes apart wrongly."""
    mesh = trace.options.mesh
    if mesh is None or not divides(mesh):
        return
    several_axes = sum(size > 1 for size in mesh.devices.shape) > 1
    for eqn in program.equations:
        name, params = eqn.primitive.name, eqn.params
        if name == "conv_general_dilated":
            if several_axes or params["feature_group_count"] > 1:
                yield PatternMatch(eqn, functools.partial(_convolution, mesh, eqn))
        elif dims := _window_dims(eqn):
            yield PatternMatch(eqn, functools.partial(_whole_windows, mesh, eqn, dims))


def _window_dims(eqn: Any) -> tuple[int, ...]:
    """Return the dims of all operands and results that windows of an equation slide over."""
    name, params = eqn.primitive.name, eqn.params
    if name == "fft":
        rank = eqn.invars[0].aval.ndim
        return tuple(range(rank - len(params["fft_lengths"]), rank))
    if name in _CUMULATIVE:
        return (params["axis"],)
    if name in _POOLING or name in _SCATTERED:
        strides, window = params["window_strides"], params["window_dimensions"]
        return tuple(i for i, n in enumerate(zip(strides, window, strict=True)) if n != (1, 1))
    if name == "pad":
        config = enumerate(params["padding_config"])
        return tuple(i for i, (low, high, inner) in config if inner or min(low, high) < 0)
    if name == "slice" and params["strides"] is not None:
        return tuple(i for i, stride in enumerate(params["strides"]) if stride != 1)
    return ()


def _whole_windows(
    mesh: Mesh, eqn: Any, dims: tuple[int, ...], values: RunningValues
) -> list[jax.Array]:
    operands = [values.read(atom) for atom in eqn.invars]
    # The number that fills a padding has no dims.
    operands = [x if jnp.ndim(x) == 0 else _whole(mesh, x, dims) for x in operands]
    results = eqn.primitive.bind(*operands, **eqn.params)
    if not eqn.primitive.multiple_results:
        results = [results]
    return [_whole(mesh, x, dims) for x in results]


def _convolution(mesh: Mesh, eqn: Any, values: RunningValues) -> list[jax.Array]:
    x, kernel = (values.read(atom) for atom in eqn.invars)
    if _is_product(eqn, kernel):
        options = {name: eqn.params[name] for name in ("precision", "preferred_element_type")}
        return [jnp.einsum("ni...,oi->no...", x, kernel.reshape(kernel.shape[:2]), **options)]
    layout = eqn.params["dimension_numbers"]
    x = _whole(mesh, x, layout.lhs_spec[2:])
    kernel = _whole(mesh, kernel, layout.rhs_spec[2:])
    convolution = Convolution.of(eqn.params)
    if convolution is None:
        out = eqn.primitive.bind(x, kernel, **eqn.params)
    else:
        out = grouped(convolution, x, kernel)
    return [_whole(mesh, out, layout.out_spec[2:])]


def _is_product(eqn: Any, kernel: jax.Array) -> bool:
    """Return whether a convolution [N, C, ...] only multiplies the channels of each place."""
    params = eqn.params
    plain = tuple(range(kernel.ndim))
    counts = (params["feature_group_count"], params["batch_group_count"])
    steps = (*params["window_strides"], *params["lhs_dilation"], *counts, *kernel.shape[2:])
    edges = {edge for pair in params["padding"] for edge in pair}
    return set(steps) == {1} and edges <= {0} and set(params["dimension_numbers"]) == {plain}


def _whole(mesh: Mesh, x: jax.Array, dims: Any) -> jax.Array:
    """Return an array that is unsharded along some dims, and along others as XLA wants."""
    spec = P(*(None if dim in dims else P.UNCONSTRAINED for dim in range(x.ndim)))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
