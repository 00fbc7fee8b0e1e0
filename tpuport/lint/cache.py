"""Results kept between runs, by what they follow from: content, question and version of tpuport."""

import hashlib
import json
import os
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from tpuport.version import __version__

# Folders whose code decides what is found.
_DECIDING = ("source", "rules", "lint")
_DAY = 24 * 3600
_MAX_AGE = 30 * _DAY
_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# This folder holds results of tpuport; it can be deleted at any time.
"""


@cache
def fingerprint() -> str:
    """Of everything but the linted files that results follow from: tpuport's code and Python's."""
    digest = hashlib.sha256(f"{__version__} {sys.version}".encode())
    root = Path(__file__).parent.parent
    for folder in _DECIDING:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"\0{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Cache:
    """Results of one version of tpuport in a folder, each a file of JSON under its check sum.

    Several runs may use the folder at once: files appear whole or not at all, and what cannot be
    read counts as absent. A folder that cannot be written to keeps nothing.

    Args:
        folder: Where; made when something is kept. None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._root = folder
        self._folder = folder / fingerprint() if folder else None
        self._broken = False
        self._made = False

    def key(self, *parts: str) -> str:
        """The name under which the answer to a question is kept."""
        return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:40]

    def get(self, key: str) -> Any | None:
        """What is kept, or None."""
        if self._folder is None:
            return None
        try:
            with open(self._path(key), "rb") as file:
                seal, _, body = file.read().partition(b"\n")
            return json.loads(body) if seal == _seal(key, body) else None
        except (OSError, ValueError):
            return None

    def put(self, key: str, result: Any) -> None:
        """Keep a result."""
        if self._folder is None or self._broken:
            return
        try:
            self._make()
            path = self._path(key)
            path.parent.mkdir(exist_ok=True)
            body = json.dumps(result).encode()
            write_atomically(path, _seal(key, body) + b"\n" + body)
        except OSError:
            # A read-only folder is no reason to fail: the next run does the work again.
            self._broken = True

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key[2:]}.json"

    def _make(self) -> None:
        if self._made:
            return
        assert self._root is not None
        assert self._folder is not None
        self._made = True
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, text in ((".gitignore", "*\n"), ("CACHEDIR.TAG", _TAG)):
            if not (self._root / name).exists():
                write_atomically(self._root / name, text.encode())
        self._prune(self._root)

    def _prune(self, root: Path) -> None:
        """Delete what is too old to be asked for again, at most once a day."""
        stamp = root / ".pruned"
        now = time.time()
        if stamp.exists() and now - stamp.stat().st_mtime < _DAY:
            return
        stamp.touch()
        for path in root.glob("*/*/*.json"):
            if now - path.stat().st_mtime > _MAX_AGE:
                path.unlink(missing_ok=True)


def _seal(key: str, body: bytes) -> bytes:
    """What tells a whole record from one that was cut short or changed."""
    return hashlib.sha256(key.encode() + body).hexdigest().encode()


def write_atomically(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Write a file so that it is there whole or stays as it was.

    Args:
        path: The file; of a link the file that it leads to.
        data: Its content.
        mode: Its permissions; those of a new file if left out.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, _new_mode() if mode is None else mode)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@cache
def _new_mode() -> int:
    """What a new file may be read and written by; `mkstemp` lets only the owner."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
