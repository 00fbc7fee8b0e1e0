"""A compiler that ends the process: Python gets no error, so another process says what to do."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tpuport.foundation.stack import SUPERVISED, has_any_stack

WHAT_TO_DO = """\
tpuport: the process ended while libtpu compiled a program, which Python cannot catch.
What to do: after SIGSEGV or STACK OVERFLOW, start it from a shell after `ulimit -s unlimited`, or
            use `tpuport compile`, which does so by itself; if it was killed, memory ran out
"""
_SAYS = 'read -r done || printf "%s" "$1" >&2'


@contextmanager
def crash_explained() -> Iterator[None]:
    """Say on standard error what to do if the process ends within the block.

    A shell waits for its input to end, and prints unless it was told that the block was left.
    Nothing waits where the stack has no limit, or where another process watches this one.
    """
    shell = shutil.which("sh")
    if shell is None or has_any_stack() or SUPERVISED in os.environ:
        yield
        return
    # A session of its own: what is typed on the terminal to stop this process is not for it.
    watcher = subprocess.Popen(
        [shell, "-c", _SAYS, shell, WHAT_TO_DO], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield
    finally:
        watcher.communicate(b"done\n")
