"""Reports that can be saved as JSON, as a page or as text."""

import io
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing


def plain_text(report: Any, width: int) -> str:
    """Return what rich prints of a report at this width, without colour codes."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, highlight=False).print(
        report
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


class SavedReport(ABC):
    """A report with `save`."""

    @abstractmethod
    def to_json(self) -> str:
        """Return the report as standard JSON, indented."""

    @abstractmethod
    def to_html(self) -> str:
        """Return the report as one self-contained HTML page."""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the report in the format of the suffix (.json, .html or .txt), and return the path.

        A reader sees the old file or the complete new one, never a part.

        Raises:
            UsageError: The suffix is none of these.
            OSError: The file cannot be written; the existing file is kept.
        """
        path = Path(path)
        writers = {".json": self.to_json, ".html": self.to_html, ".txt": self.__str__}
        writer = writers.get(path.suffix.lower())
        if writer is None:
            raise UsageError(
                f"Expected a report file ending in .json, .html or .txt, got {str(path)!r}: "
                f"the suffix chooses the format, as in report.save({path.stem + '.html'!r})."
            )
        text = writer().rstrip("\n") + "\n"
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="\n")
        return path
