"""Random numbers of Python's `random` and of numpy's global state, drawn from the program's key."""

import functools
import inspect
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tpuport.foundation.patching.shim import Replacement, Shim, everywhere, original_of
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import current
from tpuport.tracing.core.keys import STAND_IN
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.patches._count import count


class HostDraws(Shim):
    """`random.random()` and others in a trace give a traced number, drawn as `torch.rand` draws.

    The eager run that a program is compared with draws the same number, of float32's 24 bits. An
    item of a list (`random.choice`) is the one at a drawn index, which is a branch for each item.
    What gives more than one number or an order of them has no such form, and is refused afterwards.
    """

    TARGET = "random.random"
    REASON = "it draws on the host while the program is traced: every call would see that number"

    def replacements(self) -> list[Replacement]:
        made = [(owner, name, functools.partial(_drawn, number)) for owner, name, number in _DRAWS]
        return everywhere([*made, *((owner, name, _set) for owner, name in _SETTERS)])

    def copied(self) -> list[Any]:
        named = [*((owner, name) for owner, name, _ in _DRAWS), *_SETTERS]
        return [original_of(owner, name) for owner, name in named]


def _draws_on_host() -> bool:
    """Return whether Python draws its numbers itself here."""
    trace = current()
    if trace is None:
        stand_in = STAND_IN.get()
        return stand_in is None or stand_in.draws_on_host
    # Under `porting()` the modules inside become the programs, and Python draws as in eager.
    explorer = trace.explorer
    return explorer is None or trace.options.takes_gradients or explorer.plan.draws_on_host


def _drawn(number: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """Return a function that draws in the program, and as the original outside of one.

    A call with arguments that the program has no form for is the original's.
    """
    signature = inspect.signature(number)

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if _draws_on_host():
            return original(*args, **kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)
        # An array as a bound asks for as many numbers.
        taken = _ITEMS if number is _python_item else _NUMBERS
        if not all(isinstance(given, taken) for given in bound.arguments.values()):
            return original(*args, **kwargs)
        try:
            drawn = number(*args, **kwargs)
        except _NoRange:
            return original(*args, **kwargs)
        count(HostDraws.TARGET)
        return drawn

    return draw


def _set(original: Any) -> Callable[..., Any]:
    """Return a function that sets a state of the host, after which Python draws from that."""

    @functools.wraps(original)
    def set_state(*args: Any, **kwargs: Any) -> Any:
        if not _draws_on_host():
            if current() is not None:
                raise RestartTrace(draws_on_host=True)
            STAND_IN.get().draws_on_host = True
        return original(*args, **kwargs)

    return set_state


_NUMBERS = (int, float, np.number, *sym_numbers.SYMBOLIC)
_ITEMS = (list, tuple, range)


class _NoRange(Exception):
    """Signal bounds of integers that are not fixed, or that lie the wrong way round."""


def _uniform() -> Any:
    return torch.rand((), dtype=torch.float32).item()


def _between(a: Any, b: Any) -> Any:
    return a + (b - a) * _uniform()


def _is_traced(number: Any) -> bool:
    return isinstance(number, torch.SymInt)


def _whole(start: Any, stop: Any) -> Any:
    # Of bool and floats Python and numpy have opinions of their own.
    if any(type(bound) is not int and not _is_traced(bound) for bound in (start, stop)):
        raise _NoRange
    if _is_traced(start) or _is_traced(stop):
        first, last = (sym_numbers.exact_value(bound) for bound in (start, stop))
        raise_if(first >= last, ValueError("empty range to draw a number from"))
    elif start >= stop:
        raise _NoRange
    return torch.randint(start, stop, ()).item()


# They have the parameters of the functions that they stand for; where one is left out here (a size,
# a step, a dtype), a call with it is the original's.


def _python_normal(mu: Any = 0.0, sigma: Any = 1.0) -> Any:
    return mu + sigma * torch.randn((), dtype=torch.float32).item()


def _python_whole(a: Any, b: Any) -> Any:
    return _whole(a, b + 1)


def _python_below(start: Any, stop: Any = None) -> Any:
    return _whole(0, start) if stop is None else _whole(start, stop)


def _python_item(seq: Any) -> Any:
    return seq[_whole(0, len(seq))]


def _numpy_standard() -> Any:
    return _python_normal()


def _numpy_normal(loc: Any = 0.0, scale: Any = 1.0) -> Any:
    return _python_normal(loc, scale)


def _numpy_between(low: Any = 0.0, high: Any = 1.0) -> Any:
    return _between(low, high)


def _numpy_below(low: Any, high: Any = None) -> Any:
    return _python_below(low, high)


_DRAWS: list[tuple[Any, str, Callable[..., Any]]] = [
    (random, "random", _uniform),
    (random, "uniform", _between),
    (random, "gauss", _python_normal),
    (random, "normalvariate", _python_normal),
    (random, "randint", _python_whole),
    (random, "randrange", _python_below),
    (random, "choice", _python_item),
    *((np.random, name, _uniform) for name in ("rand", "random", "ranf", "random_sample")),
    (np.random, "sample", _uniform),
    *((np.random, name, _numpy_standard) for name in ("randn", "standard_normal")),
    (np.random, "uniform", _numpy_between),
    (np.random, "normal", _numpy_normal),
    (np.random, "randint", _numpy_below),
]
_SETTERS: list[tuple[Any, str]] = [
    *((random, name) for name in ("seed", "setstate")),
    *((np.random, name) for name in ("seed", "set_state")),
]
