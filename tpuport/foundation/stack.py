"""The stack that processes may have: libtpu needs one without a limit for some programs."""

import os
import signal
import sys
from collections.abc import Sequence

# What a process prints before it compiles once more; by this text a log shows that it did.
COMPILED_AGAIN = "compiling again with a stack without a limit (ulimit -s unlimited)"
# A variable that is set where the process that started this one says itself how it ended.
SUPERVISED = "TPUPORT_SUPERVISED"
# A limit counts for the threads of a process only if it has been there from its start.
_WITH_STACK = """
import os, resource, sys
hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))
os.execv(sys.argv[1], sys.argv[1:])
"""


def has_any_stack() -> bool:
    """Return whether the stack of this process has no limit, or none that one could see."""
    if os.name != "posix":
        return True
    import resource

    return resource.getrlimit(resource.RLIMIT_STACK)[0] == resource.RLIM_INFINITY


def may_have_any_stack() -> bool:
    """Return whether a process that this one starts may have a stack without a limit."""
    if os.name != "posix":
        return False
    import resource

    return resource.getrlimit(resource.RLIMIT_STACK)[1] == resource.RLIM_INFINITY


def with_any_stack(command: Sequence[str]) -> list[str]:
    """Return the command that runs a command with as large a stack as it may have.

    Args:
        command: The path of a program, and its arguments.
    """
    return [sys.executable, "-c", _WITH_STACK, *command]


def is_segmentation_fault(status: int | None) -> bool:
    """Return whether an exit status, of a process or of one that a shell started, says so."""
    return status in (-signal.SIGSEGV, 128 + signal.SIGSEGV)
