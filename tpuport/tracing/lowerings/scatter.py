"""Scatters along a dim and their reductions, with torch's gradients.

They are shared among equal extremes, and exact at zeros.
"""

from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.lowering_registry import lowering
from tpuport.tracing.lowerings._numeric import (
    highest,
    is_float,
    lowest,
    replaced,
    value_and_gradient,
)
from tpuport.tracing.lowerings.basic import cast

aten = torch.ops.aten
_ONE_FORM = "torchax ignores reduce= or include_self=, or starts integers from infinity"


def _grid(index: jax.Array, dim: int) -> tuple[jax.Array, ...]:
    """Return the coordinates that `index` [i, j, ...] addresses.

    They are its values along `dim`, and its own positions along the other dims.
    """
    where = [
        jnp.arange(n).reshape((1,) * d + (n,) + (1,) * (index.ndim - d - 1))
        for d, n in enumerate(index.shape)
    ]
    where[dim % index.ndim] = index
    return tuple(jnp.broadcast_to(w, index.shape) for w in where)


def _part(src: Any, index: jax.Array, dtype: Any) -> jax.Array:
    """Return the part of `src` that is scattered.

    That is its leading block of the shape of `index`; a number is broadcast to that shape.
    """
    if not isinstance(src, jax.Array) or not src.ndim:
        return jnp.broadcast_to(cast(jnp.asarray(src), dtype), index.shape)
    return cast(src, dtype)[tuple(slice(0, n) for n in index.shape)]


def _at_least_1d(x: jax.Array, index: jax.Array, src: Any) -> tuple[jax.Array, jax.Array, Any]:
    x = x.reshape(-1) if not x.ndim else x
    index = index.reshape(-1) if not index.ndim else index
    return x, index, src.reshape(-1) if isinstance(src, jax.Array) and not src.ndim else src


@lowering(
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter.value_reduce,
    reason=_ONE_FORM,
)
def _scatter(
    x: jax.Array, dim: int, index: jax.Array, src: Any, *, reduce: str | None = None
) -> jax.Array:
    if reduce is not None:
        named = {"add": "sum", "multiply": "prod"}[reduce]
        return _reduced(x, dim, index, src, named, True)
    shape = x.shape
    x, index, src = _at_least_1d(x, index, src)
    where = _grid(index, dim)
    return replaced(x, where, _part(src, index, x.dtype)).reshape(shape)


@lowering(aten.scatter_add.default, reason="torchax takes no 0-d tensors")
def _scatter_add(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return _reduced(x, dim, index, src, "sum", True)


@lowering(aten.scatter_reduce.two, reason=_ONE_FORM)
def _scatter_reduce(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    src: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    return _reduced(x, dim, index, src, reduce, include_self)


def _reduced(
    x: jax.Array, dim: int, index: jax.Array, src: Any, reduce: str, include_self: bool
) -> jax.Array:
    shape = x.shape
    x, index, src = _at_least_1d(x, index, src)
    where = _grid(index, dim)
    return _combine(x, where, _part(src, index, x.dtype), reduce, include_self).reshape(shape)


@lowering(aten.index_reduce.default)
def _index_reduce(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    """Reduce slices of `source` along `dim` into slices `index` of `x`, as scatter_reduce does."""
    shape = x.shape
    x, index, source = (
        x.reshape(shape or (1,)),
        index.reshape(-1),
        source.reshape(source.shape or (1,)),
    )
    where = (slice(None),) * (dim % x.ndim) + (index,)
    return _combine(x, where, source, reduce, include_self).reshape(shape)


# -- reducing into places --------------------------------------------------------------------------


def _start(reduce: str, dtype: Any) -> Any:
    return {"sum": 0, "mean": 0, "prod": 1, "amax": lowest(dtype), "amin": highest(dtype)}[reduce]


def _combine(
    x: jax.Array, where: Any, src: jax.Array, reduce: str, include_self: bool
) -> jax.Array:
    """Return `x` with `src` reduced into `x[where]`; places without a source keep their value."""
    is_bool = x.dtype == jnp.bool_
    if is_bool:
        x, src = x.astype(jnp.int32), src.astype(jnp.int32)
    own = x
    if not include_self:
        x = x.at[where].set(_start(reduce, x.dtype))
    if reduce in ("sum", "mean"):
        result = x.at[where].add(src)
        if reduce == "mean":
            result = _divided(result, x, where, src, include_self)
    elif reduce == "prod":
        result = _product(x, where, src)
    else:
        result = _extreme(x, where, src, reduce == "amax", own)
    return result != 0 if is_bool else result


def _divided(
    total: jax.Array, x: jax.Array, where: Any, src: jax.Array, include_self: bool
) -> jax.Array:
    count = jnp.full(x.shape, 1 if include_self else 0, jnp.int32)
    count = jnp.maximum(count.at[where].add(jnp.ones(src.shape, jnp.int32)), 1)
    if is_float(total) or jnp.iscomplexobj(total):
        return total / count.astype(total.real.dtype)
    return total // count.astype(total.dtype)


def _extreme(x: jax.Array, where: Any, src: jax.Array, largest: bool, own: jax.Array) -> jax.Array:
    def stopped(value: jax.Array) -> jax.Array:
        return jnp.asarray(jax.lax.stop_gradient(value))

    place = stopped(x).at[where]
    value = place.max(stopped(src)) if largest else place.min(stopped(src))
    if not is_float(x):
        return value
    # jax has no gradient of a scatter-max: torch shares it equally among all that equal the
    # extreme. A value of its own counts among them even if it was not included.
    mine, theirs = x == value, src == value[where]
    count = (own == value).astype(jnp.float32).at[where].add(theirs.astype(jnp.float32))
    total = jnp.where(mine, x, 0).at[where].add(jnp.where(theirs, src, 0))
    return value_and_gradient(value, (total / jnp.maximum(count, 1)).astype(x.dtype))


def _product(x: jax.Array, where: Any, src: jax.Array) -> jax.Array:
    if not is_float(x):
        return x.at[where].multiply(src)
    return _float_product(x, src, where)


def _float_product(x: jax.Array, src: jax.Array, where: Any) -> jax.Array:
    """Multiply into places; jax has no gradient of it for repeated places, so it is written out."""
    fixed_x, fixed = jnp.asarray(jax.lax.stop_gradient(x)), jax.lax.stop_gradient(src)
    value = fixed_x.at[where].multiply(fixed)
    others = jnp.where(fixed_x == 0, 1, fixed_x).at[where].multiply(fixed) / jnp.where(
        fixed_x == 0, 1, fixed_x
    )
    zero = fixed == 0
    zeros = jnp.zeros(x.shape, jnp.int32).at[where].add(zero.astype(jnp.int32))
    alone = zero & (zeros[where] == 1)
    without = fixed_x.at[where].multiply(jnp.where(alone, 1, fixed))[where]
    factor = jnp.where(alone, without, value[where] / jnp.where(zero, 1, fixed))
    return value_and_gradient(value, (x * others).at[where].add(src * factor))
