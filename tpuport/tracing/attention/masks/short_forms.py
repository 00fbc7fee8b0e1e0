"""Short forms of concrete matrices of the scores' size: by diagonal, by row, or as one number."""

from typing import Any

import jax
import jax.core
import numpy as np

from tpuport.tracing.attention.masks.graph import Node, computed, leaf


class _Diagonals:
    """A pseudo-primitive: element (i, j) is element j - i + rows - 1 of `by_diagonal`."""

    name = "diagonals"


DIAGONALS: Any = _Diagonals()


def short_form(node: Node) -> Node | None:
    """Return the same array [1, ..., rows, columns] computed from vectors, or None.

    Positions, distances between them and masks made of them have such a form.
    """
    if not hasattr(node, "short"):
        node.short = _found(node)
    return node.short


def _found(node: Node) -> Node | None:
    if isinstance(node.value, jax.core.Tracer) or len(node.shape) < 2:
        return None
    array = np.asarray(node.value)
    if bool((array == array.reshape(-1)[:1]).all()):
        params = {"shape": node.shape, "broadcast_dimensions": (), "sharding": None}
        return computed(jax.lax.broadcast_in_dim_p, params, (leaf(array.reshape(-1)[0]),), node)
    if any(n != 1 for n in node.shape[:-2]):
        return None
    array = array.reshape(node.shape[-2:])
    if bool((array[1:, 1:] == array[:-1, :-1]).all()):
        by_diagonal = np.concatenate([array[::-1, 0], array[0, 1:]])
        return computed(DIAGONALS, {}, (leaf(by_diagonal),), node)
    return runs(array, node.shape) if node.is_bool else None


def run_ends(seen: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the first and the last True of each row, or None if a row has several runs of True.

    A row without any has the number of columns and -1.
    """
    num = seen.shape[1]
    count = seen.sum(1)
    first = np.where(count == 0, num, seen.argmax(1))
    last = np.where(count == 0, -1, num - 1 - seen[:, ::-1].argmax(1))
    whole = (last - first + 1 == count) | (count == 0)
    return (first, last) if whole.all() else None


def runs(seen: np.ndarray, shape: tuple[int, ...]) -> Node | None:
    """Return a boolean matrix as comparisons of positions with the ends of each row's run."""
    ends = run_ends(seen)
    if ends is None:
        return None
    lead = (1,) * (len(shape) - 2)
    first, last = (leaf(x.astype(np.int32).reshape(*lead, -1, 1)) for x in ends)
    places = leaf(np.arange(shape[-1], dtype=np.int32).reshape(*lead, 1, -1))
    aval = jax.ShapeDtypeStruct(shape, np.dtype(bool))
    after = computed(jax.lax.ge_p, {}, (places, first), aval)
    before = computed(jax.lax.le_p, {}, (places, last), aval)
    return computed(jax.lax.and_p, {}, (after, before), aval)
