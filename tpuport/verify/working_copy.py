"""A copy of a folder that only one script works in, made anew after each run of it."""

import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from tpuport.foundation.errors import UsageError

FileStamp = tuple[int, int]


def find_links(roots: Iterable[Path], skipped: Iterable[str]) -> dict[Path, str]:
    """Return the links below some folders, and where each leads."""
    found = {}
    for root in roots:
        for folder, names, files in os.walk(root):
            paths = [os.path.join(folder, name) for name in (*names, *files)]
            found.update({Path(path): os.readlink(path) for path in paths if os.path.islink(path)})
            names[:] = [name for name in names if name not in skipped]
    return found


def put_back(
    files: Mapping[Path, FileStamp],
    folders: Iterable[Path],
    links: Mapping[Path, str],
    original: Path,
) -> None:
    """Let a copy have again what a run changed or deleted in it.

    Args:
        files: Its files, each with what shows that one was written, as they were before the run.
        folders: Its folders before the run.
        links: Its links before the run, and where each leads.
        original: The folder that the current one is a copy of.

    Raises:
        UsageError: a file that a run changed is not in `original`.
    """
    here = Path.cwd()
    for folder in sorted(folders):
        folder.mkdir(parents=True, exist_ok=True)
    for path, stamp in files.items():
        if _stamp(path) == stamp:
            continue
        source = original / path.relative_to(here)
        if not source.is_file():
            raise UsageError(
                f"{source} is not there, and a run changed its copy {path}. Compare in a new copy."
            )
        path.unlink(missing_ok=True)
        shutil.copy2(source, path)
        path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)
    for path, target in links.items():
        if not os.path.lexists(path):
            path.symlink_to(target)
        elif not path.is_symlink() or os.readlink(path) != target:
            path.unlink()
            path.symlink_to(target)


def _stamp(path: Path) -> FileStamp | None:
    if path.is_symlink() or not path.is_file():
        return None
    seen = path.stat()
    return seen.st_mtime_ns, seen.st_size
