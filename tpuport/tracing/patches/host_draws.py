"""Random numbers of Python's `random` and of numpy's global state, drawn from the program's key."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tpuport.foundation.patching.shim import Replacement, Shim, copies, look_for_new
from tpuport.tracing.core.context import current
from tpuport.tracing.core.keys import STAND_IN
from tpuport.tracing.core.speculation import RestartTrace
from tpuport.tracing.patches._count import count


class HostDraws(Shim):
    """`random.random()` and others in a trace give a traced number, drawn as `torch.rand` draws.

    The eager run that a program is compared with draws the same number. What gives more than one
    number, an item of a list or an order of them has no such form, and is refused afterwards.
    """

    TARGET = "random.random"
    REASON = "it draws on the host while the program is traced: every call would see that number"

    def replacements(self) -> list[Replacement]:
        made = [(owner, name, functools.partial(_drawn, number)) for owner, name, number in _DRAWS]
        made += [(owner, name, _set) for owner, name in _SETTERS]
        held = [getattr(owner, name) for owner, name, _ in made]
        # A trace inside of another one finds what that has put in place.
        originals = [getattr(function, "of_host", function) for function in held]
        look_for_new(originals)
        replaced: list[Replacement] = []
        for (owner, name, replace), original in zip(made, originals, strict=True):
            function = replace(original)
            replaced.append(Replacement(owner, name, function))
            replaced += copies(original, function, owner)
        return replaced


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

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if _draws_on_host():
            return original(*args, **kwargs)
        try:
            drawn = number(*args, **kwargs)
        except _NotOneNumber:
            return original(*args, **kwargs)
        count(HostDraws.TARGET)
        return drawn

    draw.of_host = original  # type: ignore[attr-defined]
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

    set_state.of_host = original  # type: ignore[attr-defined]
    return set_state


class _NotOneNumber(TypeError):
    """Signal arguments that ask for something else than one number from fixed bounds."""


def _uniform() -> Any:
    return torch.rand((), dtype=torch.float32).item()


def _normal(mean: Any = 0.0, deviation: Any = 1.0) -> Any:
    return mean + deviation * torch.randn((), dtype=torch.float32).item()


def _between(low: Any, high: Any) -> Any:
    return low + (high - low) * _uniform()


def _whole(start: Any, stop: Any = None, step: Any = 1) -> Any:
    low, high = (0, start) if stop is None else (start, stop)
    # Of bool and floats Python and numpy have opinions of their own.
    if step != 1 or any(type(bound) is not int for bound in (low, high)) or low >= high:
        raise _NotOneNumber
    return torch.randint(low, high, ()).item()


def _without_size(made: Callable[..., Any], most: int) -> Callable[..., Any]:
    """Return a draw for numpy's functions, which take a size after their other arguments."""

    def draw(*args: Any, size: Any = None, **kwargs: Any) -> Any:
        if size is not None or len(args) > most or any(isinstance(a, np.ndarray) for a in args):
            raise _NotOneNumber
        return made(*args, **kwargs)

    return draw


def _numpy_normal(loc: Any = 0.0, scale: Any = 1.0) -> Any:
    return _normal(loc, scale)


def _numpy_between(low: Any = 0.0, high: Any = 1.0) -> Any:
    return _between(low, high)


def _numpy_whole(low: Any, high: Any = None) -> Any:
    return _whole(low, high)


def _python_normal(mu: Any = 0.0, sigma: Any = 1.0) -> Any:
    return _normal(mu, sigma)


def _python_whole(a: Any, b: Any) -> Any:
    if type(b) is not int:
        raise _NotOneNumber
    return _whole(a, b + 1)


def _python_between(a: Any, b: Any) -> Any:
    return _between(a, b)


_DRAWS: list[tuple[Any, str, Callable[..., Any]]] = [
    (random, "random", _uniform),
    (random, "uniform", _python_between),
    (random, "gauss", _python_normal),
    (random, "normalvariate", _python_normal),
    (random, "randint", _python_whole),
    (random, "randrange", _whole),
    *((np.random, name, _without_size(_uniform, 0)) for name in ("rand", "random", "ranf")),
    *((np.random, name, _without_size(_uniform, 0)) for name in ("random_sample", "sample")),
    *((np.random, name, _without_size(_normal, 0)) for name in ("randn", "standard_normal")),
    (np.random, "uniform", _without_size(_numpy_between, 2)),
    (np.random, "normal", _without_size(_numpy_normal, 2)),
    (np.random, "randint", _without_size(_numpy_whole, 2)),
]
_SETTERS: list[tuple[Any, str]] = [
    *((random, name) for name in ("seed", "setstate")),
    *((np.random, name) for name in ("seed", "set_state")),
]
