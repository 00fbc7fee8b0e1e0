"""Watches the worker: takes its results as they come, and ends it where a job hangs."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpuport.foundation.reporting.json_codec import decoded
from tpuport.measurement.records import Device, FailedJob, Measurements, Result

_MODULE = "tpuport.measurement.worker"
# What a process needs to end and to give its devices back.
_GRACE = 10.0

# Called with what is being done, how much is done, and how much there is.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class TimeLimits:
    """How long things may take, in seconds.

    Attributes:
        start: Until the worker has its devices.
        job: A job.
        total: Everything; no job begins later.
    """

    start: float = 120.0
    job: float = 120.0
    total: float = 600.0


@dataclass
class _Tally:
    """What is known so far."""

    device: Device | None = None
    jobs: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    troubles: list[FailedJob] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    current: str | None = None
    finished: bool = False

    def read(self, event: dict[str, Any]) -> None:
        """Take one event of the worker."""
        if "jobs" in event:
            self.device, self.jobs = decoded(Device, event["device"]), event["jobs"]
        elif "begins" in event:
            self.current = event["begins"]
        elif "result" in event:
            self.results.append(decoded(Result, event["result"]))
        elif "error" in event:
            self.troubles.append(FailedJob(event["job"], event["error"], ""))
        elif "ends" in event:
            self.seconds[event["ends"]] = event["seconds"]
            self.done.append(event["ends"])
            self.current = None
        elif "refused" in event:
            self.troubles.append(FailedJob("devices", event["refused"], ""))
            self.finished = True
        else:
            self.finished = True

    @property
    def left(self) -> list[str]:
        """Return the jobs that have not been tried."""
        return [name for name in self.jobs if name not in self.done]

    def give_up(self, text: str, fix: str) -> None:
        """Note that the job that runs, or the start, came to nothing."""
        job = self.current or "devices"
        self.troubles.append(FailedJob(job, text, fix))
        self.results = [one for one in self.results if one.job != job]
        if self.current is not None:
            self.done.append(self.current)
        self.current = None


def watch(
    limits: TimeLimits,
    *,
    only: Sequence[str] = (),
    targets: Sequence[str] = (),
    progress: Progress = lambda what, done, total: None,
    command: Sequence[str] = (sys.executable, "-m", _MODULE),
) -> Measurements:
    """Run the jobs in a process of their own, and start another one after a job that hangs.

    Args:
        limits: How long things may take.
        only: Jobs to run; all if empty.
        targets: Programs of the user, as `tpuport compile` takes them; those of the recipes that
            are in the current folder if empty.
        progress: Called when a job begins.
        command: Command of the worker.
    """
    found, end = _Tally(), time.monotonic() + limits.total
    while not found.finished:
        options = ["--only", *only, "--target", *targets, "--done", *found.done]
        before = len(found.done)
        _watch_one(found, _Worker(command, options), limits, end, progress)
        if not found.finished and (len(found.done) == before or time.monotonic() >= end):
            break
    for name in found.left:
        text = f"not begun: {limits.total:.0f} s were over, or the devices were not given back"
        found.troubles.append(FailedJob(name, text, "tpuport doctor --measure --minutes 30"))
    return Measurements(
        found.device, tuple(found.results), tuple(found.troubles), dict(found.seconds)
    )


def _watch_one(
    found: _Tally, started: "_Worker", limits: TimeLimits, end: float, progress: Progress
) -> None:
    """Take the events of one worker until it is through, ends or hangs."""
    with started as worker:
        limit = limits.start
        deadline = time.monotonic() + limit
        while not found.finished:
            event = worker.next(max(0.0, min(deadline, end) - time.monotonic()))
            if event is _NOTHING:
                found.give_up(*_hung(found.current, limit, over=end < deadline))
                return
            if event is None:
                found.give_up(*_died(found.current, worker))
                return
            found.read(event)
            if "begins" in event:
                limit = limits.job
                deadline = time.monotonic() + limit
                progress(event["begins"], len(found.done), len(found.jobs))
        worker.is_through = True


def _hung(job: str | None, limit: float, *, over: bool) -> tuple[str, str]:
    """Return what happened to a job from which nothing came, and what to do."""
    if over:
        return "ended in the middle: the time for everything was over", _MORE_TIME
    if job is None:
        return (
            f"the devices did not answer within {limit:.0f} s: another process may hold them, or"
            " they are part of a slice of several hosts, which all have to start",
            "sudo lsof -w /dev/accel* /dev/vfio/*",
        )
    return f"it hung: ended after {limit:.0f} s", "tpuport doctor --measure --limit 600"


_MORE_TIME = "tpuport doctor --measure --minutes 30"


def _died(job: str | None, worker: "_Worker") -> tuple[str, str]:
    status = worker.process.wait(_GRACE)
    how = f"signal {-status}" if status < 0 else f"status {status}"
    last = worker.last_words()
    what = "the process" if job is None else "it took the process with it, which"
    return f"{what} ended with {how}: {last}", "JAX_PLATFORMS=cpu tpuport doctor --measure"


_NOTHING: Any = object()


class _Worker:
    """A process that writes events to a pipe; ended, with all it started, at the end of a block."""

    def __init__(self, command: Sequence[str], options: Sequence[str]) -> None:
        reader, writer = os.pipe()
        self._events: queue.Queue[Any] = queue.Queue()
        self._errors: list[str] = []
        self.is_through = False
        try:
            self.process = subprocess.Popen(
                [*command, "--to", str(writer), *options],
                pass_fds=(writer,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        finally:
            os.close(writer)
        self._threads = [
            threading.Thread(target=self._read_events, args=(reader,), daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read_events(self, reader: int) -> None:
        with os.fdopen(reader, encoding="utf-8") as lines:
            for line in lines:
                self._events.put(json.loads(line))
        self._events.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._errors = [*self._errors[-20:], line.strip()]

    def next(self, wait: float) -> Any:
        """Return the next event, None after the last one, `_NOTHING` if none came in time."""
        try:
            return self._events.get(timeout=wait)
        except queue.Empty:
            return _NOTHING

    def last_words(self) -> str:
        """Return the last line that it wrote to standard error."""
        self._threads[1].join(_GRACE)
        return next((line for line in reversed(self._errors) if line), "it said nothing")

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # One that is through gives its devices back by itself.
            self.process.wait(_GRACE if self.is_through else 0)
        except subprocess.TimeoutExpired:
            # Its group is its own: compilations of kernels that it started end with it.
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(_GRACE)
        for thread in self._threads:
            thread.join(_GRACE)
        assert self.process.stderr is not None
        self.process.stderr.close()
