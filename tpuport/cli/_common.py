"""Helpers that all commands share: exit codes, errors without a traceback, output."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import typer

from tpuport.foundation.errors import MissingExtraError, PortError, TpuportError

if TYPE_CHECKING:
    from rich.console import Console

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


class Presentable(Protocol):
    """A result that can be shown, saved, and written as JSON."""

    def to_json(self) -> str:
        """Return it as JSON."""
        ...

    def show(self, console: "Console") -> None:
        """Print it."""
        ...

    def save(self, path: Path) -> None:
        """Write it to a file."""
        ...


def present(found: Presentable, report: Path | None, *, as_json: bool) -> None:
    """Write a result to a file, if there is to be one, and print it."""
    from rich.console import Console

    if report is not None:
        found.save(report)
    if as_json:
        typer.echo(found.to_json())
    else:
        found.show(Console(force_terminal=has_color() or None, soft_wrap=True))
