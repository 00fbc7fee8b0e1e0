"""A module's state.

Copies to trace, every tensor that hangs on it by name, and what a call changed.
"""

import copy
import enum
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tpuport.model import numbers, structure
from tpuport.model.tensor import TracedTensor, meta_of

_SHARED = (
    *structure.ATOMS,
    torch.Generator,
    enum.Enum,
    threading.Thread,
    types.CodeType,
    types.GeneratorType,
)
# What torch keeps on every module: its own bookkeeping, hooks included.
_INTERNAL = frozenset(torch.nn.Module().__dict__) - {"training"}


class Cloner:
    """Copies modules, containers and plain objects; tensors go through `tensor_map`."""

    def __init__(self, tensor_map: Callable[[torch.Tensor], Any]) -> None:
        self.tensor_map = tensor_map
        self.memo: dict[int, Any] = {}
        self.keep: list[Any] = []

    def clone(self, value: Any) -> Any:
        """A copy of a value; the same copy each time."""
        if isinstance(value, torch.Tensor):
            known = self.memo.get(id(value))
            if known is None:
                known = self.memo[id(value)] = self.tensor_map(value)
                self.keep.append(value)
            return known
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.clone(value.__self__))
        if isinstance(value, _SHARED):
            return value
        if isinstance(value, weakref.ref):
            # Recurrent layers know their weights by such references, and look whether they changed.
            referent = value()
            is_tensor = isinstance(referent, torch.Tensor)
            return weakref.ref(self.clone(referent)) if is_tensor else value
        known = self.memo.get(id(value))
        if known is not None:
            return known
        self.keep.append(value)
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

    def _object(self, value: Any) -> Any:
        made: Any
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
            for name, part in list(dict.items(value)):
                dict.__setitem__(made, name, self.clone(part))
        elif isinstance(value, list):
            made[:] = [self.clone(part) for part in value]
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            for name, part in attributes.items():
                made.__dict__[name] = self.clone(part)
        for name, part in structure.slots_of(value).items():
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
        ) and (hasattr(value, "__dict__") or bool(structure.slots_of(value)))


def clone_module(
    module: torch.nn.Module, tensor_map: Callable[[torch.Tensor], Any]
) -> tuple[torch.nn.Module, dict[int, Any]]:
    """A copy of a module and of the Python state below it.

    Each tensor is replaced by `tensor_map(tensor)`.

    Returns:
        The copy, and the copies by id of the original (tensors included).
    """
    cloner = Cloner(tensor_map)
    return cloner.clone(module), cloner.memo


@dataclass
class StateTree:
    """Everything on a module that a call may read or change, taken apart.

    `leaves` are its tensors (and traced numbers) by name: the fqn for parameters and buffers,
    `fqn.attribute[...]` for others. `statics` are the Python values by name.
    """

    leaves: dict[str, Any]
    statics: dict[str, Any]
    specs: dict[str, structure.Spec]
    aliases: dict[str, list[str]]
    owners: dict[str, tuple[str, str]]
    values: dict[str, Any]
    registered: set[str]
    modules: dict[str, int]


def named_owners(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each distinct submodule with its first fqn."""
    yield from module.named_modules()


def state_tree(module: torch.nn.Module, number_names: set[str] = frozenset()) -> StateTree:  # type: ignore[assignment]
    """Take a module's state apart, by name.

    Args:
        module: any module.
        number_names: Python numbers (by name) that count as leaves.
    """
    tree = StateTree({}, {}, {}, {}, {}, {}, set(), {})
    names: dict[int, str] = {}

    def leaf(tree: StateTree, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            first = names.setdefault(id(value), name)
            if first != name:
                tree.aliases.setdefault(first, []).append(name)
                return
        tree.leaves[name] = value

    for fqn, owner in named_owners(module):
        tree.modules[fqn] = id(owner)
        prefix = fqn + "." if fqn else ""
        for holder in (owner._parameters, owner._buffers):
            for name, value in holder.items():
                if value is not None:
                    leaf(tree, prefix + name, value)
                    tree.registered.add(prefix + name)
                tree.statics[prefix + name] = None if value is None else _tensor_kind(value)
                tree.owners[prefix + name] = (fqn, name)
                tree.values[prefix + name] = value
        for name, value in owner.__dict__.items():
            if name in _INTERNAL:
                continue
            _attribute(tree, leaf, fqn, prefix, name, value, number_names)
    return tree


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, types.FunctionType, type)


def _attribute(
    tree: StateTree, leaf: Any, fqn: str, prefix: str, name: str, value: Any, number_names: set[str]
) -> None:
    full = prefix + name
    tree.owners[full] = (fqn, name)
    tree.values[full] = value
    if isinstance(value, numbers.SYMBOLIC) or (
        full in number_names and isinstance(value, (bool, int, float))
    ):
        tree.leaves[full] = value
        return
    if isinstance(value, _PLAIN):
        tree.statics[full] = (type(value), structure._hashable(value, []))
        return
    leaves, spec, paths = structure.flatten_with_paths(value, leaf=_state_leaf, path=full)
    for one, path in zip(leaves, paths, strict=True):
        leaf(tree, path, one)
    tree.specs[full] = spec
    tree.statics[full] = (spec.key, tuple(_tensor_kind(one) for one in leaves))


def _tensor_kind(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else type(value)


def _state_leaf(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, *numbers.SYMBOLIC))


@dataclass
class PythonChanges:
    """Attributes of modules that a call bound anew, tensors in them as placeholders."""

    names: list[str]
    before: dict[str, Any]
    after: dict[str, Any]
    owners: dict[str, tuple[str, str]]
    gone: list[str]
    registered: set[str]
    replacement: torch.nn.Module | None = None

    @property
    def host_state(self) -> dict[str, torch.Tensor]:
        """New values of parameters and buffers that depend on no input: no program returns them."""
        held = {n: v.value if isinstance(v, _Buffer) else v for n, v in self.after.items()}
        return {
            name: value
            for name, value in held.items()
            if name in self.registered
            and isinstance(value, torch.Tensor)
            and value.device.type != "meta"
        }

    def apply(self, module: torch.nn.Module) -> torch.nn.Module:
        """Put the changes in force on a module of the same structure.

        Gives the module to use from here on.

        A call that exchanged submodules gives another module, of the structure that it left.
        """
        if self.replacement is not None:
            return self.replacement
        for name in self.names:
            fqn, attribute = self.owners[name]
            owner = module.get_submodule(fqn)
            if name not in self.after:
                for holder in (owner._parameters, owner._buffers, owner.__dict__):
                    holder.pop(attribute, None)
                continue
            value = self.after[name]
            if attribute in owner._buffers and (value is None or isinstance(value, torch.Tensor)):
                owner._buffers[attribute] = value
            elif attribute in owner._parameters:
                owner._parameters[attribute] = value
            elif isinstance(value, _Buffer):
                owner.__dict__.pop(attribute, None)
                owner._buffers[attribute] = value.value
            else:
                owner.__dict__[attribute] = value
        return module


@dataclass
class _Buffer:
    """A tensor registered as a buffer during the call."""

    value: Any


def python_changes(
    before: StateTree, after: StateTree, module: torch.nn.Module
) -> PythonChanges | None:
    """What a call changed in the Python state of a module, or None.

    Args:
        before: the state tree of the traced copy before the call.
        after: of the same copy after it.
        module: that copy.
    """
    names = [
        name
        for name in dict.fromkeys([*before.statics, *after.statics])
        if before.statics.get(name, _ABSENT) != after.statics.get(name, _ABSENT)
    ]
    if not names and before.modules == after.modules:
        return None
    cloner = Cloner(_placeholder)
    cloner.memo.update({id(m): m for m in module.modules()})
    values: dict[str, Any] = {}
    for name in names:
        if name not in after.values:
            continue
        value = cloner.clone(after.values[name])
        if name in after.registered and name not in before.owners:
            value = _Buffer(value)
        values[name] = value
    gone = [name for name in before.leaves if name not in after.leaves]
    old = {name: before.values.get(name) for name in names}
    owners = {name: (after.owners.get(name) or before.owners[name]) for name in names}
    replacement = None
    if before.modules != after.modules:
        replacement = Cloner(_placeholder).clone(module)
    return PythonChanges(names, old, values, owners, gone, after.registered, replacement)


_ABSENT = object()


def _placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """A host tensor as it is.

    A traced one as an empty tensor on the meta device with its sizes and dtype.
    """
    if not isinstance(tensor, TracedTensor):
        return tensor
    meta = meta_of(tensor)
    if getattr(tensor, "_is_param", False):
        return torch.nn.Parameter(meta, requires_grad=not tensor._frozen)
    return meta
