"""What a client of the server may ask for: paths in one folder, some seconds, so much output."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuport.foundation.errors import UsageError
from tpuport.repository.processes import run_command

MOST_SECONDS = 600.0
MOST_CHARACTERS = 20_000


@dataclass(frozen=True)
class CommandOutcome:
    """How a command ended.

    Attributes:
        status: Its exit status; None if it was stopped after its time.
        output: What it wrote to standard output, shortened in the middle.
        errors: The last lines of what it wrote to standard error.
    """

    status: int | None
    output: str
    errors: str


@dataclass(frozen=True)
class Bounds:
    """The limits of a server.

    Attributes:
        folder: The folder that paths have to be in; commands run there.
        seconds: The longest time of a command.
        characters: The most characters of output.
    """

    folder: Path
    seconds: float = MOST_SECONDS
    characters: int = MOST_CHARACTERS

    def path(self, name: str) -> str:
        """Return a path of the folder, relative to it, with symbolic links followed.

        Raises:
            UsageError: it leads out of the folder, or does not exist.
        """
        root = self.folder.resolve()
        try:
            found = (root / name).resolve(strict=True)
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(f"There is no {name!r} in the folder ({error}).") from None
        if not found.is_relative_to(root):
            raise UsageError(f"{name!r} leads out of the folder that this server is for.")
        # Relative, and never taken for an option.
        relative = found.relative_to(root)
        return f"./{relative}" if str(relative).startswith("-") else str(relative)

    def run(self, arguments: Sequence[str], seconds: float | None) -> CommandOutcome:
        """Run a command of tpuport in the folder, and stop it and all that it started in time.

        Args:
            arguments: The command and its options.
            seconds: The time that it may take; the server's limit if that is less.
        """
        limit = self.seconds if seconds is None else max(0.0, min(seconds, self.seconds))
        with tempfile.TemporaryDirectory() as logs:
            log = Path(logs, "log")
            found = run_command(arguments, folder=self.folder.resolve(), log=log, seconds=limit)
        errors = self.shortened(found.tail)
        if found.status is None:
            errors = f"Stopped after {limit:g} s, with all that it started.\n{errors}"
        return CommandOutcome(found.status, self.shortened(found.output), errors)

    def shortened(self, text: str) -> str:
        """Return text with its middle left out, and a notice there, if it is long."""
        left_out = len(text) - self.characters
        if left_out <= 0:
            return text
        half = self.characters // 2
        return f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
