"""Records of what a block holds when the trace begins, to see later whether it has changed.

A model may change its blocks while it runs (`block.scale = i` before a call). Then the trace of one
of them must not be reused for the others.
"""

import enum
import io
import types
from collections import deque
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import numpy as np
import torch

from tpuport.foundation import pytree
from tpuport.foundation.pytree.c_state import same_memory, state_in_c
from tpuport.foundation.pytree.compare import same_value
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.guards.attribute_proxy import attributes_of

# A check, the object to check, and its recorded content: check(object, content).
Record = tuple[Callable[[Any, Any], bool], Any, Any]
# Types that code reads by name; `Outside` records those.
_BY_NAME = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
_HOLDERS = ("_parameters", "_buffers", "_modules")
_MAX_DEPTH = 12


class Watcher:
    """A recorder of what blocks hold."""

    def __init__(self) -> None:
        # Records below an object that several blocks may hold, a configuration for example.
        self._below: dict[int, tuple[Any, list[Record]]] = {}

    def records(self, modules: Iterable[torch.nn.Module]) -> list[Record]:
        """Record what modules hold now.

        Args:
            modules: A block and all modules in it. Containers and objects that they refer to are
                recorded recursively, other modules only by identity.
        """
        found: list[Record] = []
        for module in modules:
            held = attributes_of(module)
            found.append((self._is_same_module, module, (list(held), list(held.values()))))
            found += [self._of_dict(held[name]) for name in _HOLDERS if name in held]
            for name, value in held.items():
                if name not in OWN and not self._passes(value):
                    found += self._of(value, 0)
        return found

    def _of_dict(self, value: dict[Any, Any]) -> Record:
        return self._is_same_dict, value, (list(value), list(value.values()))

    def _of(self, value: Any, depth: int) -> list[Record]:
        if isinstance(value, (*_BY_NAME, torch.nn.Module)) or depth > _MAX_DEPTH:
            return []
        if isinstance(value, torch.Tensor):
            counted = not isinstance(value, TracedTensor) and not value.is_inference()
            return [(_is_same_version, value, value._version)] if counted else []
        if isinstance(value, pytree.ATOMS) and not hasattr(value, "__dict__"):
            return []
        known = self._below.get(id(value))
        if known is None:
            records: list[Record] = []
            known = self._below[id(value)] = value, records
            records += self._inside(value, depth + 1)
        return known[1]

    def _inside(self, value: Any, depth: int) -> list[Record]:
        found, parts = self._contents(value)
        if pytree.is_open(value) or isinstance(value, (enum.Enum, np.ma.MaskedArray)):
            held = pytree.attributes_of(value)
            found.append((self._is_same_object, value, (list(held), list(held.values()))))
            parts += held.values()
        for part in parts:
            if not self._passes(part):
                found += self._of(part, depth)
        return found

    def _contents(self, value: Any) -> tuple[list[Record], list[Any]]:
        """Return records of a value's content besides its attributes, and the parts of that
        content.
        """
        if isinstance(value, np.ndarray):
            layout = value.shape, value.strides, value.dtype
            record = _is_same_array, value, (layout, np.array(value, subok=False))
            return [record], value.ravel().tolist() if value.dtype == object else []
        if isinstance(value, dict):
            return [self._of_dict(value)], list(dict.values(value))
        if isinstance(value, (list, deque)):
            return [(self._is_same_list, value, list(value))], list(value)
        if isinstance(value, set):
            return [(_is_same_set, value, set(value))], list(value)
        if isinstance(value, (tuple, frozenset)):
            return [], list(value)
        inner = None if pytree.is_plain(value) else state_in_c(value)
        return ([], []) if inner is None else ([(_is_same_in_c, value, inner)], list(inner))

    def _passes(self, value: Any) -> bool:
        """Return whether a value refers to no other objects: a quick test for most values."""
        return type(value) in pytree.ATOMIC

    def _is_same_dict(self, value: dict[Any, Any], was: tuple[list[Any], list[Any]]) -> bool:
        names, values = was
        if len(value) != len(names) or list(value) != names:
            return False
        return self._are_same(list(value.values()), values)

    def _is_same_module(self, value: torch.nn.Module, was: tuple[list[Any], list[Any]]) -> bool:
        return self._is_same_dict(attributes_of(value), was)

    def _is_same_object(self, value: Any, was: tuple[list[Any], list[Any]]) -> bool:
        return self._is_same_dict(pytree.attributes_of(value), was)

    def _is_same_list(self, value: Any, was: list[Any]) -> bool:
        return len(value) == len(was) and self._are_same(list(value), was)

    def _are_same(self, values: list[Any], were: list[Any]) -> bool:
        return all(map(is_, values, were)) or all(map(same_value, values, were))


def _is_same_version(value: torch.Tensor, was: int) -> bool:
    return value._version == was


def _is_same_array(value: np.ndarray, was: tuple[Any, np.ndarray]) -> bool:
    shape, copied = was
    if (value.shape, value.strides, value.dtype) != shape:
        return False
    if value.dtype == object:
        return all(map(is_, value.ravel().tolist(), copied.ravel().tolist()))
    return same_memory(value, copied)


def _is_same_in_c(value: Any, was: list[Any]) -> bool:
    now = state_in_c(value)
    return now is not None and same_value(now, was)


def _is_same_set(value: set[Any], was: set[Any]) -> bool:
    return {id(part) for part in value} == {id(part) for part in was} or same_value(value, was)


def is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator whose attributes do not tell what comes next."""
    is_plain = pytree.is_open(value) and hasattr(value, "__dict__")
    return hasattr(type(value), "__next__") and not is_plain and not isinstance(value, io.IOBase)


def is_unchanged(records: list[Record]) -> bool:
    """Return whether everything still is as it was recorded."""
    return all(check(value, was) for check, value, was in records)


# The attributes that torch keeps on every module.
OWN = frozenset(torch.nn.Module().__dict__)
