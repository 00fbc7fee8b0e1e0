"""A recorder of the Python state outside of a block that the block's code may read.

This covers globals, closure cells, default values, context variables, and attributes of classes, of
Python modules and of torch modules outside of the block, as far as the code names them. They are
recorded when a block is traced, and compared before another call reuses the trace.
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
from typing import Any

import numpy as np
import torch

from tpuport.foundation import pytree
from tpuport.foundation.pytree.compare import same_value
from tpuport.source.rewrite.codegen import nested_codes
from tpuport.tracing.guards import host_randomness, names_read
from tpuport.tracing.guards.attribute_proxy import attributes_of
from tpuport.tracing.guards.names_read import called_by_python, is_library, is_library_file, named
from tpuport.tracing.guards.watch import OWN, Record, Watcher, is_iterator

_SOURCES = (random.Random, np.random.Generator, np.random.RandomState)


class PythonState(Watcher):
    """A recorder of state outside of a block and its arguments that its code may read.

    Args:
        block: The block and all modules in it.
        arguments: Static Python values that are passed to it.
        caller: The code that calls the block.

    Attributes:
        found: The records.
        names: The names that its code reads: globals, attributes.
        iterator: An iterator that its code can reach, if any: its next value cannot be known.
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
        # Objects whose attributes are read by name (classes, modules), and the names.
        self._holders: dict[int, tuple[Any, set[str]]] = {}
        self._globals: set[int] = set()
        # The code of every kind of module that may be called.
        self._forwards: dict[type, Any] = {}
        # The values read from them, by name; and which of the names they have.
        self._given: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._present: list[Record] = []
        for module in block:
            self._see_kind(type(module))
            for name, value in module.__dict__.items():
                # Their contents are watched for every block (`Member.held`).
                if name not in OWN and not self._passes(value):
                    self._of(value, 0)
        for value in arguments:
            self._see(value)
        self._settle()

    @property
    def tells_memory(self) -> bool:
        """Return whether the code may ask for a tensor's memory layout."""
        return not self.names.isdisjoint(names_read.OF_MEMORY)

    @property
    def noted(self) -> list[Record]:
        """Return all records to compare before a reuse."""
        given = [(names_read.gives_the_same, of, items) for of, items in self._given.values()]
        forwards = (
            names_read.have_same_forwards,
            list(self._forwards),
            list(self._forwards.values()),
        )
        return [*self.found, *given, *self._present, forwards]

    def saw(self, frame: types.FrameType | None) -> None:
        """Record code that runs and that no name had led to.

        Args:
            frame: The frame in which an operation was called.
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
            # Closure cells are on the function object, which a frame does not refer to.
            for function in gc.get_referrers(code):
                if isinstance(function, types.FunctionType):
                    self._see_function(function)
        self._see_code(code, frame.f_globals)

    # -- code --------------------------------------------------------------------------------------

    def _see_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen:
            return
        self._seen[id(function)] = function
        code = function.__code__
        if is_library_file(code.co_filename):
            for part in names_read.wrapped_by(function):
                self._see(part)
            return
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            if name != "__class__":
                self._note(names_read.content, cell)
        for held in (function.__defaults__, function.__kwdefaults__, function.__dict__):
            if held:
                self._see(held)
        self._see_code(code, function.__globals__)

    def _see_code(self, code: types.CodeType, names: dict[str, Any]) -> None:
        self._codes.update(nested_codes(code))
        found = names_read.names_in(code)
        if found & names_read.OF_ENVIRONMENT and not self.names & names_read.OF_ENVIRONMENT:
            self._note(names_read.environment, None)
        self.names |= found
        self._globals.add(id(names))
        known = self._known(names)
        for name in found - known:
            known.add(name)
            if name in names:
                self._note_name(names, name)
            elif not hasattr(builtins, name):
                for module in (name, f"{names.get('__package__')}.{name}"):
                    self._see(sys.modules.get(module))  # code may import it by itself

    def _known(self, holder: Any) -> set[str]:
        """Return the names that were looked up in a holder."""
        return self._holders.setdefault(id(holder), (holder, set()))[1]

    def _settle(self) -> None:
        """Look every name up in every holder until nothing new is found."""
        size = None
        while size != (len(self.names), len(self._holders)):
            size = len(self.names), len(self._holders)
            for holder, known in list(self._holders.values()):
                if id(holder) in self._globals:
                    continue  # code reads only those of its globals that it names itself
                new = self.names - known
                known |= new
                for name in new & named(holder).keys():
                    self._note_name(holder, name)
        self._present = []
        for holder, known in self._holders.values():
            held = named(holder)
            were = len(held), known & held.keys()
            self._present.append((names_read.has_same_names, (holder, known), were))

    # -- values ------------------------------------------------------------------------------------

    def _note(self, read: Callable[[Any], Any], of: Any) -> None:
        value = read(of)
        self.found.append((functools.partial(self._is_same_read, read), of, value))
        self._see(value)

    def _note_name(self, holder: Any, name: str) -> None:
        value = named(holder)[name]
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
        return kind in pytree.ATOMIC and kind not in (type, types.FunctionType)

    def _of(self, value: Any, depth: int) -> list[Record]:
        if isinstance(value, type):
            self._see_class(value, names_read.OF_CLASSES)
        elif isinstance(value, names_read.CALLABLES) and not isinstance(value, functools.partial):
            for part in names_read.parts_of_callable(value):
                if isinstance(part, types.FunctionType):
                    self._see_function(part)
                else:
                    self._see(part)
        elif isinstance(value, types.ModuleType):
            if not is_library(value.__name__):
                self._known(value)
        elif isinstance(value, torch.nn.Module):
            self._see_module(value)
        elif not self._is_special(value):
            return super()._of(value, depth)
        return []

    def _inside(self, value: Any, depth: int) -> list[Record]:
        if pytree.is_open(value):
            self._see_class(type(value), called_by_python(type(value)))
        return super()._inside(value, depth)

    def _is_special(self, value: Any) -> bool:
        """Record a value that is neither a container nor a plain object; return False otherwise."""
        if id(value) in self._seen:
            return True
        if isinstance(value, contextvars.ContextVar):
            self._note(_context, value)
        elif isinstance(value, weakref.ref):
            self._note(_referent, value)
        elif isinstance(value, threading.local):
            self._note(pytree.attributes_of, value)
        elif isinstance(value, _SOURCES):
            self._note(host_randomness.state_of, value)
        elif is_iterator(value):
            self.iterator = value
        else:
            return False
        self._seen[id(value)] = value
        return True

    def _see_module(self, module: torch.nn.Module) -> None:
        """Record a module outside of the block and all its submodules, which code may reach."""
        if id(module) in self._own or id(module) in self._seen:
            return
        for one in names_read.submodules(module):
            if id(one) in self._own or id(one) in self._seen:
                continue
            self._seen[id(one)] = one
            self._see_kind(one.__class__)  # not `type`: it may be a weak proxy
            held = attributes_of(one)
            for holder in (one, held.get("_parameters"), held.get("_buffers")):
                if holder is not None:
                    self._known(holder)
            if held.get("_modules"):
                self.found.append(self._of_dict(held["_modules"]))

    def _see_kind(self, cls: type) -> None:
        """Record the class of a module."""
        self._forwards[cls] = names_read.forward_of(cls)
        self._see_class(cls, ("forward", *called_by_python(cls)))

    def _see_class(self, cls: type, names: Iterable[str]) -> None:
        for base in cls.__mro__:
            if is_library(base.__module__):
                continue
            known = self._known(base)
            for name in names:
                if name not in known:
                    known.add(name)
                    if name in base.__dict__:
                        self._note_name(base, name)


# -- reading ---------------------------------------------------------------------------------------


def _context(variable: contextvars.ContextVar[Any]) -> Any:
    return variable.get(names_read.ABSENT)


def _referent(reference: Any) -> Any:
    return reference()
