"""Batches on the devices before a step asks for them."""

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from tpuport.foundation.errors import UsageError
from tpuport.training.input.sources import ArrayPlace, HostShard

if TYPE_CHECKING:
    from tpuport.training.input.batches import Batches

_POLL_SECONDS = 0.1
_JOIN_SECONDS = 10.0


class OnDevice:
    """An iterator over batches that are placed on the devices ahead of time.

    Args:
        batches: the source of the batches.
        step: decides where to put them, by its `place` and `share`.
        ahead: the number of batches to place beyond the current one.
    """

    def __init__(self, batches: "Batches", step: Any, ahead: int) -> None:
        self._batches, self._step, self._ahead = batches, step, ahead
        self._times_restored = batches._times_restored
        # The place to read next, and the place of `batches` after the last batch that was returned.
        self._next = self._left = batches._place
        self._share: HostShard = share_of(step)
        self._ready: deque[tuple[Any, ArrayPlace]] = deque()
        self._thread: _Thread | None = None
        if ahead and batches._source.in_background:
            self._thread = _Thread(self._load, ahead)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch.

        Raises:
            UsageError: the batches were restored to another position meanwhile, or others read
                from them.
            Exception: any error of reading it.
        """
        if self._times_restored != self._batches._times_restored:
            raise UsageError(
                "the batches were restored to another position while they were read. What to do:"
                " call batches.device_iterator(step) after restore"
            )
        if self._batches._place != self._left:
            raise UsageError(
                "somebody else took batches meanwhile: they would come twice. What to do: make"
                " other Batches of the same data for evaluation, or call"
                " batches.device_iterator(step) again"
            )
        if self._thread is not None:
            batch, after = self._thread.take()
        else:
            # Steps are dispatched asynchronously, so this reads while the device computes.
            while len(self._ready) <= self._ahead:
                self._ready.append(self._load())
            batch, after = self._ready.popleft()
        self._batches._place = self._left = after
        return batch

    def _load(self) -> tuple[Any, ArrayPlace]:
        read = self._batches._read(self._next, self._share)
        self._next = read.after
        batch = self._batches._masked(read, self._share)
        place = getattr(self._step, "place", None)
        if place is not None:
            batch = place(batch, share=self._share)
        return batch, read.after

    def close(self) -> None:
        """End the thread; batches that were read ahead are read again later."""
        self._ready.clear()
        if self._thread is not None:
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def share_of(step: Any) -> HostShard:
    """Return which rows this process reads for a step."""
    from tpuport.training.input.batches import default_share

    ask = getattr(step, "share", None)
    return default_share() if ask is None else ask()


class _Thread:
    """A thread that calls a function repeatedly, a few results ahead.

    Args:
        load: the bound method to call.
        ahead: the number of results to keep ready.
    """

    def __init__(self, load: Any, ahead: int) -> None:
        self._results: queue.Queue[Any] = queue.Queue(maxsize=ahead)
        self._stopped, self._error = threading.Event(), None
        self._thread = threading.Thread(
            target=_pump,
            args=(weakref.WeakMethod(load), self._results, self._stopped),
            daemon=True,
            name="tpuport-input",
        )
        self._started = False
        weakref.finalize(self, self._stopped.set)

    def take(self) -> Any:
        """Return the next result, or raise what the function raised."""
        if not self._started:
            self._started = True
            self._thread.start()
        while True:
            with contextlib.suppress(queue.Empty):
                kind, result = self._results.get(timeout=_POLL_SECONDS)
                break
            if not self._thread.is_alive() and self._results.empty():
                raise RuntimeError(
                    "the input was closed. What to do: call batches.device_iterator(step) again"
                )
        if kind == "error":
            raise result
        return result

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self._stopped.set()
        if self._started and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)


def _pump(load: Any, results: queue.Queue[Any], stopped: threading.Event) -> None:
    """Fill the queue until stopped or its owner is gone; only a read keeps the owner alive."""
    while not stopped.is_set():
        call = load()
        if call is None:
            return
        try:
            result = ("result", call())
        except BaseException as error:  # raised later, by the consumer of the batch
            result = ("error", error)
        call = None
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                results.put(result, timeout=_POLL_SECONDS)
                break
        if result[0] == "error":
            return
