"""What a thread may run: is this call already inside a program, does another thread swap code?"""

import contextlib
import threading
from collections.abc import Iterator

_LOCAL = threading.local()
# Held by whoever swaps user code or functions of torch, which is seen process-wide: a trace, and a
# reference run, which may be on a thread of its own.
SWAPS = threading.RLock()


def is_part_of_program() -> bool:
    """Return whether this thread runs a program, or the eager reference run of one."""
    return getattr(_LOCAL, "inside", False)


@contextlib.contextmanager
def part_of_program() -> Iterator[None]:
    """Mark the module calls of this thread inside the block as parts of a program."""
    before = is_part_of_program()
    _LOCAL.inside = True
    try:
        yield
    finally:
        _LOCAL.inside = before
