"""A primitive that splits an array along its first dim in one equation.

Slices would be one equation for each part: with many blocks, most of the program.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

UNSTACK = Primitive("tpuport_unstack")
UNSTACK.multiple_results = True


def parts_of(value: Any) -> list[jax.Array]:
    """Return `[value[0], value[1], ...]`; transformations such as `grad` and `vmap` apply.

    Args:
        value: An array of shape [n, ...].

    Returns:
        The n parts of shape [...].
    """
    return UNSTACK.bind(value)


def _sliced(value: jax.Array) -> list[jax.Array]:
    return [jax.lax.index_in_dim(value, i, keepdims=False) for i in range(value.shape[0])]


def _one(value: jax.Array) -> jax.Array:
    return jax.lax.index_in_dim(value, 0, keepdims=False)


@UNSTACK.def_abstract_eval
def _avals(value: Any) -> list[Any]:
    (part,) = jax.make_jaxpr(_one)(value).out_avals
    return [part] * value.shape[0]


def _transposed(cotangents: list[Any], operand: Any) -> list[Any]:
    if all(type(cotangent) is ad.Zero for cotangent in cotangents):
        return [ad.Zero(operand.aval)]
    return [jax.numpy.stack([ad.instantiate_zeros(cotangent) for cotangent in cotangents])]


def _batched(values: Any, dims: Any) -> tuple[list[jax.Array], list[int]]:
    parts = parts_of(jax.numpy.moveaxis(values[0], dims[0], 1))
    return parts, [0] * len(parts)


UNSTACK.def_impl(jax.jit(_sliced))
ad.deflinear2(UNSTACK, _transposed)
batching.primitive_batchers[UNSTACK] = _batched
mlir.register_lowering(UNSTACK, mlir.lower_fun(_sliced, multiple_results=True))
