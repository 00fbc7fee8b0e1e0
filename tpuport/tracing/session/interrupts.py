"""Ctrl-C while a program is traced, held back until nothing would be left half done.

Python raises KeyboardInterrupt between any two steps, so also at the start of an `__exit__`. A mode
or a patch that is not taken back there changes every later call of torch in the process.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class _Interrupts:
    """The interrupts of the trace that runs in the main thread."""

    def __init__(self) -> None:
        self.pending = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Hold an interrupt back; a second one is raised at once."""
        if self.pending:
            self.pending = False
            signal.default_int_handler(number, frame)
        self.pending = True

    def raise_pending(self) -> None:
        """Raise an interrupt that was held back.

        Raises:
            KeyboardInterrupt: the user interrupted the process.
        """
        if self.pending and threading.current_thread() is threading.main_thread():
            self.pending = False
            raise KeyboardInterrupt


INTERRUPTS = _Interrupts()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Hold Ctrl-C back until `INTERRUPTS.raise_pending` is called, or the block ends.

    A handler of the user's own is left alone, and so are other threads, which have none.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, INTERRUPTS.note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        INTERRUPTS.raise_pending()
