"""The device that user code sees traced tensors on."""

import contextlib
import threading
from collections.abc import Iterator

import torch

_SEEN = threading.local()


def seen_device() -> torch.device | None:
    """Return the device that this thread's code sees on traced tensors, or None if unset."""
    return getattr(_SEEN, "device", None)


def set_seen_device(device: torch.device | None) -> None:
    """Set the device that this thread's code sees on traced tensors."""
    _SEEN.device = device


@contextlib.contextmanager
def where_they_are() -> Iterator[None]:
    """Show the real device inside.

    Torch's own code makes tensors on the device that it sees, and the emulated one does not exist.
    """
    device = seen_device()
    set_seen_device(None)
    try:
        yield
    finally:
        set_seen_device(device)
