"""Copies of modules and of the Python state below them."""

import copy
import enum
import functools
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tpuport.foundation.pytree import tree

_SHARED = (
    *tree.ATOMS,
    torch.Generator,
    enum.Enum,
    threading.Thread,
    types.CodeType,
    types.GeneratorType,
)
_BUILT_IN = frozenset({dict, OrderedDict, set, list})
# The dicts and sets that torch keeps on each module, most of them empty. No other object holds one,
# so an empty one needs no entry in the memo.
_OF_MODULES = frozenset(n for n, v in torch.nn.Module().__dict__.items() if type(v) in _BUILT_IN)


class Cloner:
    """Copies modules, containers and plain objects; tensors go through `tensor_map`."""

    def __init__(self, tensor_map: Callable[[torch.Tensor], Any]) -> None:
        self.tensor_map = tensor_map
        self.memo: dict[int, Any] = {}
        self.keep: list[Any] = []

    def clone(self, value: Any) -> Any:
        """Return the copy of a value; the same copy each time."""
        kind = type(value)
        if kind in tree.ATOMIC:
            return value
        # First, for speed: these are the most frequent, and no test below holds for them.
        if kind in _BUILT_IN or isinstance(value, torch.nn.Module):
            known = self.memo.get(id(value))
            if known is None:
                self.keep.append(value)
                known = self._object(value)
            return known
        if isinstance(value, torch.Tensor):
            known = self.memo.get(id(value))
            if known is None:
                known = self.memo[id(value)] = self.tensor_map(value)
                self.keep.append(value)
            return known
        return self._other(value)

    def _other(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.clone(value.__self__))
        if isinstance(value, _SHARED):
            return value
        if isinstance(value, weakref.ref):
            # Recurrent layers keep weak references to their weights, to notice that one changed.
            referent = value()
            is_tensor = isinstance(referent, torch.Tensor)
            return weakref.ref(self.clone(referent)) if is_tensor else value
        known = self.memo.get(id(value))
        if known is not None:
            return known
        self.keep.append(value)
        if isinstance(value, RemovableHandle):
            made = self.memo[id(value)] = self._handle(value)
            return made
        if isinstance(value, functools.partial):
            parts = [self.clone(p) for p in value.args]
            made = functools.partial(self.clone(value.func), *parts, **self.clone(value.keywords))
            self.memo[id(value)] = made
            return made
        if isinstance(value, tuple):
            parts = [self.clone(p) for p in value]
            if all(a is b for a, b in zip(parts, value, strict=True)):
                made = value
            else:
                made = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
            self.memo[id(value)] = made
            return made
        return self._object(value)

    def _handle(self, value: RemovableHandle) -> RemovableHandle:
        """Return a handle that removes from the copy the hook that `value` removes."""

        def copied(of: Any) -> Any:
            # The handle refers to the hooks weakly; those of a deleted module are gone.
            return OrderedDict() if of is None else self.clone(of)

        hooks, number, *extra = value.__getstate__()
        made = RemovableHandle.__new__(RemovableHandle)
        made.__setstate__((copied(hooks), number, [copied(of) for of in (extra or ((),))[0] or ()]))
        return made

    def _object(self, value: Any) -> Any:
        made: Any
        if type(value) in _BUILT_IN and not value and not getattr(value, "__dict__", None):
            made = self.memo[id(value)] = type(value)()
            return made
        if not self._copies(value):
            self.memo[id(value)] = value
            return value
        if isinstance(value, torch.nn.Module):
            made = value.__class__.__new__(value.__class__)
        elif isinstance(value, (dict, list, set)) and type(value).__module__ in (
            "builtins",
            "collections",
        ):
            made = copy.copy(value)
        else:
            try:
                made = copy.copy(value)
            except (TypeError, ValueError, AttributeError, RuntimeError, copy.Error):
                self.memo[id(value)] = value
                return value
        self.memo[id(value)] = made
        self._fill(made, value)
        return made

    def _fill(self, made: Any, value: Any) -> None:
        if isinstance(value, dict):
            # By dict's own methods: a subclass may override its own, as ModelOutput does.
            for name, part in list(dict.items(value)):
                dict.__setitem__(made, name, self.clone(part))
        elif isinstance(value, list):
            made[:] = [self.clone(part) for part in value]
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            copied = made.__dict__
            for name, part in attributes.items():
                if type(part) in tree.ATOMIC:
                    copied[name] = part
                elif name in _OF_MODULES and type(part) in _BUILT_IN and not part:
                    copied[name] = type(part)()
                else:
                    copied[name] = self.clone(part)
        for name, part in tree.slots_of(value).items():
            object.__setattr__(made, name, self.clone(part))

    @staticmethod
    def _copies(value: Any) -> bool:
        if isinstance(value, (torch.nn.Module, dict, list, set)):
            return True
        module = type(value).__module__.split(".")[0]
        return module not in (
            "builtins",
            "torch",
            "numpy",
            "jax",
            "logging",
            "_thread",
            "weakref",
            "re",
        ) and (hasattr(value, "__dict__") or bool(tree.slots_of(value)))


def clone_module(
    module: torch.nn.Module, tensor_map: Callable[[torch.Tensor], Any]
) -> tuple[torch.nn.Module, dict[int, Any]]:
    """Copy a module and the Python state below it.

    Each tensor is replaced by `tensor_map(tensor)`.

    Returns:
        The copy, and all copies by the id of the original (tensors included).
    """
    cloner = Cloner(tensor_map)
    return cloner.clone(module), cloner.memo
