"""State that objects do not keep in attributes: of classes that are written in C."""

import functools
import operator
import re
import struct
import threading
import types
from typing import Any

import numpy as np
import torch

from tpuport.model import structure

# What another object of its class is told apart by, as plain values and containers.
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
    """What an object holds beside its attributes; None if nothing is known of that.

    Args:
        value: an object, neither a container nor an array.
    """
    for kind, read in _READS.items():
        if isinstance(value, kind):
            return read(value)
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic, *structure.ATOMS)):
        return None
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return _reduced(value)
    # Of a bytearray, an array, ctypes, a mapped file.
    return [view.format, view.shape, view.strides, view.tobytes()]


def _reduced(value: Any) -> list[Any] | None:
    """What the class says itself, if it is written in C: dates and decimals, for example."""
    kind = type(value)
    method = kind.__reduce__
    is_own = isinstance(method, types.MethodDescriptorType) and method.__objclass__ is not object
    if (
        not is_own
        or hasattr(kind, "__next__")
        or kind.__module__.partition(".")[0] in structure.OPAQUE
    ):
        return None
    try:
        reduced = value.__reduce__()
    except TypeError:  # it cannot be pickled
        return None
    return list(reduced) if isinstance(reduced, tuple) else [reduced]


def same_memory(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one dtype and shape are the same to the bit, without copies of them."""
    bits = f"u{a.dtype.itemsize}"
    if a.dtype.itemsize in (1, 2, 4, 8) and a.dtype.names is None:
        return bool(np.array_equal(a.view(np.ndarray).view(bits), b.view(np.ndarray).view(bits)))
    return a.tobytes() == b.tobytes()
