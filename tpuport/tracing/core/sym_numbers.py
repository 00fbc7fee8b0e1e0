"""Traced Python numbers: results of `.item()` and `int(...)`, and sizes that depend on data.

They are torch's own symbolic numbers (`torch.SymInt`, `SymFloat`, `SymBool`) around a node that
holds a 0-d jax value, so torch's argument parser takes them wherever it takes a Python number. A
comparison gives a `SymBool`, whose truth is a branch on a traced value.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.fx.experimental import sym_node as _sym_node  # noqa: F401  (gives SymInt and SymFloat their operators)

from tpuport.tracing.core import int64
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.sym_node import NumberNode

# The dtypes of Python numbers that a program takes, gives and carries.
DTYPES = {float: jnp.float64, int: jnp.int64, bool: jnp.bool_}
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
    """Return the 0-d jax value of a traced number in 32 bits, for operations on tensors."""
    return _node(number).value


def held(number: Any) -> jax.Array:
    """Return the 0-d jax value of a traced number: an int in as many bits as it may need."""
    node = _node(number)
    return node.held if node.kind is int else node.value


def exact_value(number: Any) -> jax.Array:
    """Return the 0-d jax value of a Python number, traced or not, in the 64 bits that it has."""
    with int64.scope():
        if isinstance(number, SYMBOLIC):
            return _node(number).exact()
        return jnp.asarray(number, DTYPES[type(number)])


def truth(number: Any) -> jax.Array:
    """Return the truth of a traced number as a 0-d boolean jax value."""
    with int64.scope():
        return _node(number).held != 0


def _node(number: Any) -> NumberNode:
    node = number.node
    if isinstance(node, NumberNode):
        return node
    raise port_error(
        "a symbolic number of torch.export or torch.compile met a traced program",
        code="TPU106",
        remedy="convert the model itself, not its exported or compiled form",
    )


def as_python(number: Any) -> Any:
    """Return a traced float that eager has as one of numpy's as one of Python's."""
    node = getattr(number, "node", None)
    if not isinstance(node, NumberNode) or not node.is_numpy:
        return number
    return from_node(NumberNode(node.held, node.kind, node.low, node.high, node.expr, node.span))


def placeholder(number: Any) -> Any:
    """Return a Python number to use for a traced one where only dtypes and shapes matter."""
    return {torch.SymInt: 1, torch.SymFloat: 1.5, torch.SymBool: True}[type(number)]
