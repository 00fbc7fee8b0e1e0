"""`tpuport.compile_cache`: programs compiled once, for all processes, in a folder."""

import contextlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from jax._src import compilation_cache
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from tpuport.aot.cache import cache_folder
from tpuport.foundation.errors import UsageError

GIB = 2**30
_SHOWN = 10
_FOLDER = "jax_compilation_cache_dir"
_OF_XLA = "jax_persistent_cache_enable_xla_caches"
_ASKED = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"
_SAVED = "/jax/compilation_cache/compile_time_saved_sec"
_DONE = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class CacheRecord:
    """One program that was needed.

    Attributes:
        name: Its name in jax, such as `Planner_forward`.
        hit: Whether it was loaded from the cache and not compiled.
        seconds: Seconds that loading or compiling took.
        thread: The id of the thread that loaded or compiled it.
    """

    name: str
    hit: bool
    seconds: float
    thread: int = field(default=0, compare=False, repr=False)


@dataclass
class CacheReport:
    """The hits and misses of a compile cache.

    Attributes:
        directory: Its folder.
        programs: Each program that was loaded or compiled, in order.
        saved: Seconds of compilation that were not needed. jax notes the time of a compilation in
            full seconds, rounded down, so this is a lower bound.
    """

    directory: str
    programs: list[CacheRecord] = field(default_factory=list)
    saved: float = 0.0

    @property
    def hits(self) -> int:
        """Return the number of programs that were loaded."""
        return sum(program.hit for program in self.programs)

    @property
    def misses(self) -> int:
        """Return the number of programs that were compiled."""
        return len(self.programs) - self.hits

    @property
    def seconds(self) -> float:
        """Return the seconds that loading and compiling took together."""
        return sum(program.seconds for program in self.programs)

    def __str__(self) -> str:
        lines = [
            f"compile cache {self.directory}",
            f"{self.hits} of {len(self.programs)} programs loaded, {self.misses} compiled, in"
            f" {self.seconds:.1f} s; at least {self.saved:.0f} s saved",
        ]
        slowest = sorted(self.programs, key=lambda program: -program.seconds)
        for program in slowest[:_SHOWN]:
            word = "loaded" if program.hit else "compiled"
            lines.append(f"  {word:8} {program.seconds:7.2f} s  {program.name}")
        if len(slowest) > _SHOWN:
            lines.append(f"  and {len(slowest) - _SHOWN} more")
        return "\n".join(lines)


@contextlib.contextmanager
def watching(report: CacheReport) -> Iterator[None]:
    """Record in a report which programs are loaded and compiled in the block, in all threads."""
    here = threading.local()
    active = True

    def happened(event: str, **details: Any) -> None:
        del details
        if event == _ASKED:
            here.hit = False
        elif event == _HIT:
            here.hit = True

    def lasted(event: str, duration_secs: float, **details: Any) -> None:
        if not active:
            return
        if event == _SAVED:
            report.saved += max(0.0, duration_secs)
        elif event == _DONE:
            name = str(details.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
            hit, here.hit = getattr(here, "hit", False), False
            report.programs.append(CacheRecord(name, hit, duration_secs, threading.get_ident()))

    jax.monitoring.register_event_listener(happened)
    jax.monitoring.register_event_duration_secs_listener(lasted)
    try:
        yield
    finally:
        active = False
        jax.monitoring.unregister_event_listener(happened)
        jax.monitoring.unregister_event_duration_listener(lasted)


class CompileCache:
    """jax's compile cache, active from construction until `close` or the end of a `with` block.

    Made by `tpuport.compile_cache`.

    Attributes:
        directory: The folder, or an address such as `gs://bucket/folder`.
        report: Its hits and misses so far.
    """

    def __init__(
        self, directory: str | Path | None, max_size: int | None, min_compile_seconds: float
    ) -> None:
        self.directory = _ready(directory, max_size)
        self.report = CacheReport(self.directory)
        self._closing = contextlib.ExitStack()
        values = {
            "jax_enable_compilation_cache": True,
            _FOLDER: self.directory,
            "jax_compilation_cache_max_size": -1 if max_size is None else max_size,
            "jax_persistent_cache_min_compile_time_secs": min_compile_seconds,
            # Any size is kept: the compile time decides, by `min_compile_seconds`.
            "jax_persistent_cache_min_entry_size_bytes": -1,
            # A damaged or unwritable entry warns, and the program is compiled.
            "jax_raise_persistent_cache_errors": False,
            # The folder of XLA's own cache, for GPUs, would be part of each key: a copy of the
            # folder, or one that is mounted elsewhere, would have none of its programs.
            _OF_XLA: os.environ.get(_OF_XLA.upper(), "none"),
        }
        before = {name: getattr(jax.config, name) for name in values}
        self._closing.enter_context(_check_sums())
        self._closing.callback(_configure, before)
        _configure(values)
        self._closing.enter_context(watching(self.report))

    def close(self) -> None:
        """Restore jax's configuration; the report stays."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def compile_cache(
    directory: str | Path | None = None,
    *,
    max_size: int | None = 10 * GIB,
    min_compile_seconds: float = 0.0,
) -> CompileCache:
    """Keep compiled programs in a folder, and load those that are there already.

    The cache is active at once, for the rest of the process, or as `with tpuport.compile_cache():`,
    in the block. All threads share the setting. The key of an entry covers the program, the
    versions of jaxlib and of the compiler (libtpu), compiler options, XLA_FLAGS and
    LIBTPU_INIT_ARGS, and the devices. docs/compile_cache.md has more.

    Args:
        directory: The folder; made if it is missing. If left out, `JAX_COMPILATION_CACHE_DIR`, or
            `tpuport/compiled` in the user's cache folder. An address such as `gs://bucket/folder`
            needs the package etils.
        max_size: Bytes to keep at most; programs that were not used for the longest time make
            room. None for no limit.
        min_compile_seconds: Programs that compile faster are not kept.

    Returns:
        The cache: its `report` says what was loaded and what was compiled.

    Raises:
        UsageError: the folder cannot be written to, or an argument is out of range.
    """
    if max_size is not None and max_size <= 0:
        raise UsageError(f"max_size: expected a number of bytes above 0 or None, got {max_size}")
    if min_compile_seconds < 0:
        raise UsageError(f"min_compile_seconds: expected 0 or more, got {min_compile_seconds}")
    return CompileCache(directory, max_size, min_compile_seconds)


@contextlib.contextmanager
def _check_sums() -> Iterator[None]:
    """Have jax pack programs by zlib, whose check sum tells a damaged one from an intact one.

    Where the package zstandard is installed jax 0.10.2 packs by it, and asks for no check sum: a
    byte that a disk changed would be run. Goes when jax asks for one
    (tests/running/test_compile_cache.py has the test that says so).
    """
    packers = [name for name in ("zstd", "zstandard") if hasattr(compilation_cache, name)]
    before = {name: getattr(compilation_cache, name) for name in packers}
    for name in packers:
        setattr(compilation_cache, name, None)
    try:
        yield
    finally:
        for name, packer in before.items():
            setattr(compilation_cache, name, packer)


def _configure(values: dict[str, Any]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    # jax opens the folder when it first compiles, and asks for it only once.
    reset_cache()


def _ready(directory: str | Path | None, max_size: int | None) -> str:
    """Return the folder, made if need be and checked to be usable."""
    chosen: str | Path = (
        directory or getattr(jax.config, _FOLDER) or cache_folder.default_directory()
    )
    if "://" in str(chosen):
        return str(chosen)
    folder = Path(chosen).expanduser().absolute()
    try:
        # jax runs the programs in it unchecked, so nobody else may write there.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the compile cache cannot be made: {error}; name a folder that can be written to"
        ) from error
    if not cache_folder.is_writable(folder):
        raise UsageError(f"the compile cache {folder} cannot be written to; name another folder")
    if max_size is not None:
        if importlib.util.find_spec("filelock") is None:
            raise UsageError(
                "a limit on the size needs the package filelock: pip install filelock, or pass"
                " max_size=None"
            )
        cache_folder.stamp(folder)
    return str(folder)
