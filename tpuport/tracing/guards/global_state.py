"""Python values that the code of a program reads, besides its arguments: globals, closures, class
attributes, configuration objects. A program has baked them in; here their current values are read.
"""

import builtins
import contextlib
import copy
import sys
import types
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.tracing.core.tensor import TracedTensor

# Packages whose code is not followed: scripts do not change what a library's code reads.
_FOLLOWED_NOT = sys.stdlib_module_names - {"__main__"} | set(
    "torch torchax jax jaxlib numpy tpuport einops".split()
)
_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SETUP = frozenset({"__init__", "__new__", "__init_subclass__", "__repr__", "extra_repr"})
# Code that uses these may read any attribute.
_ANY = frozenset({"getattr", "vars", "__dict__", "attrgetter", "__getattr__", "__getattribute__"})
_CONTAINERS = (list, dict, set, deque)
_LARGEST, _MOST_FUNCTIONS, _MOST_BYTES = 4096, 5000, 4096
_MISSING = object()


class GlobalState:
    """Python values that a module's code reads, found by following names from its methods.

    Attributes:
        names: every name in that code, attributes included; None if it may read any.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._names: set[str] = set()
        self._reads_any = False
        self._places: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
        self._cells: dict[int, types.CellType] = {}
        # By class the types of attributes to look at: of a library's classes only plain values.
        self._classes: dict[type, tuple[type, ...]] = {}
        self._codes: set[types.CodeType] = set()
        self._todo: deque[types.FunctionType] = deque()
        # Whether a global got its first value, and all values from before the call that set it.
        self.has_settled = False
        self._first: Any = None
        for one in module.modules():
            self._note_class(type(one), torch_too=True)
            for value in [*vars(one).values(), *_hooks(one)]:
                self._note_value(value)
        while self._todo and len(self._codes) < _MOST_FUNCTIONS:
            self._follow(self._todo.popleft())

    def reads(self, attribute: str) -> bool:
        """Return whether the code may read an attribute of this name."""
        return self._reads_any or attribute in self._names

    def values(
        self, module: torch.nn.Module, kept: list[tuple[Any, Any]] | None = None
    ) -> dict[str, Any]:
        """Return what the code would read now, by readable names; equal if nothing changed.

        Each container that is read is appended to `kept` with a shallow copy.
        """
        freezer = _Freezer(self, kept)
        found: dict[str, Any] = {}
        for namespace, name in self._places.values():
            value = namespace.get(name, _MISSING)
            if not isinstance(value, torch.Tensor):
                found[f"{namespace.get('__name__', '')}.{name}"] = freezer.freeze(value)
        for index, cell in enumerate(self._cells.values()):
            if not isinstance(_content(cell), torch.Tensor):
                found[f"closure {index}"] = freezer.freeze(_content(cell))
        return found | self._held(module, freezer)

    def _held(self, module: torch.nn.Module, freezer: "_Freezer") -> dict[str, Any]:
        """Return the values of attributes of classes and modules."""
        found: dict[str, Any] = {}
        for cls, kinds in self._classes.items():
            for name, value in vars(cls).items():
                if isinstance(value, kinds) and name[:2] != "__":
                    found[f"{cls.__name__}.{name}"] = freezer.freeze(value)
        for fqn, one in module.named_modules():
            for name, value in vars(one).items():
                if type(value) not in _ATOMS and name not in _INTERNAL and self.reads(name):
                    found[f"{fqn}.{name}"] = freezer.freeze(value)
        return found

    @contextlib.contextmanager
    def left_alone(self, module: torch.nn.Module) -> Iterator[None]:
        """Check that user code run in the block changes nothing outside of its module.

        A global that was None and is set (a cache filled at first use) stays: code that runs
        again finds it.

        Raises:
            PortError: it wrote outside of its module. The old values are restored.
        """
        kept: list[tuple[Any, Any]] = []
        before = self.values(module, kept)
        places = [(space, name, space.get(name, _MISSING)) for space, name in self._places.values()]
        cells = [(cell, _content(cell)) for cell in self._cells.values()]
        # A call may run the code several times (trace, reference): restore to before the first run.
        first = self._first = self._first or (kept, places, cells)
        try:
            yield
        finally:
            after = self.values(module)
            changed = [name for name in before if before[name] != after.get(name, _MISSING)]
            if changed and _are_first_values(changed, places):
                self.has_settled, changed = True, []
            if changed:
                _put_back(*first)
        if changed:
            what = ", ".join(name.lstrip(".") for name in changed[:3])
            raise PortError(
                f"a call of {type(module).__name__} writes to what is outside of it ({what}), which"
                " a program would do once",
                code="TPU406",
                remedy="return what is written, or leave the class to eager PyTorch: --eager",
            )

    def begin(self) -> None:
        """Start another call of the module."""
        self.has_settled, self._first = False, None

    # -- what the code reads -----------------------------------------------------------------------

    def _note_class(self, cls: type, *, torch_too: bool = False) -> None:
        for base in cls.__mro__:
            if base in self._classes or base in (object, torch.nn.Module):
                continue
            if _top(base.__module__) in _FOLLOWED_NOT and not torch_too:
                continue
            if not hasattr(base, "__dict__") or base.__module__ == "builtins":
                continue
            library = _is_library(vars(sys.modules.get(base.__module__, builtins)))
            self._classes[base] = _ATOMS if library else (*_ATOMS, list, dict, tuple, set)
            for name, value in vars(base).items():
                if name not in _SETUP:
                    self._note_value(value)

    def _note_value(self, value: Any) -> None:
        if isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, property):
            for part in (value.fget, value.fset):
                self._note_value(part)
        elif isinstance(value, types.FunctionType):
            self._todo.append(value)
        elif isinstance(value, type):
            self._note_class(value)
        elif not isinstance(value, (*_ATOMS, torch.Tensor, types.ModuleType, torch.nn.Module)):
            if type(value).__module__ != "builtins":
                self._note_class(type(value))
            wrapped = getattr(value, "__wrapped__", None)
            if isinstance(wrapped, types.FunctionType):
                self._todo.append(wrapped)

    def _follow(self, function: types.FunctionType) -> None:
        if function.__code__ in self._codes:
            return
        names: set[str] = set()
        for code in _nested(function.__code__):
            self._codes.add(code)
            names |= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
        self._names |= names
        if _top(function.__module__ or "") in _FOLLOWED_NOT:
            return
        self._reads_any = self._reads_any or bool(names & _ANY)
        self._note_names(function.__globals__, names)
        library = _is_library(function.__globals__)
        for cell in function.__closure__ or ():
            if not library or isinstance(_content(cell), _ATOMS):
                self._cells[id(cell)] = cell
            self._note_value(_content(cell))

    def _note_names(self, namespace: dict[str, Any], names: set[str]) -> None:
        for name in names:
            value = namespace.get(name, _MISSING)
            if value is _MISSING or (id(namespace), name) in self._places:
                continue
            if isinstance(value, types.ModuleType):
                if _top(value.__name__) not in _FOLLOWED_NOT and value is not builtins:
                    self._places[id(namespace), name] = (namespace, name)
                    self._note_names(vars(value), names)
                continue
            if not _is_library(namespace) or isinstance(value, _ATOMS):
                self._places[id(namespace), name] = (namespace, name)
            self._note_value(value)


class _Freezer:
    """A converter of Python values to ones that compare by content."""

    def __init__(self, outside: GlobalState, kept: list[tuple[Any, Any]] | None) -> None:
        self._outside, self._kept = outside, kept
        self._known: dict[int, Any] = {}
        self._left = _LARGEST

    def freeze(self, value: Any) -> Any:
        """Return a value that compares equal as long as this one has the same content."""
        self._left = _LARGEST
        return self._frozen(value)

    def _frozen(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return (kind, repr(value) if kind in (float, complex) else value)
        known = self._known.get(id(value))
        if known is not None:
            return known
        self._known[id(value)] = _Same(value)
        self._left -= 1
        made = self._known[id(value)] = self._contents(value) if self._left > 0 else _Same(value)
        return made

    def _contents(self, value: Any) -> Any:
        kind = type(value)
        if self._kept is not None and kind in _CONTAINERS:
            self._kept.append((value, copy.copy(value)))
        if isinstance(value, (list, tuple, dict, set, frozenset)) and len(value) > self._left:
            return (_Same(value), len(value))
        if isinstance(value, (list, tuple, deque)):
            return (kind, tuple(map(self._frozen, value)))
        if isinstance(value, (set, frozenset)):
            return (kind, frozenset(v if isinstance(v, _ATOMS) else id(v) for v in value))
        if isinstance(value, np.ndarray):
            small = value.nbytes <= _MOST_BYTES and value.dtype != object
            return (kind, value.shape, value.tobytes()) if small else _Same(value)
        if isinstance(value, dict):
            items = tuple((k if isinstance(k, _ATOMS) else id(k), v) for k, v in value.items())
            return (kind, tuple((k, self._frozen(v)) for k, v in items), self._attributes(value))
        return self._attributes(value)

    def _attributes(self, value: Any) -> Any:
        kind = type(value)
        opaque = (*pytree.ATOMS, torch.Tensor, torch.nn.Module, weakref.ref, torch.Generator)
        if isinstance(value, opaque) or kind.__module__.split(".")[0] in pytree.OPAQUE:
            return None if isinstance(value, dict) else _Same(value)
        held = pytree.attributes_of(value)
        if self._kept is not None and isinstance(getattr(value, "__dict__", None), dict):
            self._kept.append((value.__dict__, dict(value.__dict__)))
        return (
            None if isinstance(value, dict) else _Same(value),
            tuple((k, self._frozen(v)) for k, v in held.items() if self._outside.reads(k)),
        )


def _put_back(kept: list[Any], places: list[Any], cells: list[Any]) -> None:
    for container, before in kept:
        if isinstance(container, list):
            container[:] = before
            continue
        container.clear()
        container.extend(before) if isinstance(container, deque) else container.update(before)
    for space, name, value in places:
        if value is _MISSING:
            space.pop(name, None)
        elif space.get(name, _MISSING) is not value:
            space[name] = value
    for cell, value in cells:
        if _content(cell) is not value:
            cell.cell_contents = value


def _are_first_values(changed: list[str], places: list[Any]) -> bool:
    """Return whether all that changed are globals that were None and got a lasting value."""
    set_now = {
        f"{space.get('__name__', '')}.{name}": space[name]
        for space, name, value in places
        if value is None and space.get(name) is not None
    }
    return all(name in set_now and not _is_of_one_call(set_now[name]) for name in changed)


def _is_of_one_call(value: Any) -> bool:
    """Return whether something holds a tensor of a trace, or one with a graph."""
    leaves = pytree.flatten(value, objects=True)[0]
    return any(
        isinstance(leaf, TracedTensor) or (isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        for leaf in leaves
    )


class _Same:
    """An object compared by identity, kept alive so that no other object gets its id."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


_INTERNAL = frozenset(torch.nn.Module().__dict__)


def _is_library(namespace: dict[str, Any]) -> bool:
    return "site-packages" in (namespace.get("__file__") or "")


def _top(name: str) -> str:
    return name.split(".", 1)[0]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    for held in (module._forward_hooks, module._forward_pre_hooks):
        yield from held.values()
