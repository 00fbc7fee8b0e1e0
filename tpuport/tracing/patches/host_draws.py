"""Random numbers of Python's `random` and of numpy's global state in a trace.

Single numbers are drawn from the program's key. Where the code draws more than that, or sets a
state, all are drawn on the host before each call (`tracing/core/host_tape.py`).
"""

import contextlib
import functools
import inspect
import os
import random
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import numpy as np
import torch

from tpuport.foundation.patching.shim import Replacement, Shim, everywhere, original_of
from tpuport.foundation.user_frames import is_inside
from tpuport.tracing.core import sym_numbers
from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import current
from tpuport.tracing.core.host_tape import ANY_ARRAY, current_tape
from tpuport.tracing.core.keys import STAND_IN
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.patches._count import count
from tpuport.tracing.state.draw_forms import form_of, state


class HostDraws(Shim):
    """`random.random()` and others in a trace give a traced number, drawn as `torch.rand` draws.

    The eager run that a program is compared with draws the same number, of float32's 24 bits. An
    item of a list (`random.choice`) is the one at a drawn index, which is a branch for each item.
    What gives more than one number or an order of them has no such form: then the trace starts
    again with a tape, and Python draws all of them before each call of the program.
    """

    TARGET = "random.random"
    REASON = "it draws on the host while the program is traced: every call would see that number"

    def replacements(self) -> list[Replacement]:
        numbers = {(id(owner), name): number for owner, name, number in _DRAWS}
        made = [
            (
                owner,
                name,
                functools.partial(_drawn, numbers.get((id(owner), name)), form_of(owner, name)),
            )
            for owner, name in _all_draws()
        ]
        seeded = Replacement(random.Random, "seed", _seeded)
        return [seeded, *everywhere([*made, *((owner, name, _set) for owner, name in _SETTERS)])]

    def copied(self) -> list[Any]:
        return [original_of(owner, name) for owner, name in (*_all_draws(), *_SETTERS)]


class DrawnArrays(Shim):
    """Arrays that numpy makes of what a tape has drawn are on the tape, too.

    So are those that the code makes to shuffle them in place, at lines that an earlier attempt saw.
    """

    TARGET = "numpy.array"
    REASON = "numpy reads in C what is drawn anew before each call"
    FOR_DRAWS = True

    def replacements(self) -> list[Replacement]:
        made = [Replacement(np, name, _creating(original_of(np, name))) for name in _CREATE]
        return [*made, *everywhere([(torch, "from_numpy", _from_numpy)])]

    def copied(self) -> list[Any]:
        return [original_of(torch, "from_numpy")]


def _draws_on_host() -> bool:
    """Return whether Python draws its numbers itself here."""
    trace = current()
    if trace is None:
        stand_in = STAND_IN.get()
        return stand_in is None or stand_in.draws_on_host
    # Under `porting()` the modules inside become the programs, and Python draws as in eager.
    explorer = trace.explorer
    return explorer is None or trace.options.takes_gradients or explorer.plan.draws_on_host


def _drawn(
    number: Callable[..., Any] | None, form: Callable[..., Any], original: Any
) -> Callable[..., Any]:
    """Return a function that draws in the program, and as the original outside of one.

    A call with arguments that the program has no form for is the original's.

    Args:
        number: draws a number of the program; None if there is no such function.
        form: draws by a tape.
        original: the function that is replaced.
    """

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        tape = current_tape()
        if tape is not None:
            count(HostDraws.TARGET)
            return form(tape, original, args, kwargs)
        if number is not None and not _draws_on_host() and _fits(number, args, kwargs):
            with contextlib.suppress(_NoRange):
                drawn = number(*args, **kwargs)
                count(HostDraws.TARGET)
                return drawn
        _begin_tape(form)
        return original(*args, **kwargs)

    return draw


def _fits(number: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Return whether a function that draws one number in the program takes such arguments."""
    try:
        bound = _signature(number).bind(*args, **kwargs)
    except TypeError:
        return False
    # An array as a bound asks for as many numbers.
    taken = _ITEMS if number is _python_item else _NUMBERS
    return all(isinstance(given, taken) for given in bound.arguments.values())


_signature = functools.cache(inspect.signature)


def _begin_tape(form: Callable[..., Any]) -> None:
    """Trace again with a tape, if the running trace may have one and this draws.

    Raises:
        RestartTrace: It may.
    """
    trace = current()
    if trace is None or not trace.recorder.may_tape or form is state:
        return
    explorer = trace.explorer
    if trace.options.takes_gradients or explorer is None or not explorer.plan.draws_on_host:
        raise RestartTrace(records_draws=True)


def _set(original: Any) -> Callable[..., Any]:
    """Return a function that sets a state of the host, after which Python draws from that."""

    @functools.wraps(original)
    def set_state(*args: Any, **kwargs: Any) -> Any:
        tape = current_tape()
        if tape is not None:
            return tape.record(original, args, kwargs)
        if not _draws_on_host():
            if current() is not None:
                raise RestartTrace(draws_on_host=True)
            STAND_IN.get().draws_on_host = True
        return original(*args, **kwargs)

    return set_state


def _is_of_call(code: CodeType) -> bool:
    """Return whether code is of the call that is traced: no import, nor torch's symbols."""
    is_symbol = f"{os.sep}sympy{os.sep}" in code.co_filename
    return not (code.co_name == "<module>" or is_symbol or is_inside(code.co_filename))


_seed_generator = random.Random.seed


@functools.wraps(_seed_generator)
def _seeded(self: random.Random, a: Any = None, version: int = 2) -> None:
    """Seed a generator, and note in a trace that it is seeded by random numbers of the system."""
    trace, frame = current(), sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == random.__file__:
        frame = frame.f_back
    if a is None and trace is not None and _is_of_call(frame.f_code):
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        trace.recorder.guards.moments.append(place)
    _seed_generator(self, a, version)


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


# -- draws of a tape -------------------------------------------------------------------------------


def _all_draws() -> list[tuple[Any, str]]:
    """Return the functions that draw from the global generators, or tell their state."""
    found: list[tuple[Any, str]] = [(owner, name) for owner, name, _ in _DRAWS]
    for owner, holder in ((random, random._inst), (np.random, np.random.mtrand._rand)):  # type: ignore[attr-defined]
        names = [name for name in vars(owner) if not name.startswith("_")]
        held = [(name, original_of(owner, name)) for name in names]
        found += [(owner, n) for n, one in held if getattr(one, "__self__", None) is holder]
    return [(owner, name) for owner, name in dict.fromkeys(found) if (owner, name) not in _SETTERS]


_CREATE = ("array", "asarray", "arange", "zeros", "ones", "full", "empty", "linspace", "eye")


def _from_numpy(original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_numpy(*args: Any) -> Any:
        tape = current_tape()
        if tape is not None and tape.takes(args):
            return tape.record(original, args)
        return original(*args)

    return from_numpy


def _creating(original: Any) -> Callable[..., Any]:
    """Return a function of numpy that makes an array, and makes it on the tape where it has to."""

    @functools.wraps(original)
    def create(*args: Any, **kwargs: Any) -> Any:
        tape = current_tape()
        if tape is None:
            return original(*args, **kwargs)
        frame = sys._getframe(1)
        place = frame.f_code.co_filename, frame.f_lineno
        plan = current().explorer.plan  # type: ignore[union-attr]
        made_here = ANY_ARRAY in plan.drawn_arrays and not is_inside(place[0])
        if made_here or place in plan.drawn_arrays or tape.holds((args, kwargs)):
            return tape.record(original, args, kwargs)
        made = original(*args, **kwargs)
        if not is_inside(place[0]):
            tape.arrays[id(made)] = made, place
        return made

    return create
