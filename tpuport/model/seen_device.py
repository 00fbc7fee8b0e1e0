"""Where user code sees traced tensors."""

import threading

import torch

_SEEN = threading.local()


def seen_device() -> torch.device | None:
    """The device on which code of this thread sees traced tensors, None for where they are."""
    return getattr(_SEEN, "device", None)


def set_seen_device(device: torch.device | None) -> None:
    """Let code of this thread see traced tensors on a device."""
    _SEEN.device = device
