"""A progress bar for the steps of a recipe, on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepsBar:
    """A progress bar, called with the number of steps done and the total. `say` prints above it."""

    progress: Any
    task: Any

    def __call__(self, done: int, total: int) -> None:
        """Show the number of steps done."""
        self.progress.update(self.task, completed=done, total=total, visible=True)

    def say(self, line: str) -> None:
        """Print a line without markup."""
        self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def steps_bar(what: str, total: int, console: Any = None) -> Iterator[StepsBar]:
    """Show a bar from the first finished step on.

    Args:
        what: Label of the bar.
        total: Number of steps.
        console: A console of rich; by default one on standard error.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn(what), *columns, console=console or Console(stderr=True)) as progress:
        yield StepsBar(progress, progress.add_task(what, total=total, visible=False))
