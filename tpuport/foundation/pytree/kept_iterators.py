"""Iterators that objects keep, which a copy of the objects must not advance."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Self


class KeptIterator:
    """Stands in a copy for an iterator, which cannot be copied, and raises when it is advanced.

    Attributes:
        of: the iterator.
    """

    def __init__(self, of: Iterator[Any], refusal: Callable[[], Exception]) -> None:
        self.of, self._refusal = of, refusal

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NoReturn:
        raise self._refusal()

    def send(self, value: Any) -> NoReturn:
        """Raise, as `next` does."""
        raise self._refusal()

    throw = close = send


def is_kept(value: Any) -> bool:
    """Return whether a value is an iterator whose position is in no attribute, or stands for it."""
    if isinstance(value, KeptIterator):
        return True
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")
