"""Atomic writes of files and directories.

Everything is written under a temporary name next to the target, and then takes the target's place
in one step. A process that is killed leaves the old files and the temporary ones (`.NAME.tmp-...`,
to be deleted by hand). `replacing_file` and `replacing_folder` are for results that took long: they
survive a power cut, if the block writes with `flushed`, and their errors say what is left.
"""

import contextlib
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tpuport.foundation.errors import CheckpointError

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file replaces `path` at the end of the block.

    A link is replaced, not followed. Nothing is flushed to the disk.

    Raises:
        OSError: the file cannot be written; the existing file is kept.
    """
    temporary = _temporary(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Write a file atomically: an error leaves the old file unchanged.

    Args:
        path: the file; a link is followed to its target.
        data: the new content.
        mode: the permissions; those of a new file if left out.

    Raises:
        OSError: the file cannot be written.
    """
    # Nobody may read what its permissions will forbid before the file has them.
    opener = partial(os.open, mode=0o666 if mode is None else 0o600)
    with replacing(Path(os.path.realpath(path))) as temporary:
        with open(temporary, "xb", opener=opener) as out:
            out.write(data)
        if mode is not None:
            os.chmod(temporary, mode)


@contextlib.contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file replaces `path`, as `replacing` does.

    Raises:
        CheckpointError: the disk is full, or the file cannot be written.
    """
    with explained(path):
        with replacing(path) as temporary:
            yield temporary
        _flush_folder(path.parent)


@contextlib.contextmanager
def replacing_folder(path: Path, keep: Callable[[str], bool]) -> Iterator[Path]:
    """Yield a temporary directory that replaces `path` at the end of the block.

    Args:
        path: The directory to replace.
        keep: Returns whether an entry of the old directory is kept unchanged in the new one.

    Raises:
        CheckpointError: the disk is full, or a file cannot be written.
    """
    temporary = _temporary(path)
    with explained(path):
        try:
            temporary.mkdir()
            if path.exists():
                _link_kept(path, temporary, keep)
            yield temporary
            _flush_folder(temporary)
            _swap(temporary, path)
            _flush_folder(path.parent)
        finally:
            _remove(temporary)


@contextlib.contextmanager
def flushed(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, and flush it to the disk at the end of the block."""
    with path.open("xb") as out:
        yield out
        out.flush()
        os.fsync(out.fileno())


def _temporary(path: Path) -> Path:
    return path.parent / f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into an error that says what is left on disk and what to do.

    Raises:
        CheckpointError: the disk is full, or the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        kept = "the old one is as it was" if path.exists() else "nothing was left there"
        what, remedy = "it cannot be written", "see that its folder is there and may be written to"
        if is_full(error):
            what, remedy = "the disk is full", "make room there, and start again"
        msg = f"{path} was not saved: {what} ({error.strerror}); {kept}. What to do: {remedy}"
        raise CheckpointError(msg) from error


def is_full(error: Exception) -> bool:
    """Return whether an error is that of a full disk, or of a file that may not grow."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    # C++ libraries have the number in their text, such as tensorstore, with which orbax writes.
    return any(f"os_error_code='{number}'" in str(error) for number in _FULL)


def _link_kept(old: Path, new: Path, keep: Callable[[str], bool]) -> None:
    """Link the kept files of a directory into the new one, without copying them."""
    for entry in old.iterdir():
        if not keep(entry.name):
            continue
        if entry.is_dir():
            shutil.copytree(entry, new / entry.name, copy_function=_link)
        else:
            _link(str(entry), str(new / entry.name))


def _link(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)  # no hard links here, or across file systems


def _swap(new: Path, old: Path) -> None:
    """Let `new` take the place of `old`, whose files are under the name `new` afterwards."""
    if not old.exists():
        os.rename(new, old)
    elif not _exchanged(new, old):
        # Two steps: between them the old files exist under the aside name only.
        aside = _temporary(old)
        os.rename(old, aside)
        os.rename(new, old)
        _remove(aside)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two names in one step, and return whether the system can.

    Python has no function for it. Two renames would leave a moment without a directory, and a run
    that is killed then would have lost the name of its weights.
    """
    import ctypes  # only here: a lint should not load it

    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = (os.fsencode(one), os.fsencode(other))
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False  # this file system cannot
    raise OSError(code, os.strerror(code))


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _flush_folder(path: Path) -> None:
    """Flush a directory: a new name survives a power cut only once its directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
