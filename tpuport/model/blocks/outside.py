"""What the code of a block may read in Python from outside of the block.

Globals, what closures hold, default values, attributes of classes, of Python modules and of modules
of torch that are not in the block, and context variables: all that the code names which a block
runs. It is noted when a block is traced, and looked at again before another call reuses the trace.
"""

import builtins
import contextvars
import functools
import gc
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

import numpy as np
import torch

from tpuport.diagnosis.frames import is_inside
from tpuport.model import host_randomness, structure
from tpuport.model.blocks.held import attributes_of
from tpuport.model.blocks.same_values import same_value
from tpuport.model.blocks.watched import OWN, Record, Watcher, is_iterator, is_unchanged
from tpuport.source.codegen import nested_codes

_ABSENT = object()
_SOURCES = (random.Random, np.random.Generator, np.random.RandomState)
_CALLABLES = (
    *(types.FunctionType, types.MethodType, functools.partial, functools._lru_cache_wrapper),
    *(staticmethod, classmethod, property, functools.cached_property),
)
# pytest: an assertion that it rewrote names its state.
_LIBRARIES = frozenset("torch torchax jax jaxlib numpy tpuport builtins _pytest pytest".split())
# What Python calls without a name in the code, but for no computation of a block.
_QUIET = frozenset(
    "__init__ __new__ __repr__ __str__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __copy__"
    " __deepcopy__ __del__ __init_subclass__ __class_getitem__ __sizeof__ __dir__".split()
)

# What tells a view from a tensor of its own: stand-ins of arguments are none.
_OF_MEMORY = frozenset(
    "_base _is_view storage_offset data_ptr storage untyped_storage as_strided is_set_to".split()
)

is_library_file = functools.cache(is_inside)


class Outside(Watcher):
    """Notes what lies outside of a block and its arguments, and what its code may read of it.

    Args:
        block: the block and all modules in it.
        arguments: Python values that are handed to it as they are.
        caller: the code that calls the block.

    Attributes:
        found: what was noted.
        names: what its code reads by name: globals, attributes.
        iterator: an iterator that its code knows, if any: what it gives next cannot be seen.
    """

    def __init__(
        self,
        block: Iterable[torch.nn.Module],
        arguments: Iterable[Any],
        caller: types.CodeType,
    ) -> None:
        super().__init__()
        self.caller = caller
        self.found: list[Record] = []
        self.iterator: Any = None
        block = list(block)
        self._own = {id(module) for module in block}
        self._seen: dict[int, Any] = {}
        self._codes: set[types.CodeType] = set()
        self.names: set[str] = set()
        # What is read by name (classes, Python modules, modules of torch), and the names.
        self._holders: dict[int, tuple[Any, set[str]]] = {}
        # What they gave, by name; and which of the names they have.
        self._given: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._present: list[Record] = []
        for module in block:
            self._see_class(type(module), ("forward", *_called_by_python(type(module))))
            for name, value in module.__dict__.items():
                # What these hold is watched for every block (`Member.held`).
                if name not in OWN and not self._passes(value):
                    self._of(value, 0)
        for value in arguments:
            self._see(value)
        self._settle()

    @property
    def is_unchanged(self) -> bool:
        """Whether all of it is what it was."""
        return is_unchanged(self.noted)

    @property
    def tells_memory(self) -> bool:
        """Whether the code may ask how a tensor lies in memory."""
        return not self.names.isdisjoint(_OF_MEMORY)

    @property
    def noted(self) -> list[Record]:
        """All that is to be seen again."""
        given = [(_gives_the_same, of, items) for of, items in self._given.values()]
        return [*self.found, *given, *self._present]

    def saw(self, frame: types.FrameType | None) -> None:
        """Note code that runs, and that no name had led to.

        Args:
            frame: where an operation was called.
        """
        known = len(self._codes)
        while frame is not None and frame.f_code is not self.caller:
            if frame.f_code not in self._codes:
                self._see_frame(frame)
            frame = frame.f_back
        if len(self._codes) > known:
            self._settle()

    def _see_frame(self, frame: types.FrameType) -> None:
        code = frame.f_code
        self._codes.add(code)
        if is_library_file(code.co_filename):
            return
        if set(code.co_freevars) - {"__class__"}:
            # What a closure holds is on its function, which no frame tells.
            for function in gc.get_referrers(code):
                if isinstance(function, types.FunctionType):
                    self._see_function(function)
        self._see_code(code, frame.f_globals)

    # -- code --------------------------------------------------------------------------------------

    def _see_function(self, function: types.FunctionType) -> None:
        code = function.__code__
        if id(function) in self._seen or is_library_file(code.co_filename):
            return
        self._seen[id(function)] = function
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if name != "__class__":
                self._note(_content, cell)
        for held in (function.__defaults__, function.__kwdefaults__, function.__dict__):
            if held:
                self._see(held)
        self._see_code(code, function.__globals__)

    def _see_code(self, code: types.CodeType, names: dict[str, Any]) -> None:
        self._codes.update(nested_codes(code))
        found = _names_in(code)
        self.names |= found
        known = self._known(names)
        for name in found - known:
            known.add(name)
            if name in names:
                self._note_name(names, name)
            elif not hasattr(builtins, name):
                for module in (name, f"{names.get('__package__')}.{name}"):
                    self._see(sys.modules.get(module))  # code may import it by itself

    def _known(self, holder: Any) -> set[str]:
        """The names that were looked up in a holder."""
        return self._holders.setdefault(id(holder), (holder, set()))[1]

    def _settle(self) -> None:
        """Look every name up in all that is read by name, until nothing new is found."""
        size = None
        while size != (len(self.names), len(self._holders)):
            size = len(self.names), len(self._holders)
            for holder, known in list(self._holders.values()):
                # Of globals code reads those that it names itself.
                new = () if isinstance(holder, dict) else self.names - known
                for name in new:
                    known.add(name)
                    if name in _named(holder):
                        self._note_name(holder, name)
        self._present = [
            (_has_same_names, (holder, known), (len(_named(holder)), known & _named(holder).keys()))
            for holder, known in self._holders.values()
        ]

    # -- values ------------------------------------------------------------------------------------

    def _note(self, read: Callable[[Any], Any], of: Any) -> None:
        value = read(of)
        self.found.append((functools.partial(self._is_same_read, read), of, value))
        self._see(value)

    def _note_name(self, holder: Any, name: str) -> None:
        if isinstance(holder, type) and isinstance(_named(holder)[name], _CALLABLES):
            self._see(_named(holder)[name])  # a method: it stays
        else:
            value = _named(holder)[name]
            self._given.setdefault(id(holder), (holder, {}))[1][name] = value
            self._see(value)

    def _is_same_read(self, read: Callable[[Any], Any], of: Any, was: Any) -> bool:
        now = read(of)
        return now is was or same_value(now, was)

    def _see(self, value: Any) -> None:
        if not self._passes(value):
            self.found += self._of(value, 0)

    def _passes(self, value: Any) -> bool:
        kind = type(value)
        return kind in structure.ATOMIC and kind not in (type, types.FunctionType)

    def _of(self, value: Any, depth: int) -> list[Record]:
        if isinstance(value, type):
            self._see_class(value, ("__init__", "__new__", "__post_init__"))
        elif isinstance(value, _CALLABLES):
            for part in _parts_of_callable(value):
                if isinstance(part, types.FunctionType):
                    self._see_function(part)
                else:
                    self._see(part)
        elif isinstance(value, types.ModuleType):
            if not _is_library(value.__name__):
                self._known(value)
        elif isinstance(value, torch.nn.Module):
            if id(value) not in self._own:
                self._known(value)
                self._see_class(type(value), _called_by_python(type(value)))
        elif not self._is_special(value):
            return super()._of(value, depth)
        return []

    def _inside(self, value: Any, depth: int) -> list[Record]:
        if structure.is_open(value):
            self._see_class(type(value), _called_by_python(type(value)))
        return super()._inside(value, depth)

    def _is_special(self, value: Any) -> bool:
        """Note what is neither container nor plain object; False if it is one."""
        if id(value) in self._seen:
            return True
        if isinstance(value, contextvars.ContextVar):
            self._note(_context, value)
        elif isinstance(value, weakref.ref):
            self._note(_referent, value)
        elif isinstance(value, threading.local):
            self._note(structure.attributes_of, value)
        elif isinstance(value, _SOURCES):
            self._note(host_randomness.state_of, value)
        elif is_iterator(value):
            self.iterator = value
        else:
            return False
        self._seen[id(value)] = value
        return True

    def _see_class(self, cls: type, names: Iterable[str]) -> None:
        for base in cls.__mro__:
            if _is_library(base.__module__):
                continue
            known = self._known(base)
            for name in names:
                if name in base.__dict__ and name not in known:
                    known.add(name)
                    self._note_name(base, name)


# -- reading ---------------------------------------------------------------------------------------


def _named(holder: Any) -> Any:
    """What is read by name of globals, a class, a Python module or a module of torch."""
    if isinstance(holder, dict):
        return holder
    return attributes_of(holder) if isinstance(holder, torch.nn.Module) else vars(holder)


def _gives_the_same(holder: Any, given: dict[str, Any]) -> bool:
    named = _named(holder)
    now = [named.get(name, _ABSENT) for name in given]
    return all(map(is_, now, given.values())) or all(map(same_value, now, given.values()))


def _has_same_names(of: tuple[Any, set[str]], were: tuple[int, set[str]]) -> bool:
    holder, names = of
    # Most of the time nothing was added, which is soon seen.
    return len(_named(holder)) == were[0] or names & _named(holder).keys() == were[1]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return _ABSENT


def _context(variable: contextvars.ContextVar[Any]) -> Any:
    return variable.get(_ABSENT)


def _referent(reference: Any) -> Any:
    return reference()


def _parts_of_callable(value: Any) -> list[Any]:
    match value:
        case types.FunctionType():
            return [value]
        case types.MethodType():
            return [value.__func__, value.__self__]
        case functools.partial():
            return [value.func, value.args, value.keywords]
        case property():
            return [value.fget]
        case functools.cached_property():
            return [value.func]
        case functools._lru_cache_wrapper():
            return [value.__wrapped__]
        case _:
            return [value.__func__]


@functools.lru_cache(maxsize=4096)
def _is_library(module: str) -> bool:
    """Whether it is a Python module, by its name, that no model keeps its state in."""
    name = module.partition(".")[0]
    return name in _LIBRARIES or (name in sys.stdlib_module_names and name != "__main__")


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names that code reads: globals, attributes, and those that it may look up by a string."""
    names: set[str] = set()
    for one in nested_codes(code):
        names.update(one.co_names)
        names.update(c for c in one.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(names)


@functools.lru_cache(maxsize=4096)
def _called_by_python(cls: type) -> tuple[str, ...]:
    """The methods of a class that operators call, not code by their name."""
    return tuple(
        name
        for base in cls.__mro__
        if not _is_library(base.__module__)
        for name, value in vars(base).items()
        if name[:2] == "__" == name[-2:] and name not in _QUIET and isinstance(value, _CALLABLES)
    )
