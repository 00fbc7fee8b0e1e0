"""Where user code sees traced tensors."""

import contextlib
import threading
from collections.abc import Iterator

import torch

_SEEN = threading.local()


def seen_device() -> torch.device | None:
    """The device on which code of this thread sees traced tensors, None for where they are."""
    return getattr(_SEEN, "device", None)


def set_seen_device(device: torch.device | None) -> None:
    """Let code of this thread see traced tensors on a device."""
    _SEEN.device = device


@contextlib.contextmanager
def where_they_are() -> Iterator[None]:
    """Torch's own code makes tensors beside them, and has no device to make them on."""
    device = seen_device()
    set_seen_device(None)
    try:
        yield
    finally:
        set_seen_device(device)
