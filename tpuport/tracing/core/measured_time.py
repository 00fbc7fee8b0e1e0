"""Numbers of Python's clocks, known again after arithmetic: they are of one call alone.

What such a number becomes outside of arithmetic (`float(time.time())`, the fields of a date) is not
known again. A program whose code read a clock is therefore traced a second time at another time.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tpuport.foundation.errors import PortError
from tpuport.tracing.core.errors import port_error

_OPERATIONS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OF_ONE = ("__neg__", "__pos__", "__abs__", "__round__")


class _Measured:
    """What numbers of clocks have in common.

    Attributes:
        place: The line of the user's code that read the clock.
    """

    place: str


class MeasuredSeconds(_Measured, float):
    """A float that comes of a clock."""


class MeasuredTicks(_Measured, int):
    """An integer that comes of a clock."""


MEASURED = (MeasuredSeconds, MeasuredTicks)
KINDS = frozenset(MEASURED)


def measured(number: Any, place: str) -> Any:
    """Return a number of a clock as one that is known again; anything else as it is."""
    kind = {float: MeasuredSeconds, int: MeasuredTicks}.get(type(number))
    if kind is None:
        return number
    made = kind(number)
    made.place = place
    return made


def refuse_measured(values: Iterable[Any]) -> None:
    """Refuse numbers of a clock among the arguments of an operation.

    Raises:
        PortError: there is one.
    """
    for value in values:
        if type(value) in KINDS:
            raise lasting("an operation of torch gets", value)


def lasting(what: str, value: Any) -> PortError:
    """Return the refusal of a number of a clock that would be a constant of the program."""
    return of_a_moment(f"{what} a time that the code measured", value.place)


def of_a_moment(what: str, place: str) -> PortError:
    """Return the refusal of a program that depends on when it was traced.

    Args:
        what: the words for what it has from there.
        place: the line that read it.
    """
    return port_error(
        f"{what}; a program would give that of its trace at every call",
        code="TPU402",
        remedy="measure the time around the call, or leave the class that measures it to eager"
        " PyTorch: `tpuport run --eager NAME`",
        place=place,
    )


# The functions that stand for clocks which an object of the module holds, by the clock's id.
HELD: dict[int, Any] = {}
# By how many seconds clocks are wrong: another year, day, hour, minute, second and part of one.
_WRONG = 400 * 86400 + 3 * 3600 + 7 * 60 + 13.356
_SHIFT = contextvars.ContextVar("shift", default=0.0)


def shift() -> float:
    """Return by how many seconds clocks that a trace reads are wrong here."""
    return _SHIFT.get()


@contextlib.contextmanager
def at_another_time() -> Iterator[None]:
    """Let clocks that traces in the block read be wrong."""
    token = _SHIFT.set(_WRONG)
    try:
        yield
    finally:
        _SHIFT.reset(token)


def _kept(base: type, name: str) -> Callable[..., Any]:
    function = getattr(base, name)

    def operation(self: Any, *others: Any) -> Any:
        return measured(function(self, *others), self.place)

    return operation


for _kind, _base in ((MeasuredSeconds, float), (MeasuredTicks, int)):
    for _name in (*(f"__{s}{n}__" for n in _OPERATIONS for s in ("", "r")), *_OF_ONE):
        setattr(_kind, _name, _kept(_base, _name))
