"""Lookups in a table whose gradient eager PyTorch makes sparse (`nn.Embedding(sparse=True)`).

In a program the gradient of a table is an array of all its rows. A sparse one also says which rows
were read: torch's SparseAdam moves these rows only, also those whose gradient is zero. So the
lookup has one more operand, zeros for each row, whose gradient is the number of times that the row
was read. `taps` of the emulated device make it an input of the program.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.custom_derivatives import linear_call

from tpuport.tracing.core.inner_programs import inner_programs
from tpuport.tracing.core.paths import has_rule_of


@jax.custom_jvp
def looked_up(table: jax.Array, index: jax.Array, read: jax.Array, uses: jax.Array) -> jax.Array:
    """Return rows of a table.

    Args:
        table: [n, d].
        index: the rows to return.
        read: of the same shape, the rows that get a gradient, n for none.
        uses: zeros [n], whose gradient counts how often each row was read.
    """
    del read, uses
    return jnp.take(table, index, axis=0, mode="clip")


@looked_up.defjvp
def _looked_up_jvp(primals: Any, tangents: Any) -> Any:
    _, index, read, uses = primals
    rows = looked_up(*primals)
    like, counts = jax.ShapeDtypeStruct(rows.shape, rows.dtype), uses.shape

    def nothing(read: jax.Array, uses: jax.Array) -> jax.Array:
        del read, uses
        return jnp.zeros_like(like)

    def counted(read: jax.Array, rows: jax.Array) -> jax.Array:
        del rows
        return jnp.zeros(counts, np.float32).at[read].add(1, mode="drop")

    moved = jnp.take(tangents[0], index, axis=0, mode="clip")
    return rows, moved + linear_call(nothing, counted, read, tangents[3])


def sparse_lookup(table: jax.Array, index: jax.Array, padding: int) -> jax.Array:
    """Return rows of a table; the program can give them a sparse gradient."""
    count = table.shape[0]
    read = jnp.where(index == padding, count, index) if padding >= 0 else index
    return looked_up(table, index, read, jnp.zeros(count, np.float32))


def has_sparse_gradient(module: torch.nn.Module) -> bool:
    """Return whether a module holds such a table."""
    return any(one.__dict__.get("sparse") is True for one in torch.nn.Module.modules(module))


def is_lookup(eqn: Any) -> bool:
    """Return whether an equation is such a lookup."""
    return has_rule_of(eqn, looked_up.__name__)


def inner_lookups(jaxpr: Any) -> Iterator[Any]:
    """Yield the lookups in loops, branches and other regions of a program."""
    for eqn in jaxpr.eqns:
        for inner in () if is_lookup(eqn) else inner_programs(eqn):
            body = getattr(inner, "jaxpr", inner)
            yield from filter(is_lookup, body.eqns)
            yield from inner_lookups(body)
