"""Comparison of two Python values: whether any code that reads them gets the same."""

import struct
import types
from collections import deque
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from tpuport.foundation.interop.backend import is_traced
from tpuport.foundation.pytree.c_state import same_memory, state_in_c
from tpuport.foundation.pytree.children import ATOMS, attributes_of, children, is_plain

_MAX_DEPTH = 5
_BITS = {float: "d", complex: "dd"}
_EXACT = frozenset(
    {bool, int, str, bytes, range, torch.dtype, torch.device, torch.Size, type(None)}
)


def same_value(a: Any, b: Any, depth: int = 0) -> bool:
    """Return whether two Python values are the same for any code but a test of their identity.

    Objects are the same if they have one class and the same content (attention processors, for
    example). Numbers are compared bit by bit: 0.0 differs from -0.0, and NaNs may be the same.
    """
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b) or depth > _MAX_DEPTH:
        return False
    if kind in _EXACT:
        return a == b
    if kind in _BITS:
        return _bits(a) == _bits(b)
    if isinstance(a, torch.Tensor):
        return _same_tensor(a, b)
    if isinstance(a, np.ndarray):
        alike = is_plain(a) and a.dtype == b.dtype and a.shape == b.shape
        return alike and a.strides == b.strides and same_memory(a, b)
    if isinstance(a, (set, frozenset)):
        return _same_members(a, b)
    ours, theirs = _parts(a), _parts(b)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return False
    return all(same_value(x, y, depth + 1) for x, y in zip(ours, theirs, strict=True))


def same_class(a: type, b: type) -> bool:
    """Return whether two classes are one, or made by the same code in two calls of a function.

    A `namedtuple` or a class statement in a forward makes another class in each call.
    """
    if a is b:
        return True
    named = (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)
    return (
        named
        and _members(a) == _members(b)
        and len(a.__bases__) == len(b.__bases__)
        and all(map(same_class, a.__bases__, b.__bases__))
    )


def _members(kind: type) -> list[Any]:
    """Return the names, classes and code of what a class has."""
    found = ((name, m, getattr(m, "__func__", m)) for name, m in vars(kind).items())
    return [(name, type(m), getattr(held, "__code__", None)) for name, m, held in found]


def _bits(number: complex) -> bytes:
    if isinstance(number, complex):
        return struct.pack("dd", number.real, number.imag)
    return struct.pack("d", number)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if is_traced(a) or a.device != b.device or a.device.type == "meta":
        return False
    if a.dtype != b.dtype or a.shape != b.shape or a.requires_grad != b.requires_grad:
        return False
    if a.layout != torch.strided or b.layout != torch.strided or a.is_quantized:
        return False
    if a.stride() != b.stride():
        return False
    if vars(a) or vars(b):
        return False
    # The comparison must not become part of a trace that may be running.
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        ours, theirs = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return torch.equal(ours, theirs)


def _same_members(a: Any, b: Any) -> bool:
    """Compare sets of plain values by type too: as members, 1, 1.0 and True are equal."""
    if attributes_of(a) or attributes_of(b):
        return False
    every = {type(member) for member in (*a, *b)}
    if not every <= _EXACT | _BITS.keys():
        return False
    ours, theirs = ({(type(m), repr(m)) for m in members} for members in (a, b))
    return ours == theirs and list(map(repr, a)) == list(map(repr, b))


def _parts(value: Any) -> list[Any] | None:
    """Return all that is in a container or object, with its names; None for anything else."""
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    found = children(value)
    rest = [*found.held, *found.held.values()]
    if isinstance(value, (list, tuple, dict, deque)):
        return [found.option, *(found.keys or ()), *found.parts, *rest]
    if isinstance(value, torch.nn.Module):
        return None
    if is_plain(value):
        return rest
    inner = None if isinstance(value, ATOMS) else state_in_c(value)
    return None if inner is None else [*inner, *rest]
