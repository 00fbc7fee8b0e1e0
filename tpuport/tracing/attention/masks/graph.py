"""The graph of operations behind a traced array.

A tracer of `jax.jit` knows the equation that made it (`parent`), and a tracer that a nested trace
(checkpoint, scan) closes over knows its value outside (`get_const`). Neither is public API of jax.
If they are missing, the array itself is the graph, and only the structure is lost.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from tpuport.tracing.core import int64

# Calls whose body is read as if it were inlined.
_BODIES = {
    **{"jit": "jaxpr", "pjit": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr"},
    **{"closed_call": "call_jaxpr", "core_call": "call_jaxpr"},
}
# Calls that define a derivative, which reading the body ignores.
_WITH_RULE = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}

Made = tuple[Any, Any, "tuple[Node, ...]"]


class Node:
    """One array of the graph; how it is computed is looked up on first use.

    Attributes:
        shape: The shape.
        dtype: The dtype.
        value: The array or tracer, if one exists (none does inside the body of a call).
        short: The same array in a short form, once one was looked for.
    """

    short: "Node | None"

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        value: Any = None,
        make: Callable[[], Made] | None = None,
    ) -> None:
        self.shape, self.dtype, self.value = shape, dtype, value
        self._make = make
        self._made: Made = (None, None, ())

    def _get(self) -> Made:
        if self._make is not None:
            make, self._make = self._make, None
            self._made = make()
        return self._made

    @property
    def op(self) -> Any:
        """Return the primitive that computes it, or None for a leaf."""
        return self._get()[0]

    @property
    def name(self) -> str:
        """Return the primitive's name, or "" for a leaf."""
        return "" if self.op is None else self.op.name

    @property
    def params(self) -> Any:
        """Return the primitive's parameters."""
        return self._get()[1]

    @property
    def inputs(self) -> "tuple[Node, ...]":
        """Return the nodes that it is computed from."""
        return self._get()[2]

    def cut(self) -> "Node":
        """Make this node a leaf, however it was computed."""
        self._make, self._made = None, (None, None, ())
        return self

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def is_bool(self) -> bool:
        """Return whether the elements are booleans."""
        return self.dtype == np.bool_

    def over(self, *inputs: "Node", dtype: Any = None) -> "Node":
        """Return a node of the same operation on other inputs of the same result shape."""
        op, params, _ = self._get()
        made = (op, params, inputs)
        return Node(self.shape, self.dtype if dtype is None else dtype, None, lambda: made)


def computed(op: Any, params: Any, inputs: tuple[Node, ...], aval: Any) -> Node:
    """Return a node of one operation."""
    made = (op, params, inputs)
    return Node(tuple(aval.shape), aval.dtype, None, lambda: made)


def leaf(value: Any) -> Node:
    """Return a node for an array whose origin is not looked at."""
    # The literal of a program has the dtype that it says, also where jax would make 32 bits of it.
    exact = isinstance(value, (np.ndarray, np.generic))
    with int64.scope() if exact else contextlib.nullcontext():
        aval = jax.typeof(value)
    return Node(tuple(aval.shape), aval.dtype, value)


class Graph:
    """The nodes for the tracers of one mask, each made once.

    Args:
        frozen: Whether no gradient flows into the mask, so that the body of a function with its own
            derivative may be read.
        closed: The name of calls whose floating results become leaves.
    """

    def __init__(self, *, frozen: bool, closed: str | None = None) -> None:
        self._bodies = _BODIES | _WITH_RULE if frozen else _BODIES
        self._closed = closed
        self._known: dict[int, tuple[Any, Node]] = {}

    def of(self, value: Any) -> Node:
        """Return the node of an array or tracer, with the graph behind it."""
        value = _outside(value)
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        node = leaf(value)
        equation = getattr(value, "parent", None)
        if equation is not None:
            node._make = lambda: self._made(value, equation)
        self._known[id(value)] = (value, node)
        return node

    def _made(self, value: Any, equation: Any) -> Made:
        if self._closed is not None and equation.params.get("name") == self._closed:
            if jnp.issubdtype(value.dtype, jnp.floating):
                return None, None, ()
        index = next((i for i, v in enumerate(equation.outvars) if v is value.val), None)
        body = self._body(equation)
        if body is not None and index is not None:
            inputs = [self.of(x) for x in equation.in_tracers]
            return self._inlined(body, inputs)[index]._get()
        if len(equation.outvars) != 1:
            return None, None, ()
        inputs = tuple(self.of(x) for x in equation.in_tracers)
        return equation.primitive, equation.params, inputs

    def _body(self, equation: Any) -> Any:
        """Return the body of a call that can be inlined, or None."""
        key = self._bodies.get(equation.primitive.name)
        body = None if key is None else equation.params.get(key)
        return body if body is not None and self._is_plain(body) else None

    def _is_plain(self, body: Any) -> bool:
        jaxpr = getattr(body, "jaxpr", body)
        # An output that is an input or a constant has no equation to make a node of.
        inside = {v for eqn in jaxpr.eqns for v in eqn.outvars}
        return all(v in inside for v in jaxpr.outvars if not hasattr(v, "val")) and all(
            len(eqn.outvars) == 1 or self._body(eqn) is not None for eqn in jaxpr.eqns
        )

    def _inlined(self, body: Any, inputs: list[Node]) -> list[Node]:
        """Return the nodes of a call's outputs, from the nodes of its operands."""
        jaxpr = getattr(body, "jaxpr", body)
        values = [leaf(const) for const in getattr(body, "consts", ())]
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*values, *inputs), strict=True))

        def read(atom: Any) -> Node:
            return leaf(atom.val) if hasattr(atom, "val") else known[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            inner = self._body(equation)
            if inner is not None:
                known.update(zip(equation.outvars, self._inlined(inner, operands), strict=True))
                continue
            out = equation.outvars[0]
            made = equation.primitive, equation.params, tuple(operands)
            known[out] = computed(*made, out.aval)
        return [read(atom) for atom in jaxpr.outvars]


def _outside(value: Any) -> Any:
    """Return the outer value of a tracer: a literal, or what a nested trace closes over."""
    while isinstance(value, jax.core.Tracer) and getattr(value, "parent", None) is None:
        find = getattr(value, "get_const", None)
        found = None if find is None else find()
        if found is None:
            return value
        value = found
    return value
