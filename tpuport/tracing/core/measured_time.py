"""Numbers of Python's clocks, known again after arithmetic: they are of one call alone."""

from collections.abc import Callable, Iterable
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
    return port_error(
        f"{what} a time that the code measured; a program would give that of its trace at every"
        " call",
        code="TPU402",
        remedy="measure the time around the call, or leave the class that measures it to eager"
        " PyTorch: `tpuport run --eager NAME`",
        place=value.place,
    )


def _kept(base: type, name: str) -> Callable[..., Any]:
    function = getattr(base, name)

    def operation(self: Any, *others: Any) -> Any:
        return measured(function(self, *others), self.place)

    return operation


for _kind, _base in ((MeasuredSeconds, float), (MeasuredTicks, int)):
    for _name in (*(f"__{s}{n}__" for n in _OPERATIONS for s in ("", "r")), *_OF_ONE):
        setattr(_kind, _name, _kept(_base, _name))
