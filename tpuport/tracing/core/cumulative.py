"""Cumulative sums, products and maxima, safe from a fault of XLA."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def cumulative(function: Callable[..., jax.Array], x: jax.Array, axis: int) -> jax.Array:
    """Return `function(x, axis)`, one of the cumulative functions of jax.

    XLA folds a pad into the window of a cumulative function. If one element stands in the middle
    of an odd number up to 15, XLA takes that window for one that always has the element, and
    returns a broadcast: `cumsum([0, g, 0])` is `[g, g, g]`, on CPUs and TPUs. Such a pad is the
    gradient of `x.cumsum(0)[1]`. No pad gets through a barrier, in either direction.
    `test_xla_folds_a_pad_into_a_cumulative_sum` fails when this can go.
    """
    barrier: Any = lax.optimization_barrier
    return barrier(function(barrier(x), axis))
