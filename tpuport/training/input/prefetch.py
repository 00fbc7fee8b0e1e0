"""Batches on the devices before a step asks for them."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Self

from tpuport.foundation.errors import UsageError
from tpuport.training.input.sources import ArrayPlace, HostShard

if TYPE_CHECKING:
    from tpuport.training.input.batches import Batches

_END_SECONDS = 10.0


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
        # Batches with the places after them; with a thread, the futures of such.
        self._ready: deque[Any] = deque()
        self._thread: ThreadPoolExecutor | None = None
        if ahead and batches._source.in_background:
            self._thread = ThreadPoolExecutor(1, "tpuport-input")
        self._closed = False
        self._error: BaseException | None = None

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
        if self._closed:
            raise RuntimeError(
                "the input was closed. What to do: call batches.device_iterator(step) again"
            )
        # Without a thread this reads while the device computes, as steps only begin there.
        while len(self._ready) <= self._ahead:
            self._ready.append(
                self._thread.submit(self._load_in_thread) if self._thread else self._load()
            )
        first = self._ready[0]
        batch, after = first if self._thread is None else first.result()
        self._ready.popleft()
        self._batches._place = self._left = after
        return batch

    def _load_in_thread(self) -> tuple[Any, ArrayPlace]:
        """Load, but not after an error: the same batch would be read again."""
        if self._error is not None:
            raise self._error
        try:
            return self._load()
        except BaseException as error:
            self._error = error
            raise

    def _load(self) -> tuple[Any, ArrayPlace]:
        read = self._batches._read(self._next, self._share)
        batch = self._batches._masked(read, self._share)
        place = getattr(self._step, "place", None)
        if place is not None:
            batch = place(batch, share=self._share)
        self._next = read.after
        return batch, read.after

    def close(self) -> None:
        """End the thread; batches that were read ahead are read again later."""
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            wait([read for read in self._ready if not read.cancelled()], _END_SECONDS)
        self._ready.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def share_of(step: Any) -> HostShard:
    """Return which rows this process reads for a step."""
    from tpuport.training.input.batches import default_share

    ask = getattr(step, "share", None)
    return default_share() if ask is None else ask()
