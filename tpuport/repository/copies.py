"""A copy of a repository for its code to run in, so that the repository stays as it is."""

import os
import shutil
from pathlib import Path

_LEFT_OUT = {".git", ".hg", "__pycache__", ".venv", "node_modules"}
# Larger files are links: the script may read them, and writing there is refused.
_LARGEST = 16 * 2**20


def copy_repository(root: Path, to: Path, *, without: Path) -> None:
    """Copy a repository anew.

    Args:
        root: The repository.
        to: The folder of the copy; what it holds is deleted.
        without: A folder that is not copied, which may lie in the repository.
    """
    if to.exists():
        shutil.rmtree(to)
    inside = without.resolve()

    def ignored(folder: str, names: list[str]) -> set[str]:
        return {
            name
            for name in names
            if name in _LEFT_OUT or Path(folder, name).resolve().is_relative_to(inside)
        }

    shutil.copytree(root, to, symlinks=True, ignore=ignored, copy_function=_copy)
    # A link out of the repository that was relative to it.
    for path in to.rglob("*"):
        if path.is_symlink() and not path.exists():
            original = (root / path.relative_to(to)).resolve()
            path.unlink()
            path.symlink_to(original)


def _copy(source: str, target: str) -> str:
    if os.path.getsize(source) > _LARGEST:
        os.symlink(os.path.realpath(source), target)
        return target
    return shutil.copy2(source, target)
