"""What a thread may run: is this call already inside a program, does another thread swap code?"""

import contextlib
import threading
from collections.abc import Iterator

_LOCAL = threading.local()
# Held by whoever swaps user code or functions of torch, which is seen process-wide: a trace, and a
# reference run, which may be on a thread of its own.
SWAPS = threading.RLock()
# Held by a call that may trace, or that changes what a port keeps of its calls.
_CALLS = threading.RLock()


def is_part_of_program() -> bool:
    """Return whether this thread runs a program, or the eager reference run of one."""
    return getattr(_LOCAL, "inside", False)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Let no other thread make such a call meanwhile.

    A reference run may call a port, too: it holds `SWAPS` on a thread of its own, for which a call
    may be waiting, and so it does not wait for calls.
    """
    if is_part_of_program():
        yield
        return
    with _CALLS:
        yield


def compares_gradients() -> bool:
    """Return whether this thread differentiates to compare gradients, and not for the script."""
    return getattr(_LOCAL, "comparing", False)


def part_of_program() -> contextlib.AbstractContextManager[None]:
    """Mark the module calls of this thread inside the block as parts of a program."""
    return _marked("inside")


def comparing_gradients() -> contextlib.AbstractContextManager[None]:
    """Mark the backward passes of this thread inside the block as none of the script's."""
    return _marked("comparing")


@contextlib.contextmanager
def _marked(name: str) -> Iterator[None]:
    before = getattr(_LOCAL, name, False)
    setattr(_LOCAL, name, True)
    try:
        yield
    finally:
        setattr(_LOCAL, name, before)
