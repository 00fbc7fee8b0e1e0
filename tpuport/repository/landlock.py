"""Writes that Linux refuses a process and all that it starts, whoever makes them: Landlock.

Python sees what Python code writes. A library in C++ and a shell write past it.
"""

import ctypes
import os
import struct
import sys
from collections.abc import Iterable

# System calls, which have the same numbers on all architectures, and their constants.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION, _PATH_BENEATH, _NO_NEW_PRIVILEGES = 1, 1, 38
# Rights to a file, and those to what is in a folder: write and truncate; remove, make, move.
_OF_FILE = 1 << 1 | 1 << 14
_OF_FOLDER = _OF_FILE | sum(1 << bit for bit in range(4, 14))
# The first version that knows of all these: Linux 6.2.
_NEEDED = 3


def refuse_writes_outside(folders: Iterable[str]) -> bool:
    """Let this thread, and all that it starts, change files only below some folders until it ends.

    Args:
        folders: Folders, or files; those that are not there are left out.

    Returns:
        Whether the kernel does so: if not, nothing has changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION) < _NEEDED:
        return False
    rules = library.syscall(_CREATE, struct.pack("=Q", _OF_FOLDER), ctypes.c_size_t(8), 0)
    if rules < 0:
        return False
    try:
        for path in folders:
            _allow(library, rules, path)
        return (
            library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
            and library.syscall(_RESTRICT, rules, 0) == 0
        )
    finally:
        os.close(rules)


def _allow(library: ctypes.CDLL, rules: int, path: str) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights = _OF_FOLDER if os.path.isdir(path) else _OF_FILE
        rule = struct.pack("=Qi", rights, place)
        library.syscall(_ADD, rules, _PATH_BENEATH, rule, 0)
    finally:
        os.close(place)
