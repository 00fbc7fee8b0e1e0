"""Helpers that all commands share: exit codes, errors without a traceback, output."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tpuport.foundation.errors import MissingExtraError, PortError, TpuportError

# Exit codes of all commands; docs/exit_codes.md says which command has which.
FAILED = 1
WRONG_CALL = 2
DOES_NOT_FIT = 3
NEEDS_YOU = 4


@contextmanager
def errors_as_exit_codes(command: str) -> Iterator[None]:
    """Print tpuport's own errors without a traceback; any other error is a bug and keeps its own.

    Args:
        command: The command's name, for the message about a package that is not installed.
    """
    try:
        yield
    except TpuportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(FAILED if isinstance(error, PortError) else WRONG_CALL) from None
    except ModuleNotFoundError as error:
        missing = MissingExtraError.from_import(command, error)
        if missing is None:
            raise
        typer.echo(str(missing), err=True)
        raise typer.Exit(WRONG_CALL) from None


def has_color(*, err: bool = False) -> bool:
    """Return whether to write in colour: on a terminal, unless the environment overrides it."""
    if os.environ.get("FORCE_COLOR"):
        return True
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return (sys.stderr if err else sys.stdout).isatty()


def printable(text: str) -> str:
    """Escape what a terminal may refuse: file names can contain bytes that are no character."""
    return text.encode(errors="backslashreplace").decode()


def say(line: str) -> None:
    """Print a line on standard error, as standard output may go to a file or a program."""
    typer.echo(printable(line), err=True)
