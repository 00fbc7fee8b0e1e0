"""A command that goes on in a process of its own, as libtpu may end that one."""

import os
import signal
import sys

import typer

from tpuport.cli._common import say
from tpuport.foundation.guarded import run_attached
from tpuport.foundation.stack import (
    COMPILED_AGAIN,
    SUPERVISED,
    has_any_stack,
    is_segmentation_fault,
    may_have_any_stack,
    with_any_stack,
)

_OTHERWISE = (
    "What to do: try another batch size, another slice or another libtpu; please report the program"
)
_BY_ROOT = (
    "What to do: allow a stack without a limit (`ulimit -Hs unlimited`, by root) and call again"
)


def supervise(command: str) -> None:
    """Run this command again in another process, and end as it does.

    libtpu ends the process for want of stack on some programs; then it runs once more with a stack
    without a limit. Nothing happens in that process, and where jax is in use already, as in a
    program that calls the command as a function.

    Args:
        command: The name of the command.

    Raises:
        typer.Exit: the other process ended.
    """
    # What was typed is run again: it has to be this command.
    typed = sys.argv[1:2] == [command] and "jax" not in sys.modules
    if not typed or SUPERVISED in os.environ:
        return
    words = [sys.executable, *sys.orig_argv[1:]]
    status = run_attached(words, {SUPERVISED: "1"})
    if is_segmentation_fault(status):
        status = _once_more(command, words, status)
    if status == -signal.SIGKILL:
        say(f"tpuport {command} was killed: most likely memory ran out.")
    raise typer.Exit(status if status >= 0 else 128 - status)


def _once_more(command: str, words: list[str], status: int) -> int:
    """Run a command with a stack without a limit, and say what to do if that is no help."""
    crashed = f"tpuport {command}: the process crashed (SIGSEGV)"
    if has_any_stack():
        say(f"{crashed}, with a stack without a limit. {_OTHERWISE}")
        return status
    if not may_have_any_stack():
        say(f"{crashed}, as libtpu does when its stack is too small. {_BY_ROOT}")
        return status
    say(f"{crashed}, as libtpu does when its stack is too small: {COMPILED_AGAIN}")
    status = run_attached(with_any_stack(words), {SUPERVISED: "1"})
    if is_segmentation_fault(status):
        say(f"{crashed} again. {_OTHERWISE}")
    return status
