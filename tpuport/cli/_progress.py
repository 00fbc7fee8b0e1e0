"""A progress bar on the terminal, for runs that take longer than a moment."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

    from tpuport.lint.run import Progress as Advance

_PATIENCE = 1.0


class _Bar:
    """A progress bar that appears only after a while, so that short runs show none."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.started = time.monotonic()
        self.bar: Progress | None = None

    def advance(self, done: int, total: int) -> None:
        """Show the number of files done."""
        if self.bar is None:
            if time.monotonic() - self.started < _PATIENCE:
                return
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(stderr=True), transient=True)
            self.bar.add_task(self.word, total=total)
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], completed=done)

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self.bar is not None:
            self.bar.stop()


@contextmanager
def progress(word: str) -> "Iterator[Advance | None]":
    """Yield a callback for the number of files done; None if standard error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(word)
    try:
        yield bar.advance
    finally:
        bar.close()
