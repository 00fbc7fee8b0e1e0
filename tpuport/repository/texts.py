"""Texts of other people's files, which may be anything."""

import os
import stat
from pathlib import Path

_LARGEST = 20_000_000


def read_text(path: Path) -> str:
    """Return the text of a file; an empty one for what is no file, or may not be read.

    To open a pipe would wait for somebody who writes to it, and a device may have no end.
    """
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
            return ""
        return path.read_text(errors="replace")
    except OSError:
        return ""
