"""Values outside of a module whose content is in no attribute: memory, seeds, flags of threads."""

import array
import ctypes
import sys
import threading
from typing import Any

import numpy as np
import torch

# Of larger memory a write is not seen: to compare it at each call would take too long.
MOST_BYTES = 1 << 16
_BUFFERS = (bytearray, array.array, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)
# What answers a question, which a call may change.
_ASKED: dict[type, Any] = {
    torch.Generator: torch.Generator.initial_seed,
    threading.Event: threading.Event.is_set,
}
ASKED = tuple(_ASKED)


def memory_of(value: Any) -> np.ndarray | None:
    """Return the memory of an array or buffer that is small enough to compare at each call."""
    if isinstance(value, np.ndarray):
        return None if value.nbytes > MOST_BYTES or value.dtype == object else value
    shared = sys.modules.get("multiprocessing.sharedctypes")
    if shared is not None and isinstance(value, shared.SynchronizedBase):
        value = value.get_obj()
    if not isinstance(value, _BUFFERS) or memoryview(value).nbytes > MOST_BYTES:
        return None
    return np.frombuffer(bytes(memoryview(value)), np.uint8)


def has_bytes(value: Any, held: bytes) -> bool:
    """Return whether an array or buffer still has such a content."""
    memory = memory_of(value)
    return memory is not None and memory.tobytes() == held


def answer_of(value: Any) -> Any:
    """Return what a value of a kind in `ASKED` answers now."""
    return next(ask(value) for kind, ask in _ASKED.items() if isinstance(value, kind))


def answers(value: Any, before: Any) -> bool:
    """Return whether a value of a kind in `ASKED` answers the same."""
    return answer_of(value) == before
