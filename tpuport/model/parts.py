"""Whether a module call that runs now is a part of a program, and not one of its own."""

import contextlib
import threading
from collections.abc import Iterator

_LOCAL = threading.local()


def is_part_of_program() -> bool:
    """Whether this thread runs a program, or eager PyTorch beside one."""
    return getattr(_LOCAL, "inside", False)


@contextlib.contextmanager
def part_of_program() -> Iterator[None]:
    """Module calls of this thread inside the block are parts of a program."""
    before = is_part_of_program()
    _LOCAL.inside = True
    try:
        yield
    finally:
        _LOCAL.inside = before
