"""Convolutions in groups whose kernel has a gradient of products, for programs on a mesh.

jax writes the gradient of such a kernel as a convolution in groups of the batch. XLA's partitioner
adds up its parts over too many chips for a CPU or a GPU, or ends the process at a failed check
(see test_partitioned_windows).
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero


class Convolution(NamedTuple):
    """How a convolution in groups of [N, C, ...] with [O, C / groups, ...] slides.

    Attributes:
        strides: steps between two results, by spatial dim.
        padding: what is added before and after each spatial dim; may be negative.
        spread: distance between two elements of the input, by spatial dim.
        dilation: distance between two elements of the kernel, by spatial dim.
        groups: number of groups of channels.
        others: the other parameters of `lax.conv_general_dilated`.
    """

    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    spread: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    others: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, params: dict[str, Any]) -> "Convolution | None":
        """Return what an equation computes; None if it has no groups, or another layout."""
        layout, rank = params["dimension_numbers"], len(params["window_strides"])
        plain = tuple(range(rank + 2))
        if params["feature_group_count"] == 1 or set(layout) != {plain}:
            return None
        return cls(
            tuple(params["window_strides"]),
            tuple(tuple(edges) for edges in params["padding"]),
            tuple(params["lhs_dilation"]),
            tuple(params["rhs_dilation"]),
            params["feature_group_count"],
            tuple(
                (name, params[name])
                for name in ("dimension_numbers", "precision", "preferred_element_type")
            ),
        )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def grouped(how: Convolution, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolve `x` [N, C, ...] with `kernel` [O, C / groups, ...]."""
    return lax.conv_general_dilated(
        x,
        kernel,
        how.strides,
        how.padding,
        lhs_dilation=how.spread,
        rhs_dilation=how.dilation,
        feature_group_count=how.groups,
        **dict(how.others),
    )


def _tangent(how: Convolution, primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    (x, kernel), (of_x, of_kernel) = primals, tangents
    out = grouped(how, x, kernel)
    parts = []
    if not isinstance(of_x, SymbolicZero):
        parts.append(grouped(how, of_x, kernel))
    if not isinstance(of_kernel, SymbolicZero):
        # Only the input is kept for the derivative, not what each element of the kernel sees of it.
        products = jax.checkpoint(functools.partial(_products, how), prevent_cse=False)
        parts.append(products(x, of_kernel).astype(out.dtype))
    return out, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(out)


grouped.defjvp(_tangent, symbolic_zeros=True)


def _products(how: Convolution, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return the convolution as a sum over the elements of the kernel."""
    size = kernel.shape[2:]
    config = [(*edges, n - 1) for edges, n in zip(how.padding, how.spread, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *config])
    counts = [
        (n - d * (k - 1) - 1) // s + 1
        for n, d, k, s in zip(x.shape[2:], how.dilation, size, how.strides, strict=True)
    ]
    total: Any = 0
    for place in itertools.product(*map(range, size)):
        starts = [i * d for i, d in zip(place, how.dilation, strict=True)]
        ends = [a + (n - 1) * s + 1 for a, n, s in zip(starts, counts, how.strides, strict=True)]
        seen = lax.slice(x, [0, 0, *starts], [*x.shape[:2], *ends], [1, 1, *how.strides])
        total = total + _product(how, seen, kernel[(slice(None), slice(None), *place)])
    return total


def _product(how: Convolution, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiply the channels of `x` [N, C, ...] by `kernel` [O, C / groups], group by group."""
    (outputs, inputs), space = kernel.shape, x.shape[2:]
    if inputs == 1 and outputs == x.shape[1]:
        return x * kernel.reshape(-1, *[1] * len(space))
    parts = x.reshape(x.shape[0], how.groups, inputs, *space)
    weights = kernel.reshape(how.groups, -1, inputs)
    out = jnp.einsum("ngi...,goi->ngo...", parts, weights, precision=dict(how.others)["precision"])
    return out.reshape(x.shape[0], outputs, *space)
