"""A copy of mutable Python state, to restore it before another path of a program is traced."""

from collections.abc import Iterator, MutableMapping
from typing import Any

import torch

from tpuport.foundation.pytree import tree


class _Slots(MutableMapping[str, Any]):
    """The attributes that an object keeps in `__slots__`, as a mutable mapping."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def __getitem__(self, name: str) -> Any:
        return tree.slots_of(self.owner)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self.owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter(tree.slots_of(self.owner))

    def __len__(self) -> int:
        return len(tree.slots_of(self.owner))


class Snapshot:
    """The mutable Python state below some roots (module attributes, containers), saved to be
    restored.
    """

    def __init__(self, roots: list[Any]) -> None:
        self.saved: list[tuple[Any, str, Any]] = []
        seen: set[int] = set()
        for root in roots:
            self._save(root, seen, 0)

    def _save(self, value: Any, seen: set[int], depth: int) -> None:
        if id(value) in seen or depth > 12 or isinstance(value, (torch.Tensor, type)):
            return
        if isinstance(value, tree.ATOMS):
            return
        seen.add(id(value))
        if isinstance(value, dict):
            self.saved.append((value, "dict", dict(value)))
            children = list(value.values())
        elif isinstance(value, list):
            self.saved.append((value, "list", list(value)))
            children = list(value)
        elif isinstance(value, set):
            self.saved.append((value, "set", set(value)))
            children = []
        elif isinstance(value, (tuple, frozenset)):
            children = list(value)
        else:
            children = []
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not isinstance(value, type):
            self.saved.append((attributes, "dict", dict(attributes)))
            children += list(attributes.values())
        slots = tree.slots_of(value)
        if slots:
            self.saved.append((_Slots(value), "dict", slots))
            children += list(slots.values())
        for child in children:
            self._save(child, seen, depth + 1)

    def restore(self) -> None:
        """Restore every container and attribute."""
        for target, kind, content in self.saved:
            if kind == "list":
                if len(target) != len(content) or any(
                    a is not b for a, b in zip(target, content, strict=True)
                ):
                    target[:] = content
            elif kind == "set":
                if target != content:
                    target.clear()
                    target.update(content)
            elif len(target) != len(content) or any(
                target.get(k, self) is not v for k, v in content.items()
            ):
                for name in [k for k in target if k not in content]:
                    del target[name]
                for name, value in content.items():
                    target[name] = value

    def changes(self) -> list[Any]:
        """Return what has changed since the snapshot, to compare or apply it."""
        found: list[Any] = []
        for target, kind, content in self.saved:
            if kind == "dict":
                changed = {k: v for k, v in target.items() if content.get(k, self) is not v}
                found.append(changed | {("gone", k): None for k in content if k not in target})
            elif kind == "list":
                same = len(target) == len(content) and all(
                    a is b for a, b in zip(target, content, strict=True)
                )
                found.append(None if same else list(target))
            else:
                found.append(None if target == content else set(target))
        return found

    def apply(self, changes: list[Any]) -> None:
        """Apply changes that `changes` returned."""
        for (target, kind, _), change in zip(self.saved, changes, strict=True):
            if not change:
                continue
            if kind == "dict":
                for name, value in change.items():
                    if isinstance(name, tuple) and name and name[0] == "gone":
                        target.pop(name[1], None)
                    else:
                        target[name] = value
            elif kind == "set":
                target.clear()
                target.update(change)
            else:
                target[:] = change
