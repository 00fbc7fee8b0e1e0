"""Magnitudes of integers, to know whether a product of them can wrap around to zero."""

import numpy as np

from tpuport.tracing.attention.masks.graph import Node
from tpuport.tracing.attention.masks.views import base, known_array, sunk
from tpuport.tracing.core.context import current

_INT64 = np.dtype("int64")


def most_of_product(node: Node) -> int | None:
    """Return the largest magnitude of a product of integers, or None if it may wrap around.

    Args:
        node: `mul`, or a view of it.
    """
    # Views made here were not computed by the program, so only their base has a torch dtype.
    trace, made = current(), base(node)
    is_int64 = trace is not None and trace.holds_int64(made.value)
    limit = np.iinfo(_INT64 if is_int64 else made.dtype).max
    most = 1
    for x in sunk(made).inputs:
        most *= _most(x)
    return most if most <= limit else None


def _most(node: Node) -> int:
    """Return the largest magnitude that elements of an integer node can have."""
    found = known_array(node)
    if found is not None:
        return max(abs(int(found.min())), abs(int(found.max()))) if found.size else 0
    most = 1 if node.is_bool else -int(np.iinfo(node.dtype).min) or int(np.iinfo(node.dtype).max)
    node = sunk(node)
    if node.name == "mul":
        return most_of_product(node) or most
    if node.name == "convert_element_type":
        (x,) = node.inputs
        if x.is_bool or np.issubdtype(x.dtype, np.integer):
            before = _most(x)
            return before if before <= np.iinfo(node.dtype).max else most
    return most
