"""A copy of a repository for its code to run in, so that the repository stays as it is."""

import os
import shutil
import stat
from pathlib import Path

_LEFT_OUT = {".git", ".hg", "__pycache__", ".venv", "node_modules"}
# Larger files are links, and so is what comes after so much in all: the script may read them, and
# writing there is refused.
_LARGEST, _MOST = 16 * 2**20, 2**30
# What Python finds by where it lies is copied in any case.
_CODE = {".py", ".pyi", ".so"}


def copy_repository(root: Path, to: Path, *, without: Path) -> list[str]:
    """Copy a repository anew.

    Args:
        root: The repository.
        to: The folder of the copy; what it holds is deleted.
        without: A folder that is not copied, which may lie in the repository.

    Returns:
        The files and folders that could not be read, relative to it.
    """
    _delete(to)
    inside, copied, unread = os.path.realpath(without), 0, []

    def is_left_out(path: str) -> bool:
        real = os.path.realpath(path)
        if real == inside or real.startswith(inside + os.sep):
            return True
        # A pipe or a socket has somebody at its other end, and a device is no file to copy.
        mode = os.lstat(path).st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))

    def ignored(folder: str, names: list[str]) -> set[str]:
        paths = {name: os.path.join(folder, name) for name in names}
        return {name for name, path in paths.items() if name in _LEFT_OUT or is_left_out(path)}

    def copy(source: str, target: str) -> str:
        nonlocal copied
        size = os.path.getsize(source)
        if size > _LARGEST or (copied + size > _MOST and Path(source).suffix not in _CODE):
            os.symlink(os.path.realpath(source), target)
            return target
        copied += size
        return shutil.copy2(source, target)

    try:
        shutil.copytree(root, to, symlinks=True, ignore=ignored, copy_function=copy)
    except shutil.Error as error:
        unread = [os.path.relpath(source, root) for source, *_ in error.args[0]]
    _mend(root, to)
    return sorted(unread)


def _mend(root: Path, to: Path) -> None:
    """Let a copy be written to, and its links lead where those of the repository do."""
    for folder, names, files in os.walk(to):
        _let_owner_write(folder)
        for path in (os.path.join(folder, name) for name in (*names, *files)):
            if not os.path.islink(path):
                _let_owner_write(path)
            elif not os.path.exists(path):  # it leads out of the repository, and was relative
                original = os.path.realpath(os.path.join(root, os.path.relpath(path, to)))
                os.unlink(path)
                os.symlink(original, path)


def _let_owner_write(path: str) -> None:
    """Let the script write in a copy of what may not be written to, and the next call delete it."""
    mode = os.stat(path).st_mode
    if not mode & stat.S_IWUSR:
        os.chmod(path, stat.S_IMODE(mode) | stat.S_IWUSR)


def _delete(folder: Path) -> None:
    """Delete a folder, with what a script took its own permissions from."""
    if not folder.exists():
        return
    for path, _, _ in os.walk(folder):
        os.chmod(path, stat.S_IRWXU)
    shutil.rmtree(folder)
