"""The folder of jax's compile cache as files: where it is, what is in it, what is damaged.

Imports neither jax nor torch: `tpuport doctor` looks at it without.
"""

import os
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# As jax writes them (jax/_src/lru_cache.py, 0.10.2): the program, and when it was last used.
_PROGRAM = "-cache"
_USED = "-atime"
_PIECE = 1 << 20
_ZLIB = 0x78
_ZSTANDARD = bytes.fromhex("28b52ffd")
_RIGHT_AFTER = 1_000_000_000


@dataclass(frozen=True)
class CacheEntry:
    """One compiled program in the folder.

    Attributes:
        path: Its file.
        program: The name of the program, without the key.
        size: In bytes.
    """

    path: Path
    program: str
    size: int


def default_directory(environment: Mapping[str, str] | None = None) -> Path:
    """Return the default folder of compiled programs: `JAX_COMPILATION_CACHE_DIR`, else one in the
    user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`).

    Args:
        environment: The environment variables; those of the process if left out.
    """
    environment = os.environ if environment is None else environment
    chosen = environment.get("JAX_COMPILATION_CACHE_DIR")
    if chosen:
        return Path(chosen)
    base = environment.get("XDG_CACHE_HOME")
    # The XDG base directory specification: a path that is not absolute is to be ignored.
    home = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return home / "tpuport" / "compiled"


def entries(directory: Path) -> list[CacheEntry]:
    """Return the programs in a folder, by name; none if there is no such folder."""
    found = []
    for path in sorted(directory.glob(f"*{_PROGRAM}")):
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            # Another process has made room since.
            continue
        found.append(CacheEntry(path, path.name.removesuffix(_PROGRAM).rpartition("-")[0], size))
    return found


def is_whole(path: Path) -> bool:
    """Return whether an entry can be unpacked to its end and matches its check sum.

    An entry in zstandard's format counts as intact: it has no check sum. jax writes such entries
    outside of `tpuport.compile_cache` where that package is installed, and reads them there only.
    """
    with path.open("rb") as file:
        piece = file.read(_PIECE)
        if not piece or piece[0] != _ZLIB:
            return piece.startswith(_ZSTANDARD)
        unpack = zlib.decompressobj()
        try:
            while piece:
                unpack.decompress(piece)
                piece = file.read(_PIECE)
        except zlib.error:
            return False
    return unpack.eof


def damaged(directory: Path) -> Iterator[Path]:
    """Find the entries that a process left unfinished or a disk changed.

    jax warns about each, compiles anew and keeps the damaged file, so the program is compiled in
    every process from then on. Reads all of the folder.
    """
    for entry in entries(directory):
        try:
            if not is_whole(entry.path):
                yield entry.path
        except FileNotFoundError:
            continue


def remove_damaged(directory: Path) -> int:
    """Delete the damaged entries and return their number."""
    count = 0
    for path in list(damaged(directory)):
        path.unlink(missing_ok=True)
        _time_of(path).unlink(missing_ok=True)
        count += 1
    return count


def stamp(directory: Path) -> None:
    """Write a time of last use for each entry that has none.

    A folder that was filled without a limit on its size has no times, and jax, asked for a limit,
    fails on the first one that is missing and keeps nothing from then on.
    """
    for entry in entries(directory):
        path = _time_of(entry.path)
        if not path.exists():
            path.write_bytes(time.time_ns().to_bytes(8, "little"))


def _time_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(_PROGRAM) + _USED)


def was_used(entry: CacheEntry) -> bool:
    """Return whether an entry was loaded after it was written; known only with a size limit."""
    try:
        used = int.from_bytes(_time_of(entry.path).read_bytes(), "little")
        written = entry.path.stat().st_mtime_ns
    except FileNotFoundError:
        return False
    # jax notes the time of writing too, right after it.
    return used - written > _RIGHT_AFTER


def is_writable(directory: Path) -> bool:
    """Return whether this process may write into the folder."""
    return os.access(directory, os.W_OK | os.X_OK)


def open_to_others(directory: Path) -> bool:
    """Return whether other users may write into the folder, whose programs run unchecked."""
    return os.name == "posix" and bool(directory.stat().st_mode & 0o022)
