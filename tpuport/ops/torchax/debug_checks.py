"""Whether programs that torchax alone traces keep their checks. Imports no framework."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_checks_on: ContextVar[bool] = ContextVar("_checks_on", default=False)


@contextlib.contextmanager
def debug_checks() -> Iterator[None]:
    """Make programs that torchax alone traces in this context check their tests when they run.

    Otherwise such programs drop the checks. A program of `tpuport.convert` always checks.
    """
    token = _checks_on.set(True)
    try:
        yield
    finally:
        _checks_on.reset(token)


def are_checks_on() -> bool:
    """Return whether the program that torchax alone traces now keeps its checks."""
    return _checks_on.get()
