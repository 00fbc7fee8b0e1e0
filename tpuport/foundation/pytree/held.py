"""What a module and the Python state below it hold, to notice later that any of it has changed."""

import enum
import functools
import operator
import types
from collections import OrderedDict, deque
from typing import Any

import torch

from tpuport.foundation.pytree.children import (
    ATOMIC,
    ATOMS,
    attributes_of,
    is_plain,
    slots_of,
    walk,
)
from tpuport.foundation.pytree.clone import refers

_DICTS = frozenset({dict, OrderedDict})
_SEQUENCES = frozenset({list, tuple, set, frozenset, deque})


class Held:
    """The objects that a module, its submodules and their Python state hold at one time.

    Comparing them by identity takes a fraction of a microsecond for each container and object.

    Args:
        module: the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._empty: list[Any] = []
        self._dicts: list[tuple[dict[Any, Any], tuple[Any, ...], tuple[Any, ...]]] = []
        self._others: list[tuple[Any, tuple[Any, ...]]] = []
        self._is_known = True
        for _ in walk([module], self._parts):
            if not self._is_known:
                break

    def are_same(self) -> bool:
        """Return whether nothing has changed since then, as far as this can tell."""
        same = operator.is_
        if not self._is_known or any(self._empty):
            return False
        for held, keys, values in self._dicts:
            if len(held) != len(keys) or not all(map(same, held.values(), values)):
                return False
            if not all(map(same, held, keys)):
                return False
        for held, parts in self._others:
            if len(held) != len(parts) or not all(map(same, held, parts)):
                return False
        return True

    def _parts(self, value: Any) -> list[Any]:
        """Keep what a value holds, and return what it leads to."""
        kind = type(value)
        if kind in ATOMIC:
            # Others are one in the module and its copy.
            self._is_known &= kind is not types.FunctionType or not refers(value)
            return []
        if kind in _DICTS:
            return self._of_dict(value)
        if kind in _SEQUENCES:
            if not value and kind in (list, set, deque):
                self._empty.append(value)
            elif kind is not tuple and kind is not frozenset:
                self._others.append((value, tuple(value)))
            return list(value)
        return self._of_object(value)

    def _of_dict(self, held: dict[Any, Any]) -> list[Any]:
        if not held:
            self._empty.append(held)
            return []
        self._dicts.append((held, tuple(held), tuple(held.values())))
        return [*held, *held.values()]

    def _of_object(self, value: Any) -> list[Any]:
        if isinstance(value, (torch.Tensor, enum.Enum, *ATOMS)):
            return []
        if type(value) is functools.partial:
            return [value.func, *value.args, value.keywords, value.__dict__]
        # What classes in C keep beside attributes is not seen, nor what is in slots.
        is_seen = isinstance(value, torch.nn.Module) or is_plain(value)
        if not is_seen or slots_of(value) or isinstance(value, (dict, list, set, deque)):
            self._is_known &= isinstance(value, _UNCHANGING)
            return []
        return [value.__dict__] if attributes_of(value) else []


_UNCHANGING = (torch.dtype, torch.device, torch.Size)
