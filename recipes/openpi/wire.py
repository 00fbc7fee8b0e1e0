"""The messages of openpi-client: msgpack, in which arrays are maps with bytes as keys.

A message comes from anyone who can reach the server. Nothing in it is run, no object is made but
numbers, texts, lists, dicts and arrays, and an array's size has to be that of its bytes.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from recipes.packages import needed
from tpuport.foundation.errors import UsageError

# Kinds of arrays: truth values, whole numbers, numbers, texts and bytes. Objects are none.
_KINDS = "biufUS"
_LONGEST_DTYPE, _MOST_DIMS = 16, 8
_MOST_KEYS, _MOST_ITEMS = 1000, 100_000


def _msgpack() -> Any:
    return needed("msgpack", "serving a policy", "msgpack", "openpi")


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes, as openpi-client reads them."""
    return _msgpack().packb(message, default=_packed)


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in _KINDS:
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": value.shape,
        }
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} cannot be sent")


def unpack(data: bytes) -> dict[str, Any]:
    """Return the message in some bytes.

    Raises:
        UsageError: They are no message, or one with other objects than these.
    """
    msgpack = _msgpack()
    try:
        found = msgpack.unpackb(
            data,
            object_hook=_unpacked,
            max_map_len=_MOST_KEYS,
            max_array_len=_MOST_ITEMS,
            max_ext_len=0,
        )
    except UsageError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise UsageError(f"the message is not msgpack: {error!r}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise UsageError("the message is no dict of names, as openpi-client sends one")
    return found


def _unpacked(found: dict[Any, Any]) -> Any:
    if b"__ndarray__" in found:
        return _array(found)
    if b"__npgeneric__" in found:
        dtype = _dtype(found)
        try:
            return dtype.type(found[b"data"])
        except (ValueError, TypeError, OverflowError, KeyError) as error:
            raise UsageError(f"the message holds a number that is none: {error!r}") from error
    return found


def _dtype(found: dict[Any, Any]) -> np.dtype[Any]:
    name = found.get(b"dtype")
    try:
        if isinstance(name, str) and len(name) <= _LONGEST_DTYPE:
            made = np.dtype(name)
            if made.kind in _KINDS and made.fields is None and made.subdtype is None:
                return made
    except (TypeError, ValueError, SyntaxError):
        pass
    raise UsageError(f"the message holds an array of dtype {str(name)[:40]!r}")


def _array(found: dict[Any, Any]) -> Any:
    dtype, data, shape = _dtype(found), found.get(b"data"), found.get(b"shape")
    if not isinstance(data, bytes) or not isinstance(shape, list) or not dtype.itemsize:
        raise UsageError("the message holds an array without bytes or shape")
    if len(shape) > _MOST_DIMS or not all(type(size) is int and size >= 0 for size in shape):
        raise UsageError(f"the message holds an array without bytes or shape: {shape[:9]}")
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(data):
        raise UsageError(
            f"the message holds an array of {len(data)} bytes, and shape {shape} of {dtype} asks"
            f" for {expected}"
        )
    return np.frombuffer(data, dtype).reshape(shape)
