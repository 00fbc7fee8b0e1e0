"""The end of a finished script: Python's own, but bounded where Python would wait for ever.

Python waits for threads, for child processes and for what is registered with `atexit`. Background
work that is stuck, such as a queue that nobody fills any more, must not keep a finished script
alive; work that makes progress, such as writing a checkpoint, is waited for.
"""

import atexit
import contextlib
import ctypes
import gc
import io
import itertools
import linecache
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NoReturn

# Seconds without progress after which background work counts as stuck, and for which one that uses
# the processor is waited for at most.
IDLE_SECONDS = 5.0
WORKING_SECONDS = 300.0
# The share of one processor below which a thread only waits or asks now and then.
_BUSY = 0.02
_POLL_SECONDS = 0.05
_KILL_SECONDS = 1.0
_CLOSE_SECONDS = 10.0
_INTERRUPTED = 130
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def finish(
    status: int,
    *,
    leaves: bool = False,
    idle: float = IDLE_SECONDS,
    working: float = WORKING_SECONDS,
) -> None:
    """Do what Python does at its end: wait for threads, call what `atexit` holds, flush.

    Threads and children that do nothing for `idle` seconds are named on standard error and left;
    the process then ends here, with its status, once the rest is done. Otherwise this returns, and
    leaving the interpreter as usual has nothing more to wait for.

    Args:
        status: The exit status.
        leaves: Whether the process ends here in any case, without what Python does after this. A
            thread of C++ that asks for Python then, as those of torch and jax do, would abort it.
        idle: Seconds without progress after which background work counts as stuck.
        working: Seconds for which work that makes progress is waited for, and `atexit` functions.
    """
    guard = _GuardThread(status, idle, working)
    guard.start()
    interrupted = False
    try:
        # What the interpreter itself calls first of all; a second call does nothing.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    except KeyboardInterrupt:
        interrupted = True
    guard.threads_ended()
    try:
        _run_exit_functions(idle, working)
    except KeyboardInterrupt:
        interrupted = True
    guard.stop()
    _flush()
    if interrupted or leaves or "libtpu" in sys.modules:
        # Threads of libtpu are not Python's, and have been seen to keep a process from ending.
        _leave(_INTERRUPTED if interrupted else status)


class _GuardThread(threading.Thread):
    """A thread that ends the process once nothing is left to wait for."""

    def __init__(self, status: int, idle: float, working: float) -> None:
        super().__init__(name="tpuport-exit", daemon=True)
        self._status, self._idle, self._working = status, idle, working
        self._ended, self._stopped = threading.Event(), threading.Event()
        # Either the main thread or the guard runs the `atexit` functions, never both.
        self._turn = threading.Lock()

    def threads_ended(self) -> None:
        """Note that the main thread has no threads to wait for; block if this guard is leaving."""
        self._turn.acquire()
        self._ended.set()
        self._turn.release()

    def stop(self) -> None:
        """Stop the guard; the main thread calls this once all is done."""
        self._stopped.set()

    def run(self) -> None:
        """Wait for the main thread while work makes progress, else end the process."""
        if not _wait(self._ended.is_set, _background, self._idle, self._working):
            self._turn.acquire()
            if not self._ended.is_set():
                self._leave_threads()
            self._turn.release()
        if self._stopped.wait(self._working):
            return
        place = _place_of(threading.main_thread().ident)
        _say(f"left while a function registered with atexit was at {place}")
        _leave(self._status)

    def _leave_threads(self) -> NoReturn:
        for thread in _background():
            _say(f"the script has ended; left thread {thread.name!r} at {_place_of(thread.ident)}")
        work = (self._idle, self._working)
        rest = threading.Thread(target=_run_exit_functions, args=work, daemon=True)
        rest.start()
        rest.join(self._working)
        _leave(self._status)


def _background() -> list[threading.Thread]:
    """Return the threads that Python waits for."""
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]


def _run_exit_functions(idle: float, working: float) -> None:
    _end_children(idle, working)
    atexit._run_exitfuncs()


def _end_children(idle: float, working: float) -> None:
    """Wait for the non-daemon processes of `multiprocessing`, but not for ever as it does."""
    module: Any = sys.modules.get("multiprocessing")
    if module is None:
        return

    def alive() -> list[Any]:
        return [child for child in module.active_children() if not child.daemon]

    if _wait(lambda: not alive(), alive, idle, working):
        return
    for child in alive():
        _say(f"the script has ended; stopped process {child.name!r} (pid {child.pid})")
        child.terminate()
    deadline = time.monotonic() + _KILL_SECONDS
    for child in alive():
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()


def _wait(
    done: Callable[[], bool], workers: Callable[[], list[Any]], idle: float, working: float
) -> bool:
    """Wait until something is done, as long as workers make progress.

    Args:
        done: Returns whether it is done.
        workers: Returns the threads or processes that are left.
        idle: Seconds without progress after which to give up.
        working: Seconds after which to give up in any case.

    Returns:
        Whether it was done.
    """
    end = time.monotonic() + working
    while time.monotonic() < end:
        left = workers()
        used = _processor_seconds(left)
        until = time.monotonic() + idle
        while time.monotonic() < until:
            if done():
                return True
            time.sleep(_POLL_SECONDS)
        now = workers()
        if len(now) == len(left) and _processor_seconds(now) - used < _BUSY * idle:
            return False
    return done()


def _processor_seconds(workers: Iterable[Any]) -> float:
    """Return the processor time that threads or processes have used (Linux only, `proc(5)`)."""
    total = 0
    for worker in workers:
        is_thread = isinstance(worker, threading.Thread)
        path = f"/proc/self/task/{worker.native_id}" if is_thread else f"/proc/{worker.pid}"
        with contextlib.suppress(OSError), open(f"{path}/stat", encoding="utf-8") as file:
            # The second field, the name in brackets, may contain spaces and brackets.
            fields = file.read().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def _place_of(thread: int | None) -> str:
    """Describe where a thread is: its innermost line outside of Python's own library."""
    frame = sys._current_frames().get(thread or 0)
    frames: list[FrameType] = [one for one, _ in traceback.walk_stack(frame)] if frame else []
    if not frames:
        return "an unknown place"
    outside = (f for f in frames if not f.f_code.co_filename.startswith(_STANDARD_LIBRARY))
    found = next(outside, frames[0])
    code, line = found.f_code, found.f_lineno
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f": {text}" if text else "")


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"tpuport run: {line}\n")
        sys.stderr.flush()


def _close_files() -> None:
    """Close what the script has left open, as Python does at its end: archives, then files."""
    archives = getattr(sys.modules.get("zipfile"), "ZipFile", ())
    standard = {id(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)}
    standard |= {id(getattr(one, "buffer", None)) for one in (sys.stdin, sys.stdout, sys.stderr)}
    # Closing a file closes what is below it, and first writes what it has.
    kinds: tuple[Any, ...] = (archives, io.TextIOBase, io.BufferedIOBase)
    found: list[list[Any]] = [[] for _ in kinds]
    # There may be a million objects, of a few thousand classes, which live as long as they do.
    known: dict[int, list[list[Any]]] = {}
    for one in gc.get_objects():
        of = type(one)  # an object may make up what its class is
        lists = known.get(id(of))
        if lists is None:
            pairs = zip(kinds, found, strict=True)
            lists = known[id(of)] = [held for kind, held in pairs if issubclass(of, kind)]
        for held in lists:
            held.append(one)
    for one in itertools.chain.from_iterable(found):
        if id(one) not in standard:
            with contextlib.suppress(OSError, ValueError, AttributeError):
                one.close()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _leave(status: int) -> NoReturn:
    """End the process now. What is buffered, in Python and in C, is written."""
    _flush()
    # A thread that is left may be writing, and hold a file for ever.
    closing = threading.Thread(target=_close_files, daemon=True)
    closing.start()
    closing.join(_CLOSE_SECONDS)
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).fflush(None)
    os._exit(status & 0xFF)
