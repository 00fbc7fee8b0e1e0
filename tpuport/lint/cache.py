"""Results kept between runs, keyed by file content, question and version of tpuport."""

import hashlib
import json
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from tpuport.foundation.files import write_atomically
from tpuport.foundation.version import __version__

# Folders whose code decides what is found.
_DECIDING = ("foundation", "source", "rules", "lint")
_DAY = 24 * 3600
_MAX_AGE = 30 * _DAY
_TAG = """Signature: 8a477f597d28d172789f06886806bc55
# This folder holds results of tpuport; it can be deleted at any time.
"""


@cache
def fingerprint() -> str:
    """Return a hash of all that results depend on besides the files: tpuport's code and Python."""
    digest = hashlib.sha256(f"{__version__} {sys.version}".encode())
    root = Path(__file__).parent.parent
    for folder in _DECIDING:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"\0{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Cache:
    """Results of one version of tpuport in a folder, each a JSON file with a checksum.

    Several runs may use the folder at once: files are written atomically, and an unreadable file
    counts as absent. If the folder cannot be written to, nothing is kept.

    Args:
        folder: The folder, which is made when the first result is kept. None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._root = folder
        self._folder = folder / fingerprint() if folder else None
        self._broken = False
        self._made = False

    def key(self, *parts: str) -> str:
        """Return the name under which the answer to a question is kept."""
        return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:40]

    def get(self, key: str) -> Any | None:
        """Return the kept result, or None."""
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
            # A read-only folder is no reason to fail: the next run just repeats the work.
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
        """Delete results that are too old to be used again, at most once a day."""
        stamp = root / ".pruned"
        now = time.time()
        if stamp.exists() and now - stamp.stat().st_mtime < _DAY:
            return
        stamp.touch()
        for path in root.glob("*/*/*.json"):
            if now - path.stat().st_mtime > _MAX_AGE:
                path.unlink(missing_ok=True)


def _seal(key: str, body: bytes) -> bytes:
    """Return the checksum that detects a truncated or changed record."""
    return hashlib.sha256(key.encode() + body).hexdigest().encode()
