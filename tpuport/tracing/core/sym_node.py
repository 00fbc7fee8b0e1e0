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
import numpy as np
from jax import lax

from tpuport.foundation.user_frames import is_inside, user_line
from tpuport.tracing.core import int64
from tpuport.tracing.core.active import innermost
from tpuport.tracing.core.concretize import concrete_number, decide, raise_if, text_is_looked_at
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.python_numbers import (
    DIGITS,
    ESTIMATES,
    EXACT,
    INT_DIGITS,
    SPANS,
    beyond_int64,
    bounds_of,
    clipped,
    floor_divide,
    inexact,
    left_shift,
    modulo,
    multiply,
    right_shift,
    rounded,
    rounded_int,
)


def _held(value: Any, kind: type) -> jax.Array:
    """Return a number as an array that holds it exactly, of 32 bits if that can be seen."""
    with int64.scope():
        array = jnp.asarray(value)
        if kind is bool:
            return array if array.dtype == jnp.bool_ else array != 0
        if kind is int:
            keeps = array.dtype == jnp.int64 and not (
                isinstance(value, int) and int64.is_within((value, value), int64.INT32)
            )
            return array.astype(jnp.int64 if keeps or array.dtype == jnp.uint32 else jnp.int32)
        if not isinstance(value, jax.Array):
            exact = not math.isfinite(value) or (
                abs(value) < _FLOAT32_MAX and float(np.float32(value)) == value
            )
            return jnp.asarray(value, jnp.float32 if exact else jnp.float64)
        return array.astype(jnp.float64 if array.dtype == jnp.float64 else jnp.float32)


_FLOAT32_MAX = float(np.finfo(np.float32).max)
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
    """The text of a traced tensor or number: it can be shown, but not compared or taken apart."""

    def __new__(cls, text: str) -> "TracedText":
        """Note the line: the text may become part of a longer one, which is a plain `str`."""
        trace = innermost()
        if trace is not None:
            trace.recorder.text = user_line()
        return str.__new__(cls, text)

    def __add__(self, other: str) -> "TracedText":
        """Return a text that cannot be compared either."""
        return TracedText(str.__add__(self, other))

    def __radd__(self, other: str) -> "TracedText":
        """Return a text that cannot be compared either."""
        return TracedText(str.__add__(other, self))


# As a `__repr__` of the user's shapes the text of torch's own.
_GIVES_TEXT = {"replace", "strip", "zfill", "join"}


def _refused_to_users(name: str) -> Callable[..., Any]:
    original = getattr(str, name)

    def method(self: TracedText, *args: Any, **kwargs: Any) -> Any:
        if is_inside(sys._getframe(1).f_code.co_filename):
            return original(self, *args, **kwargs)
        if name in _GIVES_TEXT:
            return TracedText(original(self, *args, **kwargs))
        raise port_error(
            "the text of a tensor or number that depends on the program's inputs is compared or"
            " taken apart",
            code="TPU103",
            remedy="compare the value itself, or pass it as a Python number (it is then static)",
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

    `held` has the exact value, in 32 bits where that is enough and in 64 where not; `value` is for
    operations on tensors and has 32. `low` and `high` (inclusive) let comparisons that can only go
    one way be decided while tracing. `span` is what `held` can be: it is never infinite.
    `is_numpy` says that eager has a scalar of numpy: it divides by zero, and makes tensors of its
    64 bits.
    """

    is_numpy = False

    def __init__(
        self,
        value: Any,
        kind: type,
        low: float = -math.inf,
        high: float = math.inf,
        expr: Linear | None = None,
        span: int64.Span = int64.INT64,
    ) -> None:
        self.held = _held(value, kind)
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
        elif expr is not None and Linear(0, expr.terms).is_natural():
            low = max(low, expr.const)
        self.low, self.high, self.expr = low, high, expr
        self.span = self._spanned(span)
        if self.held.dtype == jnp.int64 and int64.is_within(self.span, int64.INT32):
            self.held = lax.convert_element_type(self.held, jnp.int32)
        self._narrow: tuple[int, jax.Array, jax.Array] | None = None
        trace = innermost()
        if trace is not None:
            trace.created_number(self)

    def _spanned(self, span: int64.Span) -> int64.Span:
        limits = int64.INT64 if self.held.dtype == jnp.int64 else int64.INT32
        low, high = clipped(span, limits)
        if math.isfinite(self.low):
            low = max(low, math.floor(self.low))
        if math.isfinite(self.high):
            high = min(high, math.ceil(self.high))
        return low, high

    @property
    def value(self) -> jax.Array:
        """Return the value in 32 bits, for operations on tensors.

        A float is rounded as torch rounds it. If an integer does not fit, the call raises.
        """
        if not int64.is_wide(self.held):
            return self.held
        trace = innermost()
        regions = [0] if trace is None else trace.regions
        if self._narrow is not None:
            region, held, narrow = self._narrow
            if held is self.held and region in regions:
                return narrow
        if self.kind is int:
            narrow = int64.narrowed(self.held, self.span)
        else:
            narrow = lax.convert_element_type(self.held, jnp.float32)
        self._narrow = (regions[-1], self.held, narrow)
        return narrow

    def exact(self) -> jax.Array:
        """Return the value in the 64 bits that Python has, for use inside of `int64.scope()`."""
        if self.kind is bool:
            return self.held
        return self.held.astype(jnp.int64 if self.kind is int else jnp.float64)

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
        if not int64.is_within((number, number), int64.INT64):
            raise port_error(
                f"{number} meets a number that depends on the program's inputs, for which a"
                " program has 64 bits",
                code="TPU106",
                remedy="keep integers below 2**63",
            )
        return NumberNode(number, int, number, number)

    def wrap_float(self, number: float) -> "NumberNode":
        return NumberNode(number, float, number, number)

    def wrap_bool(self, flag: bool) -> "NumberNode":
        return NumberNode(flag, bool, flag, flag)

    def clone(self) -> "NumberNode":
        return self

    def str(self) -> builtins.str:
        if text_is_looked_at():
            return builtins.str(self._known_value())
        return TracedText(f"<traced {self.kind.__name__}>")

    __str__ = __repr__ = str

    def format(self, spec: builtins.str) -> builtins.str:
        """Return what a formatted string shows of the number."""
        return format(self._known_value(), spec) if text_is_looked_at() else self.str()

    def _known_value(self) -> Any:
        """Return the number, whose value Python needs."""
        guards = {bool: self.guard_bool, int: self.guard_int, float: self.guard_float}
        return guards[self.kind]("", 0)

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
        with int64.scope():
            truth = self.held != 0
        return decide(truth)

    def guard_int(self, file: builtins.str, line: int) -> int:
        del file, line
        if self.low == self.high:
            return int(self.low)
        return concrete_number(self.held, int, self.low, self.high)

    def guard_float(self, file: builtins.str, line: int) -> float:
        del file, line
        return concrete_number(self.held, float)

    def statically_known_true(self, file: builtins.str, line: int) -> bool:
        del file, line
        return self.low == self.high and bool(self.low)

    expect_true = guard_bool
    guard_size_oblivious = guard_bool
    guard_or_false = guard_or_true = guard_bool
    expect_size = guard_bool

    # -- conversions -------------------------------------------------------------------------------

    def sym_float(self) -> "NumberNode":
        if self.kind is float:
            return self
        with int64.scope():
            value = self.exact().astype(jnp.float64)
        self._refuse_inexact()
        return NumberNode(value, float, self.low, self.high)

    def _refuse_inexact(self) -> None:
        if self.kind is int and not int64.is_within(self.span, (-EXACT, EXACT)):
            message = "an int beyond 2**53 meets a float, which Python rounds or compares exactly"
            int64.refuse_if(lambda: inexact(self.exact()), message)

    def is_integer(self) -> "NumberNode":
        with int64.scope():
            return NumberNode(self.held == jnp.floor(self.held), bool)

    def sym_int(self) -> "NumberNode":
        low, high = (math.trunc(b) if math.isfinite(b) else b for b in (self.low, self.high))
        return self._whole(jnp.trunc, low, high)

    def _whole(
        self,
        rounding: Callable[[jax.Array], jax.Array],
        low: float = -math.inf,
        high: float = math.inf,
    ) -> "NumberNode":
        """Round to an integer, which Python refuses for NaN and infinity."""
        if self.kind is not float:
            return self if self.kind is int else NumberNode(self.held, int, self.low, self.high)
        nan, infinite = (f"cannot convert float {what} to integer" for what in _NOT_FINITE)
        raise_in_64(lambda: self.held != self.held, ValueError(nan))
        raise_in_64(lambda: jnp.abs(self.held) == math.inf, OverflowError(infinite))
        with int64.scope():
            whole = rounding(self.exact())
            value = whole.astype(jnp.int64)
        int64.refuse_if(lambda: beyond_int64(whole), _BEYOND)
        return NumberNode(value, int, low, high)

    def function(self, operation: Callable[..., jax.Array], *others: "NumberNode") -> "NumberNode":
        """Return a function of this number and others, computed as Python's floats."""
        with int64.scope():
            values = [node.sym_float().exact() for node in (self, *others)]
            return NumberNode(operation(*values), float)

    def neg(self) -> "NumberNode":
        expr = self.expr.times(-1) if self.expr is not None else None
        span = (-self.span[1], -self.span[0])
        return self._same_kind(jnp.negative, span, -self.high, -self.low, expr)

    def pos(self) -> "NumberNode":
        return self

    def abs(self) -> "NumberNode":
        high = max(abs(self.low), abs(self.high))
        largest = max(abs(bound) for bound in self.span)
        return self._same_kind(jnp.abs, (0, largest), 0, high)

    def _same_kind(
        self,
        operation: Callable[[jax.Array], jax.Array],
        span: int64.Span,
        low: float,
        high: float,
        expr: Linear | None = None,
    ) -> "NumberNode":
        """Change the sign or drop it, which is exact unless the integer has no counterpart."""
        kind = float if self.kind is float else int
        with int64.scope():
            if kind is int and not int64.is_within(span, int64.INT32):
                int64.refuse_if(lambda: self.exact() == int64.INT64[0], _BEYOND)
                value = operation(self.exact())
            else:
                value = operation(self.held.astype(jnp.int32) if kind is int else self.held)
        made = NumberNode(value, kind, low, high, expr, span)
        made.is_numpy = self.is_numpy
        return made

    def sym_not(self) -> "NumberNode":
        return NumberNode(jnp.logical_not(self.held), bool, 1 - self.high, 1 - self.low)

    def round(self, digits: Any = None) -> "NumberNode":
        if digits is None:
            return self._whole(jnp.round)
        digits = int(digits)
        if self.kind is not float and digits >= 0:
            return self._whole(jnp.round)
        if digits not in (DIGITS if self.kind is float else INT_DIGITS):
            raise port_error(
                f"round(..., {digits}) of a number that depends on the program's inputs",
                code="TPU106",
                remedy="round to fewer digits, or scale the number first",
            )
        with int64.scope():
            number = self.exact()
            if self.kind is float:
                if digits < 0:
                    int64.refuse_if(lambda: jnp.abs(number) > EXACT, _BEYOND)
                return NumberNode(rounded(number, digits), float)
            int64.refuse_if(lambda: beyond_int64(jnp.abs(number) + 1e18), _BEYOND)
            return NumberNode(rounded_int(number, digits), int)


_NOT_FINITE = ("NaN", "infinity")
_BEYOND = "a Python int leaves the 64 bits that a program has for it"


# -- operators -------------------------------------------------------------------------------------


def _compare(name: str) -> Callable[..., NumberNode]:
    operation = getattr(jnp, name)

    def method(self: NumberNode, other: NumberNode) -> NumberNode:
        low, high = _decided(name, self, other)
        a, b = self.held, other.held
        with int64.scope():
            if a.dtype != b.dtype:
                a, b = _alike(self, other)
            return NumberNode(operation(a, b), bool, low, high)

    return method


def _alike(a: NumberNode, b: NumberNode, kind: type | None = None) -> tuple[jax.Array, jax.Array]:
    """Return both values in the 64 bits of `kind`, of the wider kind by default."""
    if (kind or (float if float in (a.kind, b.kind) else int)) is not float:
        return a.exact().astype(jnp.int64), b.exact().astype(jnp.int64)
    a._refuse_inexact()
    b._refuse_inexact()
    return a.exact().astype(jnp.float64), b.exact().astype(jnp.float64)


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


def _arithmetic(
    name: str, operation: Callable[..., Any], result: type | None
) -> Callable[..., NumberNode]:
    def method(self: NumberNode, other: NumberNode) -> NumberNode:
        kind = float if float in (self.kind, other.kind) else int
        if kind is float and name in _INTEGERS_ONLY:
            raise TypeError(f"unsupported operand types for {name}: 'int' and 'float'")
        kind = result or kind
        is_numpy = self.is_numpy or other.is_numpy
        if not is_numpy or kind is not float:
            _refuse_operands(name, self, other)
        span = SPANS[name](self.span, other.span) if kind is int else int64.INT64
        held = (self.held, other.held)
        with int64.scope():
            is_narrow = int64.is_within(span, int64.INT32) and not any(map(_is_long, held))
            if kind is int and is_narrow:
                value = operation(*(array.astype(jnp.int32) for array in held))
            elif kind is bool:
                value = operation(*held)
            else:
                a, b = _alike(self, other, kind)
                # XLA would divide by a constant with its reciprocal, and merge constant factors.
                a, b = lax.optimization_barrier((a, b)) if kind is float else (a, b)
                value = operation(a, b)
                if kind is int and not int64.is_within(span, int64.INT64):
                    _refuse_beyond(name, a, b)
        if name == "float_pow" and not is_numpy:
            _refuse_power(self, other, value)
        bounds = (self.low, self.high), (other.low, other.high)
        low, high = bounds_of(name, kind, *bounds)
        made = NumberNode(value, kind, low, high, _combined(name, kind, self, other), span)
        made.is_numpy = is_numpy
        return made

    return method


def _is_long(array: jax.Array) -> bool:
    return array.dtype == jnp.int64


_INTEGERS_ONLY = {"lshift", "rshift", "bitwise_and", "bitwise_or", "bitwise_xor"}


def raise_in_64(failed: Callable[[], jax.Array], error: BaseException) -> None:
    """Raise an error of eager PyTorch at the call where `failed`, computed in 64 bits, holds."""

    def scoped() -> jax.Array:
        with int64.scope():
            return failed()

    raise_if(scoped, error)


def _refuse_operands(name: str, a: NumberNode, b: NumberNode) -> None:
    """Raise what Python raises for the operands of an operation."""
    if name in _DIVISIONS and b.low <= 0 <= b.high:
        raise_in_64(lambda: b.held == 0, ZeroDivisionError("division by zero"))
    if name in ("lshift", "rshift") and b.low < 0:
        raise_in_64(lambda: b.held < 0, ValueError("negative shift count"))
    if name == "float_pow":
        message = "0.0 cannot be raised to a negative power"
        raise_in_64(lambda: (a.held == 0) & (b.held < 0), ZeroDivisionError(message))


def _refuse_power(a: NumberNode, b: NumberNode, value: jax.Array) -> None:
    """Raise for a power that is not finite, as Python does, or complex."""

    def finite() -> jax.Array:
        return (jnp.abs(a.held) < math.inf) & (jnp.abs(b.held) < math.inf)

    remedy = "take the power of abs(...), or an integer exponent"
    message = "a power that Python makes complex"
    int64.refuse_if(lambda: finite() & jnp.isnan(value), message, remedy)
    error = OverflowError(34, "Numerical result out of range")
    raise_in_64(lambda: finite() & (a.held != 0) & (jnp.abs(value) == math.inf), error)


def _refuse_beyond(name: str, a: jax.Array, b: jax.Array) -> None:
    wide = (a.astype(jnp.float64), b.astype(jnp.float64))
    failed = beyond_int64(ESTIMATES[name](*wide))
    if name in ("floordiv", "int_floordiv"):
        failed &= b != 0
    int64.refuse_if(lambda: failed, _BEYOND)


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
    ("mul", multiply, None),
    ("mod", modulo, None),
    ("floordiv", floor_divide, None),
    ("int_floordiv", floor_divide, int),
    ("truediv", jnp.true_divide, float),
    ("int_truediv", jnp.true_divide, float),
    ("float_truediv", jnp.true_divide, float),
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
    ("bitwise_xor", jnp.bitwise_xor, None),
    ("lshift", left_shift, int),
    ("rshift", right_shift, int),
):
    setattr(NumberNode, _name, _arithmetic(_name, _operation, _result))


for _name, _operation, _exact in (
    ("floor", jnp.floor, math.floor),
    ("ceil", jnp.ceil, math.ceil),
    ("trunc", jnp.trunc, math.trunc),
):

    def _method(
        self: NumberNode,
        _operation: Callable[..., jax.Array] = _operation,
        _exact: Callable[[float], int] = _exact,
    ) -> NumberNode:
        bounds = (_exact(b) if math.isfinite(b) else b for b in (self.low, self.high))
        return self._whole(_operation, *bounds)

    setattr(NumberNode, _name, _method)


for _name in (
    *("sqrt", "cos", "sin", "tan", "exp", "log", "log2", "tanh", "cosh", "sinh"),
    *("asin", "acos", "atan"),
):
    _operation = getattr(
        jnp, {"asin": "arcsin", "acos": "arccos", "atan": "arctan"}.get(_name, _name)
    )
    setattr(NumberNode, f"sym_{_name}", lambda self, _op=_operation: self.function(_op))
