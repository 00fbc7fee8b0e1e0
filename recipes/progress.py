"""A bar for steps that a recipe does, on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepsBar:
    """Called with the steps done and their number it moves; lines go above it by `say`."""

    progress: Any
    task: Any

    def __call__(self, done: int, total: int) -> None:
        """Show how many are done."""
        self.progress.update(self.task, completed=done, total=total, visible=True)

    def say(self, line: str) -> None:
        """Print a line, as it is."""
        self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def steps_bar(what: str, total: int, console: Any = None) -> Iterator[StepsBar]:
    """A bar that is shown from the first step that is done.

    Args:
        what: stands before it.
        total: how many steps there are.
        console: rich's; by default one on standard error.
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
