"""What a function may change besides its arguments: all that its closure reaches."""

from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

from tpuport.foundation.pytree.children import content
from tpuport.foundation.pytree.snapshot import Snapshot
from tpuport.tracing.core.context import Trace


class Closures:
    """What the closures of functions reach, as it was when this was made.

    Args:
        functions: The functions.
    """

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self.snapshot = Snapshot(reached_by(*functions))

    @property
    def has_iterator(self) -> bool:
        """Return whether it reaches an iterator, whose position nothing shows."""
        return any(isinstance(value, Iterator) for value, _ in self.snapshot.saved)

    def changed(self) -> bool:
        """Return whether a Python value has changed since this was made."""
        return any(change is not None for change in self.snapshot.changes())


def reached_by(*functions: Callable[..., Any]) -> list[Any]:
    """Return the variables of functions' closures, of the functions in them, and their objects."""
    found: dict[int, Any] = {}
    pending: list[Any] = list(functions)
    while pending:
        one = pending.pop()
        if isinstance(one, MethodType):
            found[id(one.__self__)] = one.__self__
            one = one.__func__
        for cell in one.__closure__ or () if isinstance(one, FunctionType) else ():
            if id(cell) not in found:
                found[id(cell)] = cell
                pending += content(cell)
    return list(found.values())


def holds_iterator(*functions: Callable[..., Any]) -> bool:
    """Return whether a variable of a closure is an iterator, which cannot be set back."""
    cells = [one for one in reached_by(*functions) if isinstance(one, CellType)]
    return any(isinstance(one, Iterator) for cell in cells for one in content(cell))


def read_outside(trace: Trace) -> Callable[[], list[str]]:
    """Return what says which globals, class attributes and the like have changed since now."""
    values = trace.outside_values
    return list if values is None else values().changed
