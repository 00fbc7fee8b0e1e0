"""A proxy for a module's `__dict__` that records reads of chosen attributes.

Python looks an attribute up in a module's dict without calling overridden methods of the dict. What
it does not find there, `nn.Module.__getattr__` looks for among the buffers, where the read is seen.
Code that reads the dict itself does call the methods.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_ABSENT = object()


class Buffers(dict[str, Any]):
    """A module's buffers, and the hidden attributes in addition."""

    def __init__(self, buffers: Any, hidden: dict[str, Any], read: Callable[[str], None]) -> None:
        super().__init__(buffers)
        self.hidden, self.read = hidden, read

    def __contains__(self, name: Any) -> bool:
        return name in self.hidden or super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        if name in self.hidden:
            self.read(name)
            return self.hidden[name]
        return super().__getitem__(name)


class RecordingAttributes(dict[str, Any]):
    """The dict of a module of which some attributes are hidden.

    To tpuport's own code it is a dict of the attributes that are not hidden.

    Args:
        attributes: All of the module's attributes, in order.
        names: The names of those to hide.
        read: Called with each name that is read.
    """

    def __init__(
        self, attributes: dict[str, Any], names: set[str], read: Callable[[str], None]
    ) -> None:
        super().__init__({n: value for n, value in attributes.items() if n not in names})
        self.hidden = {n: value for n, value in attributes.items() if n in names}
        self.read, self.order = read, list(attributes)
        self.buffers = attributes["_buffers"]
        super().__setitem__("_buffers", Buffers(self.buffers, self.hidden, read))

    def whole(self) -> dict[str, Any]:
        """Return all current attributes, in order."""
        own = dict(dict.items(self)) | {"_buffers": self.buffers}
        return {
            n: (own if n in own else self.hidden)[n] for n in dict.fromkeys([*self.order, *own])
        }

    def _shown(self) -> dict[str, Any]:
        """Return what the calling code may see, without recording a read."""
        if sys._getframe(2).f_globals.get("__name__", "").startswith("tpuport."):
            return dict(dict.items(self))
        return self.whole()

    def __contains__(self, name: Any) -> bool:
        return super().__contains__(name) or name in self.hidden

    def __getitem__(self, name: str) -> Any:
        if name in self.hidden and not super().__contains__(name):
            self.read(name)
            return self.hidden[name]
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, as `dict.get` does."""
        return self[name] if name in self else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._shown())

    def __len__(self) -> int:
        return len(self._shown())

    def keys(self) -> Any:
        """Return the names, as `dict.keys` does; they are the same for all blocks."""
        return self._shown().keys()

    def _all_read(self, shown: dict[str, Any]) -> dict[str, Any]:
        for name in shown:
            if name in self.hidden:
                self.read(name)
        return shown

    def values(self) -> Any:
        """Return the values, as `dict.values` does; every attribute counts as read."""
        return self._all_read(self._shown()).values()

    def items(self) -> Any:
        """Return the items, as `dict.items` does; every attribute counts as read."""
        return self._all_read(self._shown()).items()

    def copy(self) -> dict[str, Any]:
        """Return a copy, as `dict.copy` does; every attribute counts as read."""
        return self._all_read(self._shown())

    def __eq__(self, other: object) -> bool:
        return self._all_read(self._shown()) == other

    __hash__ = None  # pyright: ignore[reportAssignmentType]  (as a dict)

    def __or__(self, other: Any) -> Any:
        return self._all_read(self._shown()) | other

    def __ror__(self, other: Any) -> Any:
        return other | self._all_read(self._shown())

    def __repr__(self) -> str:
        return repr(self._all_read(self._shown()))


def attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return all attributes of a module without recording a read."""
    held = module.__dict__
    return held.whole() if type(held) is RecordingAttributes else held


def hide(module: torch.nn.Module, names: set[str], read: Callable[[str], None]) -> dict[str, Any]:
    """Hide some attributes of a module.

    Args:
        module: The module. If some of its attributes are hidden already, they stay hidden.
        names: The attributes.
        read: Called with each name that is read.

    Returns:
        The dict that `show` puts back.
    """
    before = module.__dict__
    outer = before if type(before) is RecordingAttributes else None

    def note(name: str) -> None:
        read(name)
        if outer is not None and name in outer.hidden:
            outer.read(name)

    hidden = names if outer is None else names | outer.hidden.keys()
    object.__setattr__(module, "__dict__", RecordingAttributes(attributes_of(module), hidden, note))
    return before


def show(module: torch.nn.Module, before: dict[str, Any]) -> None:
    """Put a module's dict back, with the attributes that were set meanwhile."""
    held: Any = module.__dict__
    object.__setattr__(module, "__dict__", before)
    whole = held.whole()
    for name in [name for name in dict.keys(before) if name not in whole]:
        dict.__delitem__(before, name)
    for name, value in dict.items(held):
        if name != "_buffers" and dict.get(before, name, _ABSENT) is not value:
            dict.__setitem__(before, name, value)
    buffers = held.buffers
    now = dict(dict.items(dict.__getitem__(held, "_buffers")))
    if list(now) != list(buffers) or any(now[n] is not buffers[n] for n in now):
        buffers.clear()
        buffers.update(now)
