"""Python's arithmetic on 0-d arrays of 64 bits: its rounding, its signs, its errors.

Every function here is called inside of `int64.scope()`, with int64 or float64 arrays.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpuport.tracing.core.int64 import INT64, Span

# Integers and powers of ten up to these are exact in float64.
EXACT = 2**53
# The digits that `rounded` and `rounded_int` take: larger powers of ten are not exact.
DIGITS = range(-22, 23)
INT_DIGITS = range(-18, 0)
# Estimates in float64 of results beyond this may be beyond int64 (TPUs have 49 of the 53 bits).
_LIMIT = 2.0**63 * (1 - 2.0**-40)


def beyond_int64(estimate: jax.Array) -> jax.Array:
    """Return whether a result that is estimated in float64 may need more than 64 bits."""
    return ~(jnp.abs(estimate) < _LIMIT)


def inexact(number: jax.Array) -> jax.Array:
    """Return whether an integer may have no equal float64."""
    return jnp.abs(number) > EXACT


def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a * b, rounded before anything is added: the compiler would fuse the two."""
    product = jnp.multiply(a, b)
    return product if _is_int(a) else jnp.where(a != a, a, product)


def modulo(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a % b with the sign of b, also of a zero."""
    result = jnp.mod(a, b)
    return result if _is_int(a) else jnp.where(result == 0, jnp.copysign(0.0, b), result)


def floor_divide(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a // b: of floats from the remainder, which is exact, as CPython does."""
    if _is_int(a):
        return jnp.floor_divide(a, b)
    quotient = (a - modulo(a, b)) / b
    rounded = jnp.floor(quotient)
    rounded = jnp.where(quotient - rounded > 0.5, rounded + 1, rounded)
    return jnp.where(quotient == 0, jnp.copysign(0.0, a / b), rounded)


def left_shift(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a << b."""
    return jnp.left_shift(a, jnp.clip(b, 0, 63))


def right_shift(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a >> b; all bits of a long shift are those of the sign."""
    return jnp.right_shift(a, jnp.clip(b, 0, 63))


def rounded(x: jax.Array, digits: int) -> jax.Array:
    """Return round(x, digits) of a float64, half to even by its exact value as CPython does."""
    if digits < 0:
        return _rounded_tens(x, digits)
    # The compiler would multiply by the reciprocal of a constant that it sees.
    power = lax.optimization_barrier(jnp.asarray(10.0**digits, jnp.float64))
    product = multiply(x, power)
    near = jnp.round(product)
    # The product was rounded itself: where it looks like a tie, its error decides.
    tie = jnp.abs(product - near) == 0.5
    error = _product_error(x, power, product)
    near = jnp.where(tie & (error > 0), jnp.ceil(product), near)
    near = jnp.where(tie & (error < 0), jnp.floor(product), near)
    return jnp.where(jnp.abs(product) < EXACT, jnp.copysign(near / power, x), x)


def _product_error(x: jax.Array, y: jax.Array, product: jax.Array) -> jax.Array:
    """Return x * y - product, by halves whose products are exact."""
    head, tail = _halves(x)
    top, bottom = _halves(y)
    return ((head * top - product) + head * bottom + tail * top) + tail * bottom


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    head = x.astype(jnp.float32).astype(jnp.float64)
    return head, x - head


def _rounded_tens(x: jax.Array, digits: int) -> jax.Array:
    unit = 10.0**-digits
    rest = jnp.mod(jnp.abs(x), unit)
    low = jnp.abs(x) - rest
    is_odd = jnp.mod(low, 2 * unit) != 0
    up = (rest > unit / 2) | ((rest == unit / 2) & is_odd)
    return jnp.copysign(jnp.where(up, low + unit, low), x)


def rounded_int(n: jax.Array, digits: int) -> jax.Array:
    """Return round(n, digits) of an int64 for negative digits, half to even."""
    unit = 10**-digits
    rest = jnp.mod(n, unit)
    low = n - rest
    is_odd = jnp.mod(jnp.floor_divide(low, unit), 2) != 0
    up = (2 * rest > unit) | ((2 * rest == unit) & is_odd)
    return jnp.where(up, low + unit, low)


def _is_int(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.integer)


# -- spans of integers -----------------------------------------------------------------------------


def _corners(op: Callable[[int, int], int]) -> Callable[[Span, Span], Span]:
    def span(a: Span, b: Span) -> Span:
        values = [op(x, y) for x in a for y in b]
        return min(values), max(values)

    return span


def _magnitude(span: Span) -> int:
    return max(abs(span[0]), abs(span[1]))


def _mod_span(a: Span, b: Span) -> Span:
    low, high = min(0, b[0] + 1), max(0, b[1] - 1)
    return (low, min(high, a[1])) if a[0] >= 0 and b[0] > 0 else (low, high)


def _floor_span(a: Span, b: Span) -> Span:
    if b[0] <= 0 <= b[1]:
        return -_magnitude(a), _magnitude(a)
    return _corners(lambda x, y: x // y)(a, b)


def _and_span(a: Span, b: Span) -> Span:
    least = [s[1] for s in (a, b) if s[0] >= 0]
    return (0, min(least)) if least else _bits_span(a, b)


def _bits_span(a: Span, b: Span) -> Span:
    bits = max((value if value >= 0 else ~value).bit_length() for value in (*a, *b))
    return (0 if min(a[0], b[0]) >= 0 else -(1 << bits)), (1 << bits) - 1


def _shift_span(a: Span, b: Span) -> Span:
    shift = max(min(b[1], 64), 0)
    return min(a[0], a[0] << shift), max(a[1], a[1] << shift)


def _power_span(a: Span, b: Span) -> Span:
    if b[0] < 0 or b[1] > 64:
        return -(1 << 64), 1 << 64
    largest = max(_magnitude(a) ** b[1], 1)
    return (0 if a[0] >= 0 else -largest), largest


# The span of each operation's result, from those of its operands. A span may be beyond int64.
SPANS: dict[str, Callable[[Span, Span], Span]] = {
    "add": _corners(lambda x, y: x + y),
    "sub": _corners(lambda x, y: x - y),
    "mul": _corners(lambda x, y: x * y),
    "mod": _mod_span,
    "floordiv": _floor_span,
    "int_floordiv": _floor_span,
    "sym_min": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "sym_max": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "bitwise_and": _and_span,
    "bitwise_or": _bits_span,
    "bitwise_xor": _bits_span,
    "lshift": _shift_span,
    "rshift": lambda a, b: (min(a[0], 0), max(a[1], 0)),
    "pow": _power_span,
    "pow_by_natural": _power_span,
}

# How to estimate a result in float64, where its span is beyond int64.
ESTIMATES: dict[str, Callable[[Any, Any], Any]] = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "floordiv": jnp.divide,
    "int_floordiv": jnp.divide,
    "lshift": lambda a, b: a * jnp.exp2(b),
    "pow": jnp.power,
    "pow_by_natural": jnp.power,
}


def clipped(span: Span, limits: Span = INT64) -> Span:
    """Return the part of a span that is within limits."""
    return max(min(span[0], limits[1]), limits[0]), min(max(span[1], limits[0]), limits[1])


# -- bounds of numbers -----------------------------------------------------------------------------

_BOUNDED: dict[str, Callable[[float, float], float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "sym_min": min,
    "sym_max": max,
}
Bounds = tuple[float, float]


def bounds_of(name: str, kind: type, a: Bounds, b: Bounds) -> Bounds:
    """Return (low, high) of the result of an operation, infinite if it is not known.

    Args:
        name: The operation, as torch names it.
        kind: The type of the result.
        a: The bounds of the left side.
        b: The bounds of the right side.
    """
    operation = _BOUNDED.get(name)
    if kind is int and b[0] > 0 and name == "mod":
        return 0, b[1] - 1
    if kind is int and b[0] > 0 and name in ("floordiv", "int_floordiv"):
        operation = _floored
    values = [operation(x, y) for x in a for y in b] if operation else [math.nan]
    if any(math.isnan(v) for v in values):
        return -math.inf, math.inf
    return min(values), max(values)


def _floored(x: float, y: float) -> float:
    return x // y if math.isfinite(x) else x
