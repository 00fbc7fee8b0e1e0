"""The node behind a traced number: a 0-d jax value and what is known of it while tracing.

Bounds and linear expressions of unknown counts decide comparisons that can only go one way. Its
methods are those of torch's SymNode, which torch calls by name.
"""

import builtins
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.foundation.user_frames import is_inside
from tpuport.tracing.core.active import innermost
from tpuport.tracing.core.concretize import concrete_number, decide, raise_if
from tpuport.tracing.core.errors import port_error


def _weak(value: Any, kind: type) -> jax.Array:
    dtype = {int: jnp.int32, float: jnp.float32, bool: jnp.bool_}[kind]
    array = jnp.asarray(value)
    if array.dtype.kind != jnp.dtype(dtype).kind:
        array = array.astype(dtype)
    return array


_ATOMS = itertools.count(1)


@dataclass(frozen=True)
class Linear:
    """A linear combination of unknown integers (atoms), with integer factors.

    Equal expressions are equal numbers in every run. An atom that may be negative has a negative
    number.
    """

    const: int
    terms: tuple[tuple[int, int], ...] = ()

    def plus(self, other: "Linear", sign: int = 1) -> "Linear":
        """Return this plus `sign` times the other."""
        merged = dict(self.terms)
        for atom, factor in other.terms:
            merged[atom] = merged.get(atom, 0) + sign * factor
        kept = tuple(sorted((a, f) for a, f in merged.items() if f))
        return Linear(self.const + sign * other.const, kept)

    def times(self, factor: int) -> "Linear":
        """Return this times a known number."""
        return Linear(self.const * factor, tuple((a, f * factor) for a, f in self.terms if factor))

    def is_natural(self) -> bool:
        """Return whether this is at least 0 in every run, as far as the atoms tell."""
        return self.const >= 0 and all(a > 0 and f > 0 for a, f in self.terms)


class TracedText(str):
    """The text of a traced number: it can be shown, but not compared or taken apart."""

    def __add__(self, other: str) -> "TracedText":
        """Return a text that cannot be compared either."""
        return TracedText(str.__add__(self, other))

    def __radd__(self, other: str) -> "TracedText":
        """Return a text that cannot be compared either."""
        return TracedText(str.__add__(other, self))


def _refused_to_users(name: str) -> Callable[..., Any]:
    original = getattr(str, name)

    def method(self: TracedText, *args: Any, **kwargs: Any) -> Any:
        if is_inside(sys._getframe(1).f_code.co_filename):
            return original(self, *args, **kwargs)
        raise port_error(
            "the text of a number that depends on the program's inputs is compared or taken apart",
            code="TPU103",
            remedy="compare the number itself, or pass it as a Python number (it is then static)",
        )

    return method


for _name in (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__contains__"),
    *("__getitem__", "__iter__", "__len__", "split", "strip", "replace", "find", "index", "count"),
    *("startswith", "endswith", "isdigit", "isnumeric", "zfill", "join", "partition", "encode"),
):
    setattr(TracedText, _name, _refused_to_users(_name))


class NumberNode:
    """The node behind a traced number: a 0-d jax value, its Python type, and known bounds.

    `low` and `high` (inclusive) let comparisons that can only go one way be decided while tracing.
    """

    def __init__(
        self,
        value: Any,
        kind: type,
        low: float = -math.inf,
        high: float = math.inf,
        expr: Linear | None = None,
    ) -> None:
        self.value = _weak(value, kind)
        self.kind = kind
        if kind is int and expr is None:
            atom = next(_ATOMS)
            expr = (
                Linear(int(low))
                if low == high and abs(low) != math.inf
                else Linear(0, ((atom if low >= 0 else -atom, 1),))
            )
        if expr is not None and not expr.terms:
            low = high = expr.const
        self.low, self.high, self.expr = low, high, expr
        trace = innermost()
        if trace is not None:
            trace.created_number(self)

    is_traced = True

    # -- what torch asks of a node -----------------------------------------------------------------

    def is_int(self) -> bool:
        return self.kind is int

    def is_float(self) -> bool:
        return self.kind is float

    def is_bool(self) -> bool:
        return self.kind is bool

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return False

    def maybe_as_int(self) -> None:
        return None

    def maybe_as_float(self) -> None:
        return None

    def nested_int(self) -> None:
        return None

    constant_int = constant_bool = maybe_as_int

    def wrap_int(self, number: int) -> "NumberNode":
        return NumberNode(number, int, number, number)

    def wrap_float(self, number: float) -> "NumberNode":
        return NumberNode(number, float, number, number)

    def wrap_bool(self, flag: bool) -> "NumberNode":
        return NumberNode(flag, bool, flag, flag)

    def clone(self) -> "NumberNode":
        return self

    def str(self) -> builtins.str:
        return TracedText(f"<traced {self.kind.__name__}>")

    __str__ = __repr__ = str

    def _graph_repr(self) -> builtins.str:
        return self.str()

    def bool_(self) -> bool:
        return self.guard_bool("", 0)

    def int_(self) -> int:
        return self.guard_int("", 0)

    def guard_bool(self, file: builtins.str, line: int) -> bool:
        del file, line
        if self.low == self.high:
            return bool(self.low)
        return decide(self.value != 0)

    def guard_int(self, file: builtins.str, line: int) -> int:
        del file, line
        if self.low == self.high:
            return int(self.low)
        return concrete_number(self.value, int, self.low, self.high)

    def guard_float(self, file: builtins.str, line: int) -> float:
        del file, line
        return concrete_number(self.value, float)

    def statically_known_true(self, file: builtins.str, line: int) -> bool:
        del file, line
        return self.low == self.high and bool(self.low)

    expect_true = guard_bool
    guard_size_oblivious = guard_bool
    guard_or_false = guard_or_true = guard_bool
    expect_size = guard_bool

    # -- conversions -------------------------------------------------------------------------------

    def sym_float(self) -> "NumberNode":
        return NumberNode(self.value.astype(jnp.float32), float, self.low, self.high)

    def is_integer(self) -> "NumberNode":
        return NumberNode(self.value == jnp.floor(self.value), bool)

    def sym_int(self) -> "NumberNode":
        return NumberNode(self._whole(jnp.trunc), int, self.low, self.high)

    def _whole(self, rounding: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Round to an integer, which Python refuses for NaN and infinity."""
        if self.kind is float:
            nan, infinite = (f"cannot convert float {what} to integer" for what in _NOT_FINITE)
            raise_if(lambda: jnp.isnan(self.value), ValueError(nan))
            raise_if(lambda: jnp.isinf(self.value), OverflowError(infinite))
        return rounding(self.value).astype(jnp.int32)

    def function(self, operation: Callable[..., jax.Array], *others: "NumberNode") -> "NumberNode":
        """Return a function of this number and others, computed as floats."""
        values = [node.value.astype(jnp.float32) for node in (self, *others)]
        return NumberNode(operation(*values), float)

    def neg(self) -> "NumberNode":
        expr = self.expr.times(-1) if self.expr is not None else None
        return NumberNode(-self.value, self.kind, -self.high, -self.low, expr)

    def pos(self) -> "NumberNode":
        return self

    def abs(self) -> "NumberNode":
        high = max(abs(self.low), abs(self.high))
        return NumberNode(jnp.abs(self.value), self.kind, 0, high)

    def sym_not(self) -> "NumberNode":
        return NumberNode(jnp.logical_not(self.value), bool, 1 - self.high, 1 - self.low)

    def round(self, digits: Any = None) -> "NumberNode":
        if digits is None:
            return NumberNode(self._whole(jnp.round), int)
        return NumberNode(jnp.round(self.value, int(getattr(digits, "low", digits))), self.kind)


_NOT_FINITE = ("NaN", "infinity")


# -- operators -------------------------------------------------------------------------------------


def _compare(name: str) -> Callable[..., NumberNode]:
    operation = getattr(jnp, name)

    def method(self: NumberNode, other: NumberNode) -> NumberNode:
        low, high = _decided(name, self, other)
        return NumberNode(operation(self.value, other.value), bool, low, high)

    return method


def _decided(name: str, a: NumberNode, b: NumberNode) -> tuple[int, int]:
    """Return (low, high) of a comparison, from the bounds of its sides.

    They are equal where it can only go one way.
    """
    if a.expr is not None and a.expr == b.expr:
        same = name in ("less_equal", "greater_equal", "equal")
        return (1, 1) if same else (0, 0)
    always = {
        "less": a.high < b.low,
        "less_equal": a.high <= b.low,
        "greater": a.low > b.high,
        "greater_equal": a.low >= b.high,
        "equal": a.low == a.high == b.low == b.high,
        "not_equal": a.high < b.low or a.low > b.high,
    }[name]
    never = {
        "less": a.low >= b.high,
        "less_equal": a.low > b.high,
        "greater": a.high <= b.low,
        "greater_equal": a.high < b.low,
        "equal": a.high < b.low or a.low > b.high,
        "not_equal": a.low == a.high == b.low == b.high,
    }[name]
    return (1, 1) if always else (0, 0) if never else (0, 1)


def _corners(
    op: Callable[[float, float], float], a: NumberNode, b: NumberNode
) -> tuple[float, float]:
    values = [op(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    if any(math.isnan(v) for v in values):
        return -math.inf, math.inf
    return min(values), max(values)


_BOUNDED: dict[str, Callable[[float, float], float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "sym_min": min,
    "sym_max": max,
}


def _arithmetic(
    name: str, operation: Callable[..., Any], result: type | None
) -> Callable[..., NumberNode]:
    def method(self: NumberNode, other: NumberNode) -> NumberNode:
        kind = result or (float if float in (self.kind, other.kind) else int)
        if name in _DIVISIONS and other.low <= 0 <= other.high:
            raise_if(lambda: other.value == 0, ZeroDivisionError("division by zero"))
        if name == "float_pow":  # torch checks that the base is not negative
            message = "0.0 cannot be raised to a negative power"
            failed = (self.value == 0) & (other.value < 0)
            raise_if(failed, ZeroDivisionError(message))
        value = operation(self.value, other.value)
        bounds = _BOUNDED.get(name)
        low, high = _corners(bounds, self, other) if bounds else (-math.inf, math.inf)
        return NumberNode(value, kind, low, high, _combined(name, kind, self, other))

    return method


_DIVISIONS = {"mod", "floordiv", "int_floordiv", "truediv", "int_truediv", "float_truediv"}


def _combined(name: str, kind: type, a: NumberNode, b: NumberNode) -> Linear | None:
    if kind is not int or a.expr is None or b.expr is None:
        return None
    if name in ("add", "sub"):
        return a.expr.plus(b.expr, 1 if name == "add" else -1)
    if name == "mul" and not b.expr.terms:
        return a.expr.times(b.expr.const)
    if name == "mul" and not a.expr.terms:
        return b.expr.times(a.expr.const)
    if name in ("sym_min", "sym_max") and a.expr == b.expr:
        return a.expr
    return None


def _true_divide(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.true_divide(a, b)


for _name, _jnp in {
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
    "eq": "equal",
    "ne": "not_equal",
}.items():
    setattr(NumberNode, _name, _compare(_jnp))


for _name, _operation, _result in (
    ("add", jnp.add, None),
    ("sub", jnp.subtract, None),
    ("mul", jnp.multiply, None),
    ("mod", jnp.mod, None),
    ("floordiv", jnp.floor_divide, None),
    ("int_floordiv", jnp.floor_divide, int),
    ("truediv", _true_divide, float),
    ("int_truediv", _true_divide, float),
    ("float_truediv", _true_divide, float),
    ("pow", jnp.power, None),
    ("float_pow", jnp.power, float),
    ("pow_by_natural", jnp.power, int),
    ("sym_min", jnp.minimum, None),
    ("sym_max", jnp.maximum, None),
    ("and_", jnp.logical_and, bool),
    ("sym_and", jnp.logical_and, bool),
    ("sym_or", jnp.logical_or, bool),
    ("or_", jnp.logical_or, bool),
    ("bitwise_and", jnp.bitwise_and, None),
    ("bitwise_or", jnp.bitwise_or, None),
    ("lshift", jnp.left_shift, int),
    ("rshift", jnp.right_shift, int),
):
    setattr(NumberNode, _name, _arithmetic(_name, _operation, _result))


for _name, _operation in (
    ("floor", jnp.floor),
    ("ceil", jnp.ceil),
    ("trunc", jnp.trunc),
):
    setattr(
        NumberNode,
        _name,
        lambda self, _op=_operation: NumberNode(self._whole(_op), int),
    )


for _name in (
    "sqrt",
    "cos",
    "sin",
    "tan",
    "exp",
    "log",
    "log2",
    "tanh",
    "cosh",
    "sinh",
    "asin",
    "acos",
    "atan",
):
    _operation = getattr(
        jnp, {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}.get(_name, _name)
    )
    setattr(
        NumberNode,
        f"sym_{_name}",
        lambda self, _op=_operation: NumberNode(_op(self.value.astype(jnp.float32)), float),
    )
