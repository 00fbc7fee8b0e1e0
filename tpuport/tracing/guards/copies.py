"""Objects compared by identity, where a copy that code put in the place of one counts as it.

Code that never changes an object in place (a registry, settings under a `with`) makes a copy,
changes that, and puts it where the old one was, even if nothing was to change.
"""

from collections import deque
from typing import Any

from tpuport.foundation import pytree
from tpuport.tracing.guards.code_reads import VALUES


class Same:
    """An object compared by identity, kept alive so that no other object gets its id."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


class SameOrCopy(Same):
    """An object that equals itself, and a copy of it that was met at the same place.

    Args:
        value: the object.
        number: how many objects had been met before. Two names for one object have one number, so
            that copies of it under each of them, which `is` tells apart, do not count as one.
    """

    __slots__ = ("number",)

    def __init__(self, value: Any, number: int) -> None:
        super().__init__(value)
        self.number = number

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameOrCopy):
            return False
        return other.value is self.value or (
            other.number == self.number and is_copy(other.value, self.value)
        )

    __hash__ = None  # type: ignore[assignment]


def is_copy(one: Any, other: Any) -> bool:
    """Return whether two objects have the same class and attributes, and no other state.

    An object without attributes is only itself: such objects mark places or missing values.
    """
    if type(one) is not type(other) or not (pytree.is_plain(one) and pytree.is_plain(other)):
        return False
    held, others = pytree.attributes_of(one), pytree.attributes_of(other)
    return (
        bool(held)
        and held.keys() == others.keys()
        and all(_has_same_content(value, others[name]) for name, value in held.items())
    )


def _has_same_content(one: Any, other: Any) -> bool:
    """Return whether two values are one, equal numbers or strings, or containers of the same."""
    if one is other:
        return True
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in VALUES:
        return repr(one) == repr(other)
    if kind in (set, frozenset):
        # The members themselves: equal ones of a class of the user's may differ.
        ours, theirs = ({id(v) if type(v) not in VALUES else v for v in s} for s in (one, other))
        return ours == theirs
    if kind is dict:
        return len(one) == len(other) and all(
            _has_same_content(a, b)
            for pair in zip(one.items(), other.items(), strict=True)
            for a, b in zip(*pair, strict=True)
        )
    if kind in (list, tuple, deque):
        return len(one) == len(other) and all(map(_has_same_content, one, other))
    return False
