"""Copies of modules and of the Python state below them."""

import contextlib
import copy
import enum
import functools
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from tpuport.foundation.pytree.children import (
    ATOMIC,
    ATOMS,
    OPAQUE,
    Children,
    blank_of,
    children,
    content,
    rebuilt,
    refill,
    slots_of,
    walk,
)
from tpuport.foundation.pytree.kept_iterators import KeptIterator, is_kept
from tpuport.foundation.pytree.tensor_classes import (
    is_class_of_tensors,
    like_class,
    plain_tensor,
)

_SHARED = (
    *ATOMS,
    torch.Generator,
    enum.Enum,
    threading.Thread,
    types.CodeType,
    types.GeneratorType,
)
# Values of these types lead nowhere.
_LEAVES = ATOMIC - {types.FunctionType}
_BUILT_IN = frozenset({dict, OrderedDict, set, list})
_PROXIES = frozenset({weakref.ProxyType, weakref.CallableProxyType})
WEAK_DICTS = frozenset({weakref.WeakKeyDictionary, WeakIdKeyDictionary, WeakTensorKeyDictionary})
# Ids are addresses, which are large.
_LEAST_ID = 1 << 20
# What a local function may keep its modules in.
_CONTAINERS = frozenset({dict, list, tuple})
# Objects of these packages are shared; a generator of `random` and an event are copied.
_SHARED_PACKAGES = OPAQUE - {"random", "threading"}
# Transforms refer to modules that are transforms too, and keep the values of their last call. An
# optimizer that a module keeps holds the module's parameters.
_COPIED = ("torch.distributions.", "torch.optim.")
# The dicts and sets that torch keeps on each module, most of them empty. No other object holds one,
# so an empty one needs no entry in the memo.
_OF_MODULES = frozenset(n for n, v in torch.nn.Module().__dict__.items() if type(v) in _BUILT_IN)


class Cloner:
    """Copies modules, containers and plain objects; tensors go through `tensor_map`.

    With a `refusal` the copy has no iterators, but what raises it where code advances them.
    """

    def __init__(
        self,
        tensor_map: Callable[[torch.Tensor], Any],
        refusal: Callable[[], Exception] | None = None,
    ) -> None:
        self.tensor_map, self.refusal = tensor_map, refusal
        # What copies hold in place of functions of Python, by the id of each.
        self.stand_ins: dict[int, Any] = {}
        self.memo: dict[int, Any] = {}
        self.keep: list[Any] = []
        # What copies of functions hold, to be filled: cells, and functions with default values.
        self._cells: list[types.CellType] = []
        self._with_defaults: list[types.FunctionType] = []
        self._held: frozenset[int] | None = None
        # Copies of weak dicts with what they are of, and of containers that may hold ids.
        self._weak_dicts: list[tuple[Any, Any]] = []
        self._with_ids: list[Any] = []
        self._root: Any = None
        # The copies of containers that local functions refer to, and what they held at first.
        self.closed: list[tuple[Any, Children]] = []

    def clone(self, value: Any) -> Any:
        """Return the copy of a value; the same copy each time."""
        self._root = value
        made = self._clone(value)
        # Only now are all the copies there that local functions may refer to.
        while self._cells or self._with_defaults:
            if self._cells:
                cell = self._cells.pop()
                cell.cell_contents = self._bound(cell.cell_contents)
            else:
                self._bind_defaults(self._with_defaults.pop())
        self._look_up_copies()
        return made

    def _look_up_copies(self) -> None:
        """Let copies find in tables what the originals find under their weak references and ids."""
        while self._weak_dicts:
            new, old = self._weak_dicts.pop()
            for key, value in list(old.items()):
                new[self.memo.get(id(key), key)] = self._clone(value)
        while self._with_ids:
            made = self._with_ids.pop()
            content = children(made)
            held = content.keys or content.parts
            if any(type(value) is int and value >= _LEAST_ID for value in held):
                keys = content.keys and [self._id(key) for key in content.keys]
                parts = [self._id(part) for part in content.parts]
                refill(made, content._replace(keys=keys, parts=parts))

    def _id(self, value: Any) -> Any:
        """Return the id of the copy for that of a tensor or module that was copied."""
        known = self.memo.get(value) if type(value) is int else None
        return id(known) if isinstance(known, (torch.Tensor, torch.nn.Module)) else value

    def _clone(self, value: Any) -> Any:
        kind = type(value)
        if kind in ATOMIC:
            return self._atom(value)
        if kind in _PROXIES:
            return self._proxy(value)
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
                known = self.memo[id(value)] = like_class(self.tensor_map(value), value)
                self.keep.append(value)
            return known
        if self.refusal is not None and is_kept(value):
            return self._iterator(value, self.refusal)
        return self._other(value)

    def _iterator(self, value: Any, refusal: Callable[[], Exception]) -> KeptIterator:
        """Return what stands for an iterator, or for what one of another copy stands for."""
        of = value.of if isinstance(value, KeptIterator) else value
        if id(of) not in self.memo:
            self.keep.append(of)
            self.memo[id(of)] = KeptIterator(of, refusal)
        return self.memo[id(of)]

    def _atom(self, value: Any) -> Any:
        if type(value) is types.FunctionType:
            return self._function(value)
        return self.stand_ins.get(id(value), value) if self.stand_ins else value

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        """Return a function that refers to the copies of what this one refers to.

        Modules keep such functions: `self.mlpf = lambda x: mlp.c_proj(mlp.act(mlp.c_fc(x)))`, hooks
        that fill a dict of the module, and in a loop `lambda x, layer=layer: layer(x)`. A function
        without such a reference is the same object.
        """
        if not self._leads(value):
            return value
        known = self.memo.get(id(value))
        if known is None:
            cells = tuple(self._cell(c) if self._leads(c) else c for c in value.__closure__ or ())
            known = types.FunctionType(
                value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
            )
            known.__kwdefaults__, known.__qualname__ = value.__kwdefaults__, value.__qualname__
            known.__dict__.update(value.__dict__)
            self.memo[id(value)] = known
            self.keep.append(value)
            self._with_defaults.append(known)
        return known

    def _cell(self, cell: types.CellType) -> types.CellType:
        """Return the copy of a cell, which functions may share."""
        if id(cell) not in self.memo:
            self.keep.append(cell)
            self.memo[id(cell)] = made = types.CellType(cell.cell_contents)
            self._cells.append(made)
        return self.memo[id(cell)]

    def _bind_defaults(self, function: types.FunctionType) -> None:
        if function.__defaults__:
            function.__defaults__ = tuple(map(self._bound, function.__defaults__))
        if function.__kwdefaults__:
            named = function.__kwdefaults__.items()
            function.__kwdefaults__ = {name: self._bound(held) for name, held in named}

    def _leads(self, value: Any) -> bool:
        """Return whether a function or cell leads to a module, a tensor or state of the root."""
        if type(value) is types.FunctionType and not _held_by(value):
            return False
        if refers(value):
            return True
        if self._held is None:
            self._held = frozenset(map(id, filter(is_state, walk([self._root], state_below))))
        return refers(value, held=self._held)

    def _bound(self, held: Any) -> Any:
        """Return the copy of what a cell holds; what is no part of the copied module stays."""
        if id(held) in self.memo:
            return self.memo[id(held)]
        if not self._leads(held):
            return held
        if isinstance(held, types.FunctionType):
            return self._function(held)
        if isinstance(held, types.MethodType):
            return types.MethodType(held.__func__, self._bound(held.__self__))
        if isinstance(held, functools.partial):
            parts = [self._bound(part) for part in held.args]
            options = {name: self._bound(part) for name, part in held.keywords.items()}
            return functools.partial(self._bound(held.func), *parts, **options)
        if type(held) in _CONTAINERS:
            self.keep.append(held)
            note = functools.partial(self.memo.__setitem__, id(held))
            made = rebuilt(children(held), self._bound, note)
            self.closed.append((made, children(made)))
            return made
        return held

    def _other(self, value: Any) -> Any:
        known = self.memo.get(id(value))
        if known is not None:
            return known
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._clone(value.__self__))
        if isinstance(value, _SHARED):
            return value
        if isinstance(value, (weakref.ref, KeptIterator)):
            return self._referring(value)
        self.keep.append(value)
        if type(value) in WEAK_DICTS:
            made = self.memo[id(value)] = copy.copy(value)
            made.clear()
            self._weak_dicts.append((made, value))
            return made
        if isinstance(value, RemovableHandle):
            made = self.memo[id(value)] = self._handle(value)
            return made
        if isinstance(value, functools.partial):
            parts = [self._clone(p) for p in value.args]
            made = functools.partial(self._clone(value.func), *parts, **self._clone(value.keywords))
            self.memo[id(value)] = made
            return made
        if isinstance(value, (tuple, frozenset)):
            content = children(value)
            if all(self._clone(part) is part for part in content.parts):
                self.memo[id(value)] = value
                return value
            return rebuilt(content, self._clone, lambda made: self.memo.update({id(value): made}))
        return self._object(value)

    def _referring(self, value: weakref.ref[Any] | KeptIterator) -> Any:
        """Return a weak reference to the copy, or the iterator that a value stands for."""
        if isinstance(value, KeptIterator):
            return value.of
        return self._weak(value)

    def _weak(self, value: weakref.ref[Any]) -> weakref.ref[Any]:
        """Return a weak reference to the copy; to the value itself if the copy does not keep it.

        Children refer to their parents so, and recurrent layers to their weights, to notice that
        one changed.
        """
        referent = value()
        if type(value) is not weakref.ref or not self._is_kept(referent):
            return value
        return weakref.ref(self._clone(referent))

    def _proxy(self, value: Any) -> Any:
        """Return a weak proxy of the copy; a copy if no other copy refers to it.

        Lightning's optimizers refer to their strategy so.
        """
        known = self.memo.get(id(value))
        if known is not None:
            return known
        self.keep.append(value)
        try:
            referent = value.__repr__.__self__  # a proxy hands on what it is asked for
        except ReferenceError:
            return value
        kept = self._is_kept(referent)
        made = self._clone(referent)
        self.memo[id(value)] = weakref.proxy(made) if kept and made is not referent else made
        return self.memo[id(value)]

    def _is_kept(self, value: Any) -> bool:
        """Return whether the copy of what is being copied refers to the copy of a value."""
        if id(value) in self.memo or isinstance(value, torch.Tensor):
            return True
        root = self._root
        if not (isinstance(value, torch.nn.Module) and isinstance(root, torch.nn.Module)):
            return False
        return any(value is one for one in torch.nn.Module.modules(root))

    def _handle(self, value: RemovableHandle) -> RemovableHandle:
        """Return a handle that removes from the copy the hook that `value` removes."""

        def copied(of: Any) -> Any:
            # The handle refers to the hooks weakly; those of a deleted module are gone.
            return OrderedDict() if of is None else self._clone(of)

        hooks, number, *extra = value.__getstate__()
        made = RemovableHandle.__new__(RemovableHandle)
        made.__setstate__((copied(hooks), number, [copied(of) for of in (extra or ((),))[0] or ()]))
        return made

    def _object(self, value: Any) -> Any:
        if type(value) in _BUILT_IN and not value and not getattr(value, "__dict__", None):
            made = self.memo[id(value)] = type(value)()
            return made
        made = self.memo[id(value)] = self._shallow(value)
        if isinstance(value, torch.nn.Module):
            self._fill_module(made, value)
        elif made is not value:
            content = children(value)
            refill(made, content.map(self._clone))
            if int in set(map(type, content.keys or content.parts)):
                self._with_ids.append(made)
        return made

    def _shallow(self, value: Any) -> Any:
        """Return a copy whose parts are still to be copied; the value itself if it is shared."""
        # An optimizer's `__setstate__` puts the hooks of all optimizers around the `step` of its
        # class: Lightning's, which calls that of another optimizer, would run them twice.
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            return blank_of(value.__class__)(value.__class__)
        home = type(value).__module__
        is_shared = home.split(".")[0] in _SHARED_PACKAGES and not home.startswith(_COPIED)
        is_object = not is_shared and (hasattr(value, "__dict__") or bool(slots_of(value)))
        if is_object or isinstance(value, (dict, list, set, deque)):
            with contextlib.suppress(
                TypeError, ValueError, AttributeError, RuntimeError, copy.Error
            ):
                return copy.copy(value)
        return value

    def _fill_module(self, made: torch.nn.Module, value: torch.nn.Module) -> None:
        copied = made.__dict__
        for name, part in value.__dict__.items():
            if type(part) in ATOMIC:
                copied[name] = self._atom(part)
            elif name in _OF_MODULES and type(part) in _BUILT_IN and not part:
                copied[name] = type(part)()
            else:
                copied[name] = self._clone(part)
        for name, part in slots_of(value).items():
            object.__setattr__(made, name, self._clone(part))


def parameter_like(value: torch.Tensor, like: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return a parameter with another value, the same attributes and the hooks on its gradient."""
    if is_class_of_tensors(type(value)):
        value = plain_tensor(value)
    made = torch.nn.Parameter(value, requires_grad=like.requires_grad)
    vars(made).update(vars(like))
    for hook in (like._backward_hooks or {}).values():
        made.register_hook(hook)
    return made


def clone_module(
    module: torch.nn.Module,
    tensor_map: Callable[[torch.Tensor], Any],
    refusal: Callable[[], Exception] | None = None,
) -> tuple[torch.nn.Module, dict[int, Any]]:
    """Copy a module and the Python state below it.

    Each tensor is replaced by `tensor_map(tensor)`; for `refusal` see `Cloner`.

    Returns:
        The copy, and all copies by the id of the original (tensors included).
    """
    cloner = Cloner(tensor_map, refusal)
    return cloner.clone(module), cloner.memo


def refers(value: Any, seen: set[int] | None = None, held: frozenset[int] = frozenset()) -> bool:
    """Return whether a function, or what its cell holds, leads to a module or a tensor.

    With `held`, it may lead to an object with one of these ids, too.
    """
    seen = set() if seen is None else seen
    if isinstance(value, (torch.nn.Module, torch.Tensor)) or id(value) in held:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))  # A local function that calls itself is in a cell of its own.
    parts: Sequence[Any] = ()
    if isinstance(value, types.MethodType):
        parts = [value.__self__]
    elif isinstance(value, types.FunctionType):
        parts = _held_by(value)
    elif isinstance(value, functools.partial):
        parts = [value.func, *value.args, *value.keywords.values()]
    elif type(value) in _CONTAINERS:
        parts = children(value).parts
    elif isinstance(value, types.CellType):
        parts = content(value)
    return any(refers(part, seen, held) for part in parts)


def _held_by(function: types.FunctionType) -> list[Any]:
    """Return what a function's cells and default values hold that may refer to others."""
    parts = [part for cell in function.__closure__ or () for part in content(cell)]
    parts += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [part for part in parts if type(part) not in _LEAVES]


def is_state(value: Any) -> bool:
    """Return whether a value is a container or object that a module may hold as its state."""
    if type(value) in _PROXIES:  # one of a deleted object has no class
        return False
    return not isinstance(value, (tuple, frozenset, functools.partial, *_SHARED))


def state_below(value: Any) -> list[Any]:
    """Return what a module's state leads to, but not what its functions do."""
    if type(value) in _PROXIES:
        return []
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, (torch.Tensor, *_SHARED)):
        return []
    content = children(value)
    return [*content.parts, *content.held.values()]
