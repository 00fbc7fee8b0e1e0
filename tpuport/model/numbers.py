"""Traced Python numbers: results of `.item()` and `int(...)`, and sizes that depend on data.

They are torch's own symbolic numbers (`torch.SymInt`, `SymFloat`, `SymBool`) around a node that
holds a 0-d jax value, so torch's argument parser takes them wherever it takes a Python number. A
comparison gives a `SymBool`, whose truth is a branch on a traced value.
"""

import math
from typing import Any

import jax
import torch
from torch.fx.experimental import sym_node as _sym_node  # noqa: F401  (gives SymInt and SymFloat their operators)

from tpuport.model.locate import port_error
from tpuport.model.number_node import NumberNode
from tpuport.model.tensor import TracedTensor

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def number(value: Any, kind: type, low: float = -math.inf, high: float = math.inf) -> Any:
    """Return a traced Python number of `kind` (int, float or bool) around a 0-d jax value."""
    return from_node(NumberNode(value, kind, low, high))


def from_node(node: NumberNode) -> Any:
    """Return the Python number of a node: a plain int where its value is known."""
    kind = node.kind
    if kind is int and node.low == node.high:
        return int(node.low)
    return {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}[kind](node)


def node_value(number: Any) -> jax.Array:
    """Return the 0-d jax value of a traced number."""
    node = number.node
    if isinstance(node, NumberNode):
        return node.value
    raise port_error(
        "a symbolic number of torch.export or torch.compile met a traced program",
        code="TPU106",
        remedy="convert the model itself, not its exported or compiled form",
    )


def placeholder(number: Any) -> Any:
    """Return a Python number to use for a traced one where only dtypes and shapes matter."""
    return {torch.SymInt: 1, torch.SymFloat: 1.5, torch.SymBool: True}[type(number)]


def item(tensor: TracedTensor) -> Any:
    """Return `.item()` of a traced tensor: a traced Python number."""
    if tensor.numel() != 1:
        msg = f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar"
        raise RuntimeError(msg)
    tensor._storage.trace.has_numbers = True
    # A Python number has no gradient.
    value = jax.lax.stop_gradient(tensor._elem.reshape(()))
    if tensor.dtype is torch.bool:
        return number(value, bool)
    if tensor.dtype.is_floating_point:
        return number(value, float)
    if tensor.dtype.is_complex:
        raise port_error(
            ".item() of a traced complex tensor",
            code="TPU106",
            remedy="keep it a 0-d tensor: torch arithmetic takes it where it takes a number",
        )
    tensor._storage.trace.dynamic = True
    # One node for each value: two reads of it then have equal expressions, which compare equal.
    node = tensor._as_number
    if node is None or node[0] is not tensor._elem or not tensor._is_alive(node[1]):
        low, high = tensor._bounds or (-math.inf, math.inf)
        made = NumberNode(value, int, low, high)
        node = tensor._as_number = (tensor._elem, tensor._region(), made)
    return from_node(node[2])


def tolist(tensor: TracedTensor) -> Any:
    """Return `.tolist()` of a traced tensor: nested lists of traced numbers."""
    if tensor.dim() == 0:
        return item(tensor)
    return [tolist(part) for part in tensor.unbind(0)]  # type: ignore[arg-type]
