"""State that objects of classes written in C keep outside of their attributes."""

import functools
import operator
import re
import struct
import threading
import types
from typing import Any

import numpy as np
import torch

from tpuport.foundation.pytree.children import ATOMS, OPAQUE

# The state that distinguishes objects of a class, as plain values and containers.
_READS: dict[type, Any] = {
    functools.partial: lambda value: [value.func, value.args, value.keywords],
    types.MappingProxyType: lambda value: [list(value), list(value.values())],
    struct.Struct: lambda value: [value.format],
    re.Pattern: lambda value: [value.pattern, value.flags],
    threading.Event: lambda value: [value.is_set()],
    **dict.fromkeys(
        (operator.itemgetter, operator.attrgetter, operator.methodcaller),
        lambda value: list(value.__reduce__()),
    ),
}


def state_in_c(value: Any) -> list[Any] | None:
    """Return the state of an object that is not in its attributes, or None if it is unknown.

    Args:
        value: An object, neither a container nor an array.
    """
    for kind, read in _READS.items():
        if isinstance(value, kind):
            return read(value)
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic, *ATOMS)):
        return None
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return _reduced(value)
    # A bytearray, an array, a ctypes object or a mapped file.
    return [view.format, view.shape, view.strides, view.tobytes()]


def _reduced(value: Any) -> list[Any] | None:
    """Return the state from `__reduce__` of a class written in C, such as dates and decimals."""
    kind = type(value)
    method = kind.__reduce__
    is_own = isinstance(method, types.MethodDescriptorType) and method.__objclass__ is not object
    if not is_own or hasattr(kind, "__next__") or kind.__module__.partition(".")[0] in OPAQUE:
        return None
    try:
        reduced = value.__reduce__()
    except TypeError:  # it cannot be pickled
        return None
    return list(reduced) if isinstance(reduced, tuple) else [reduced]


def same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays of one dtype and shape are equal bit by bit; copy nothing."""
    bits = f"u{a.dtype.itemsize}"
    if a.dtype.itemsize in (1, 2, 4, 8) and a.dtype.names is None:
        return bool(np.array_equal(a.view(np.ndarray).view(bits), b.view(np.ndarray).view(bits)))
    return a.tobytes() == b.tobytes()
