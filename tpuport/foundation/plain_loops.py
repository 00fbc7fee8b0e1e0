"""Loops over items as Python runs them, and what they go over."""

from collections.abc import Callable, Iterator
from typing import Any


class _UnboundName(type):
    """The class of what stands for a variable without a value: errors of its uses name it."""


class Unbound(metaclass=_UnboundName):
    """What stands before a loop for a variable that each of its rounds binds: the class itself.

    An object of it would be a container, whose attributes are variables of the loop.
    """


class MaybeUnbound(Unbound):
    """What stands for a variable that some rounds bind."""


def if_bound(read: Callable[[], Any], *, sure: bool = True) -> Any:
    """Return the value of a local variable before a loop, or what stands for one without a value.

    Args:
        read: Function that reads the variable.
        sure: Whether each round binds it, so that it has no value only where there is no round.
    """
    try:
        return read()
    except NameError:
        return Unbound if sure else MaybeUnbound


def unbound_error() -> UnboundLocalError:
    """Make the error for a variable that only rounds bind, after a loop without a round."""
    return UnboundLocalError(
        "cannot access a local variable that only the rounds of a loop bind: it had no round"
    )


def run_round(body: Callable[..., Any], item: Any, operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run the body of a loop over items.

    Raises:
        UnboundLocalError: It reads a variable that no round before it has bound.
    """
    try:
        return tuple(body(item, *operands))
    except (TypeError, AttributeError) as error:
        names = (_UnboundName.__name__, MaybeUnbound.__name__)
        if begins_unbound(operands) and any(name in str(error) for name in names):
            msg = "cannot access a local variable that no round of the loop before it has bound"
            raise UnboundLocalError(msg) from error
        raise


def begins_unbound(operands: tuple[Any, ...]) -> bool:
    """Return whether some variable of a loop has no value yet."""
    return any(one is Unbound or one is MaybeUnbound for one in operands)


def bound(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the variables after a loop.

    Raises:
        UnboundLocalError: One of those that each round binds is unbound.
    """
    if any(one is Unbound for one in operands):
        raise unbound_error()
    return operands


class Items:
    """What `function(*given, **named)` goes over; the call is made where the loop begins."""

    def __init__(self, function: Callable[..., Any], *given: Any, **named: Any) -> None:
        self.function, self.given, self.named = function, given, named

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made())

    def made(self) -> Any:
        """Make the call."""
        given = [one.made() if type(one) is Items else one for one in self.given]
        return self.function(*given, **self.named)


def looped(
    items: Any,
    body: Callable[..., Any],
    operands: tuple[Any, ...],
    *,
    stops: bool,
    tells: bool = False,
) -> tuple[Any, ...]:
    """Run a loop as Python does; the arguments are those of `for_items`."""
    ended = False
    for item in items:
        made = run_round(body, item, operands)
        operands = made[1:] if stops else made
        if stops and made[0]:
            ended = True
            break
    return (*operands, ended) if tells else operands
