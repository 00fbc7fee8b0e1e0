"""Operators of traced Python numbers that torch's symbolic numbers have otherwise than Python."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.tracing.core import int64, sym_numbers
from tpuport.tracing.core.sym_node import NumberNode

Operator = Callable[..., Any]


class NumberOperators(Shim):
    """`/`, `//`, `**`, `divmod`, `round` and formats of numbers that depend on the inputs."""

    TARGET = "torch.SymFloat"
    REASON = (
        "torch has no divmod, rounds quotients, and refuses a power of a negative number and"
        " formats like `:.2f`"
    )

    def replacements(self) -> list[Replacement]:
        return [
            Replacement(kind, name, _traced(getattr(kind, name, None), operator))
            for kind in (torch.SymInt, torch.SymFloat)
            for name, operator in _OPERATORS.items()
            if name != "__round__" or kind is torch.SymInt
        ] + [
            Replacement(kind, "__format__", _traced(kind.__format__, _formatted))
            for kind in sym_numbers.SYMBOLIC
        ]


def _traced(original: Operator | None, operator: Operator) -> Operator:
    def method(self: Any, *args: Any) -> Any:
        if isinstance(self.node, NumberNode):
            return operator(self, *args)
        return NotImplemented if original is None else original(self, *args)

    return method


def _nodes(*numbers: Any) -> list[Any] | None:
    """Return the nodes of numbers, all floats if one is; None if one is no number."""
    if not all(isinstance(n, (bool, int, float, *sym_numbers.SYMBOLIC)) for n in numbers):
        return None
    nodes = [n.node if isinstance(n, sym_numbers.SYMBOLIC) else _constant(n) for n in numbers]
    if any(node.kind is float for node in nodes):
        return [node if node.kind is float else node.sym_float() for node in nodes]
    return nodes


def _constant(number: Any) -> NumberNode:
    kind = float if isinstance(number, float) else int
    made = NumberNode(kind(number), kind, number, number)
    made.is_numpy = isinstance(number, np.generic)
    return made


def _floor(a: Any, b: Any) -> Any:
    nodes = _nodes(a, b)
    return NotImplemented if nodes is None else _run("floordiv", *nodes)


def _divided(a: Any, b: Any) -> Any:
    nodes = _nodes(a, b)
    return NotImplemented if nodes is None else (_run("floordiv", *nodes), _run("mod", *nodes))


def _power(a: Any, b: Any) -> Any:
    nodes = _nodes(a, b)
    if nodes is None:
        return NotImplemented
    base, exponent = nodes
    if exponent.kind is float:
        return _run("float_pow", base, exponent)
    if exponent.high < 0:
        return _run("float_pow", base.sym_float(), exponent.sym_float())
    if exponent.low < 0:
        message = "an int to a power below 0, which depends on the program's inputs, is a float"
        remedy = "give it a float base: float(base) ** exponent"
        int64.refuse_if(lambda: exponent.exact() < 0, message, remedy)
    return _run("pow_by_natural", base, exponent)


def _run(name: str, a: Any, b: Any) -> Any:
    return sym_numbers.from_node(getattr(a, name)(b))


def _quotient(a: Any, b: Any) -> Any:
    nodes = _nodes(a, b)
    return NotImplemented if nodes is None else _run("truediv", *nodes)


def _round(number: Any, digits: Any = None) -> Any:
    return sym_numbers.from_node(number.node.round(digits))


def _formatted(number: Any, spec: str) -> str:
    return number.node.format(spec)


def _reflected(operator: Operator) -> Operator:
    return lambda a, b: operator(b, a)


_OPERATORS: dict[str, Operator] = {
    "__floordiv__": _floor,
    "__rfloordiv__": _reflected(_floor),
    "__truediv__": _quotient,
    "__rtruediv__": _reflected(_quotient),
    "__divmod__": _divided,
    "__rdivmod__": _reflected(_divided),
    "__pow__": _power,
    "__rpow__": _reflected(_power),
    "__round__": _round,
}
