"""Equal programs of one process, compiled once.

A script whose model cannot be one program has a program for each of its blocks, and twelve equal
blocks have twelve equal programs: their weights are arguments. jax knows a program by the function
that it was traced from, and would compile each of them.
"""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface
from jax.experimental.compilation_cache.compilation_cache import reset_cache

_ENABLED = "jax_enable_compilation_cache"
_FOLDER = "jax_compilation_cache_dir"
_SHORTEST = "jax_persistent_cache_min_compile_time_secs"
# Loading a program takes some 10 ms, and packing one for it as long again.
_SECONDS = 0.1
_BYTES = 2**30
_here = threading.local()


class _ProgramMemory(CacheInterface):
    """Programs by jax's keys, in memory; jax's own cache takes over where it gets a folder."""

    _path = Path("memory")

    def __init__(self, shortest: float) -> None:
        self._shortest = shortest
        self._entries: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> Any:
        """Return a program as jax packed it, None if it is not there."""
        folder = self._of_folder()
        if folder is not None:
            return folder.get(key)
        return None if getattr(_here, "aside", False) else self._entries.get(key)

    def put(self, key: str, value: bytes) -> None:
        """Keep a program; the oldest ones make room."""
        with self._lock:
            self._entries[key] = value
            while sum(map(len, self._entries.values())) > _BYTES:
                del self._entries[next(iter(self._entries))]

    def _of_folder(self) -> CacheInterface | None:
        """Return jax's cache if the script has named a folder since."""
        if not getattr(jax.config, _FOLDER):
            return None
        with self._lock:
            if compilation_cache._cache is self:
                jax.config.update(_SHORTEST, self._shortest)
                reset_cache()
                compilation_cache._initialize_cache()
            return compilation_cache._cache


@contextlib.contextmanager
def not_from_memory() -> Iterator[None]:
    """Load nothing from memory in this thread: jax cannot load a program for a described chip."""
    _here.aside, before = True, getattr(_here, "aside", False)
    try:
        yield
    finally:
        _here.aside = before


@contextlib.contextmanager
def equal_programs_once() -> Iterator[None]:
    """Compile equal programs of the block once, where jax has no folder to keep programs in."""
    used = getattr(jax.config, _FOLDER) or compilation_cache._cache is not None
    if used or not getattr(jax.config, _ENABLED):
        yield
        return
    before = getattr(jax.config, _SHORTEST)
    memory = _ProgramMemory(before)
    jax.config.update(_SHORTEST, _SECONDS)
    compilation_cache._cache = memory
    try:
        yield
    finally:
        jax.config.update(_SHORTEST, before)
        if compilation_cache._cache is memory:
            reset_cache()
