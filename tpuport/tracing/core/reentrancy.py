"""A thread-local flag: is this module call already inside a program?"""

import contextlib
import threading
from collections.abc import Iterator

_LOCAL = threading.local()


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
