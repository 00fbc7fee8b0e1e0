"""Streams and events: all streams are one queue, and events tell when it is empty."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from tpuport.compat.emulated import accelerator
from tpuport.compat.emulated.accelerator import index_of
from tpuport.compat.emulated.device import CUDA
from tpuport.compat.emulated.settings import active
from tpuport.compat.shims._inside import functions
from tpuport.foundation.errors import UsageError
from tpuport.foundation.patching.shim import Replacement, Shim


class Stream:
    """Replacement of `torch.cuda.Stream`: work on every stream goes to one queue, in order."""

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        index_of(device)
        self.priority = priority
        self.device, self.device_index, self.device_type = CUDA, 0, 1
        self.stream_id = kwargs.get("stream_id", 0)
        self.cuda_stream = kwargs.get("stream_ptr", 0)

    def synchronize(self) -> None:
        """Wait for everything that was given to the device."""
        accelerator.wait()

    def query(self) -> bool:
        """Wait for everything that was given to the device, and return True."""
        accelerator.wait()
        return True

    def is_capturing(self) -> bool:
        """Return False: there are no CUDA graphs to record."""
        return False

    def wait_event(self, event: Any) -> None:
        """Do nothing: work runs in the order in which it was given."""

    def wait_stream(self, stream: Any) -> None:
        """Do nothing: it is the same queue."""

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the queue is the same outside."""


class Event:
    """Replacement of `torch.cuda.Event`.

    `record` with timing waits for the device, so that `elapsed_time` measures work done and not
    work queued.
    """

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        del blocking, external
        if interprocess:
            msg = "torch.cuda.Event(interprocess=True): events are not shared between processes"
            raise UsageError(msg)
        self._timing, self._at = enable_timing, None
        self.device, self.cuda_event = CUDA, 0

    def record(self, stream: Any = None) -> None:
        """Record the time; with timing, after everything given to the device is computed."""
        del stream
        if self._timing:
            accelerator.wait()
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Do nothing: work runs in the order in which it was given."""

    def query(self) -> bool:
        """Wait for everything that was given to the device, and return True."""
        accelerator.wait()
        return True

    def synchronize(self) -> None:
        """Wait for everything that was given to the device."""
        accelerator.wait()

    def elapsed_time(self, end_event: "Event") -> float:
        """Return the milliseconds from this event to another.

        Raises:
            UsageError: one of them has no timing, or was not recorded.
        """
        if not (self._timing and end_event._timing):
            msg = "elapsed_time needs events made with enable_timing=True"
            raise UsageError(msg)
        if self._at is None or end_event._at is None:
            msg = "elapsed_time: record both events first"
            raise UsageError(msg)
        return (end_event._at - self._at) * 1e3


_DEFAULT = Stream()


class StreamContext:
    """Replacement of `torch.cuda.StreamContext`, the block of `torch.cuda.stream(s)`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        """Do nothing: the queue is the same inside."""

    def __exit__(self, *_: object) -> None:
        """Do nothing: the queue is the same outside."""


def _recorded(eager: Any) -> Any:
    def record_stream(self: torch.Tensor, s: Any) -> None:
        # jax itself never reuses the memory of a tensor that is still in use.
        if active() is None:
            eager(self, s)

    return record_stream


def _default_stream(device: Any = None) -> Stream:
    index_of(device)
    return _DEFAULT


@contextlib.contextmanager
def _range(msg: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    del msg, args, kwargs
    yield


class CudaStreams(Shim):
    """One queue for all streams: work that overlaps on a GPU runs one after the other here, which
    changes no value. Marks for NVIDIA's profiler are dropped; jax's profiler sees the programs.
    """

    TARGET = "torch.cuda.Stream"
    REASON = "there is no CUDA runtime"
    REFERENCE = "torch.cuda.Stream and torch.cuda.Event on one stream"

    def replacements(self) -> list[Replacement]:
        cuda = torch.cuda
        table = {
            "stream": StreamContext,
            "set_stream": lambda stream: None,
            "current_stream": _default_stream,
            "default_stream": _default_stream,
            "_sleep": lambda cycles: None,
        }
        marks = {
            "range_push": lambda msg: 0,
            "range_pop": lambda: 0,
            "range_start": lambda msg: 0,
            "range_end": lambda range_id: None,
            "mark": lambda msg: None,
            "range": _range,
        }
        classes = {"Stream": Stream, "Event": Event, "StreamContext": StreamContext}
        return [
            *functions(cuda, table),
            *functions(cuda.nvtx, marks),
            Replacement(torch.Tensor, "record_stream", _recorded(torch.Tensor.record_stream)),
            *(Replacement(cuda, name, made) for name, made in classes.items()),
            *(
                Replacement(cuda.streams, name, made)
                for name, made in classes.items()
                if hasattr(cuda.streams, name)
            ),
        ]
