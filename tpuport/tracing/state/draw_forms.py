"""How a tape makes draws of `random` and of numpy, those of items and orders of lists too."""

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from tpuport.tracing.core.context import current
from tpuport.tracing.core.host_tape import DrawnArray, Tape
from tpuport.tracing.core.speculation import RestartTrace


def form_of(family: Any, name: str) -> Callable[..., Any]:
    """Return how a tape makes a draw: a function of it, the function that draws, and its arguments.

    Args:
        family: `random` or `numpy.random`.
        name: the name of the function, or of the method of a generator of that family.
    """
    return _FORMS.get((family, name), _recorded)


def _recorded(tape: Tape, original: Any, args: Any, kwargs: Any) -> Any:
    return tape.record(original, args, kwargs)


def state(tape: Tape, original: Any, args: Any, kwargs: Any) -> Any:
    """Ask for the state of a generator."""
    return tape.record(original, args, kwargs, is_opaque=True)


def _are_numbers(tape: Tape, items: Any) -> bool:
    plain = (bool, int, float)
    return all(type(one) in plain or tape.holds(one) for one in items)


def _chosen(tape: Tape, original: Any, args: Any, kwargs: Any) -> Any:
    """Draw items of a list by their indices, if they are no numbers."""
    items, *rest = args or (kwargs.pop("seq", kwargs.pop("population", None)),)
    if isinstance(items, np.ndarray) or not hasattr(items, "__getitem__"):
        return tape.record(original, (items, *rest), kwargs)
    if isinstance(items, (list, tuple, range)) and _are_numbers(tape, items):
        numbers, span = list(items), (-math.inf, math.inf)
        if all(type(one) is int for one in numbers):
            span = (min(numbers, default=0), max(numbers, default=0))
        return tape.record(original, (numbers, *rest), kwargs, span=span)
    span = (0, len(items) - 1)
    drawn = tape.record(original, (range(len(items)), *rest), kwargs, span=span)
    return [items[index] for index in drawn] if isinstance(drawn, list) else items[drawn]


def _chosen_by_numpy(tape: Tape, original: Any, args: Any, kwargs: Any) -> Any:
    """Draw items of a list by their indices, if they are no numbers and it is one item."""
    items, *rest = args or (kwargs.pop("a"),)
    plain = not isinstance(items, (list, tuple)) or _are_numbers(tape, items)
    is_one = (rest[0] if rest else kwargs.get("size")) is None
    if plain or not is_one:
        return tape.record(original, (items, *rest), kwargs)
    span = (0, len(items) - 1)
    return items[tape.record(original, (len(items), *rest), kwargs, span=span)]


def _whole_number(below: int, tape: Tape, original: Any, args: Any, kwargs: Any) -> Any:
    """Draw integers between two bounds, which are known of the number."""
    low, high = (*args, None, None)[:2]
    span = (-math.inf, math.inf)
    if len(args) == 2 and type(low) is int and type(high) is int:
        span = (low, high - below)
    elif len(args) == 1 and type(low) is int:
        span = (0, low - 1)
    return tape.record(original, args, kwargs, span=span)


def _items_in_order(shuffle: Any, items: list[Any]) -> list[Any]:
    shuffle(items)
    return items


def _shuffled(tape: Tape, original: Any, args: Any, kwargs: Any) -> None:
    """Shuffle a list or an array that the tape has made, in place."""
    (items,) = args or (kwargs.pop("x"),)
    if type(items) is DrawnArray:
        tape.record(original, (items,))
    elif type(items) is list and _are_numbers(tape, items):
        items[:] = tape.record(_items_in_order, (original, items))
    elif isinstance(items, list):
        raise tape.refusal(
            "orders items of a list that are no numbers",
            remedy="shuffle a list of indices (range(len(items))) before the call, and pass it",
        )
    else:
        _refuse_shuffle(tape, items)


def _refuse_shuffle(tape: Tape, items: Any) -> None:
    """Trace again with an array on the tape, if the code has made it at a line that is known.

    Raises:
        RestartTrace: it has.
        PortError: it has not.
    """
    trace = current()
    place = tape.arrays.get(id(items), (None, None))[1]
    if trace is not None and trace.explorer is not None and place is not None:
        plan = trace.explorer.plan
        if place not in plan.drawn_arrays:
            plan.drawn_arrays.add(place)
            raise RestartTrace(records_draws=True)
    raise tape.refusal(
        f"orders a {type(items).__name__} in place that was made elsewhere",
        remedy="order a copy: x = numpy.random.permutation(x)",
    )


_FORMS: dict[tuple[Any, str], Callable[..., Any]] = {
    (random, "getstate"): state,
    (np.random, "get_state"): state,
    **{(random, name): _chosen for name in ("choice", "sample", "choices")},
    (np.random, "choice"): _chosen_by_numpy,
    (random, "randint"): functools.partial(_whole_number, 0),
    (random, "randrange"): functools.partial(_whole_number, 1),
    (np.random, "randint"): functools.partial(_whole_number, 1),
    **{(owner, "shuffle"): _shuffled for owner in (random, np.random)},
}
