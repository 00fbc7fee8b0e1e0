"""Recognizes traced values that are computed alike from the same values."""

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

# A longer computation is not followed to its beginning.
_MOST_STEPS = 64


class _ItselfOnly:
    """A value that equals itself only; holding it keeps its identity from being used again."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ItselfOnly) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def recipe(value: jax.Array) -> tuple[Hashable, bool]:
    """Return how a traced boolean is computed; values of equal recipes are equal.

    Returns:
        The recipe, and whether the value is what it gives (or, if False, the opposite).
    """
    truth = True
    while True:
        made = getattr(value, "parent", None)
        name = "" if made is None else made.primitive.name
        # A boolean that was only given another shape or type.
        plain = name in ("reshape", "squeeze", "convert_element_type", "copy", "not")
        if made is None or not plain or made.in_tracers[0].dtype != np.bool_:
            return _steps(value, [_MOST_STEPS]), truth
        truth = truth != (name == "not")
        value = made.in_tracers[0]


def _steps(value: Any, left: list[int]) -> Hashable:
    """Return how a value is computed, as nested tuples.

    Args:
        value: A tracer of jax, or what an equation has as an input.
        left: How many equations may still be followed; it is counted down.
    """
    made = getattr(value, "parent", None)
    if made is None:
        return _source(value)
    left[0] -= 1
    source = _ItselfOnly(getattr(value, "val", value))
    if left[0] < 0 or made.effects:
        return source
    params = tuple(sorted(made.params.items()))
    place = next((i for i, var in enumerate(made.outvars) if var is value.val), None)
    try:
        hash(params)
    except TypeError:
        return source
    inputs = tuple(_steps(one, left) for one in made.in_tracers)
    return made.primitive, place, str(value.aval), params, inputs


def _source(value: Any) -> Hashable:
    """Return what a value without an equation is: a number, or itself."""
    held = getattr(value, "val", value)
    number = getattr(held, "val", held)  # of a literal
    if isinstance(number, bool | int | float | np.generic | np.ndarray) and not np.shape(number):
        number = np.asarray(number)  # its bytes keep the sign of a zero apart
        return str(number.dtype), number.tobytes()
    return _ItselfOnly(held)
