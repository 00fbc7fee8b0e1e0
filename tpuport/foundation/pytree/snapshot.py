"""A copy of mutable Python state, to restore it before another path of a program is traced."""

from typing import Any

import torch

from tpuport.foundation.pytree.children import ATOMIC, ATOMS, Children, children, refill, walk
from tpuport.foundation.pytree.tensor_classes import is_class_of_tensors

MAX_DEPTH = 13
_ATOMS = (torch.Tensor, *ATOMS)


class Snapshot:
    """The mutable Python state below some roots (module attributes, containers), saved to be
    restored.
    """

    def __init__(self, roots: list[Any]) -> None:
        self.roots = roots
        self.saved: list[tuple[Any, Children]] = []

        def parts(value: Any) -> list[Any]:
            if isinstance(value, _ATOMS) and not is_class_of_tensors(type(value)):
                return []
            found = children(value)
            self.saved.append((value, found))
            return [part for part in found.all if type(part) not in ATOMIC]

        for _ in walk(roots, parts, depth=MAX_DEPTH):
            pass

    def restore(self) -> None:
        """Restore every container and attribute."""
        for value, before in self.saved:
            if not before.is_same(children(value)):
                refill(value, before)

    def changes(self) -> list[Any]:
        """Return what has changed since the snapshot, to compare or apply it."""
        return [_changes(before, children(value)) for value, before in self.saved]

    def aligned(self, changes: list[Any], others: list[Any]) -> list[Any]:
        """Return changes with those of `others` that they lack, which keep what was there before.

        Two paths of a program then give the same items.
        """
        pairs = zip(self.saved, changes, others, strict=True)
        return [
            change if other is None else _aligned(before, change, other)
            for (_, before), change, other in pairs
        ]

    def apply(self, changes: list[Any]) -> None:
        """Apply changes that `changes` returned."""
        for (value, _), change in zip(self.saved, changes, strict=True):
            if change is not None:
                elements, items, held = change
                now = children(value)
                items = _applied(_items(now), items)
                refill(
                    value,
                    now._replace(
                        keys=list(items),
                        parts=list(items.values()) if elements is None else list(elements),
                        held=_applied(now.held, held),
                    ),
                )


def _changes(before: Children, now: Children) -> Any:
    if before.is_same(now):
        return None
    elements = None
    if now.keys is None:
        elements = set(now.parts) if issubclass(now.kind, set) else now.parts
    return elements, _changed(_items(before), _items(now)), _changed(before.held, now.held)


def _aligned(before: Children, change: Any, other: Any) -> Any:
    elements, items, held = change or (None, ({}, []), ({}, []))
    if elements is None and other[0] is not None:
        elements = set(before.parts) if issubclass(before.kind, set) else before.parts
    return elements, _kept(_items(before), items, other[1]), _kept(before.held, held, other[2])


def _kept(before: dict[Any, Any], change: Any, other: Any) -> tuple[dict[Any, Any], list[Any]]:
    changed, gone = change
    same = {key: before[key] for key in other[0] if key in before and key not in gone}
    all_of_them = same | changed
    order = dict.fromkeys([*(key for key in before if key in all_of_them), *all_of_them])
    return {key: all_of_them[key] for key in order}, gone


def _items(content: Children) -> dict[Any, Any]:
    return dict(zip(content.keys or (), content.parts, strict=False))


def _changed(before: dict[Any, Any], now: dict[Any, Any]) -> tuple[dict[Any, Any], list[Any]]:
    """Return the items that are new or have another value, and the keys that are gone."""
    changed = {k: v for k, v in now.items() if k not in before or before[k] is not v}
    return changed, [k for k in before if k not in now]


def _applied(before: dict[Any, Any], changes: tuple[dict[Any, Any], list[Any]]) -> dict[Any, Any]:
    changed, gone = changes
    return {k: v for k, v in (before | changed).items() if k not in gone}
