"""The attributes of a module that its code reads or sets while a program is traced.

What no program looks at may change without another program: Lightning's modules refer to their
trainer, which counts batches. Names in code do not tell, since code that uses `getattr` or `vars`
anywhere could reach any attribute; here the accesses themselves are seen.
"""

import contextlib
import dis
import functools
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from tpuport.foundation.patching.shim import REPLACED, Replacement
from tpuport.tracing.state.module_state import named_owners

# The attributes by which code gets all others: Python's `copy` and `pickle` read these first.
_OF_ALL = frozenset({"__dict__", "__getstate__", "__reduce__", "__reduce_ex__", "__deepcopy__"})
_TPUPORT = str(Path(__file__).parents[2]) + os.sep
_OF_MODULES = torch.nn.modules.module.__file__
# Functions of torch there that look at one attribute, which is in their variable `name`.
_OF_ONE = frozenset({"__getattr__", "__setattr__", "__delattr__"})
# Other functions there that hand on what all attributes are.
_SHOWING = frozenset({"__dir__", "__setstate__", "_replicate_for_data_parallel"})
_CACHED = functools.cached_property.__get__.__code__


@dataclass
class AttributeReads:
    """What code looked at, of a module and of its traced copies.

    Attributes:
        names: attributes, by full name.
        whole: the fqns of modules of which code may have looked at anything.
        everything: whether code may have looked at anything at all.
    """

    names: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    everything: bool = False

    def include(self, name: str, owner: str) -> bool:
        """Return whether code looked at an attribute of the module with the fqn `owner`."""
        return self.everything or name in self.names or owner in self.whole

    def add(self, other: "AttributeReads") -> None:
        """Add what other code looked at."""
        self.names |= other.names
        self.whole |= other.whole
        self.everything = self.everything or other.everything


class _Accesses:
    """The accesses of one block, by the id of the module."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, str]] = set()
        self._whole: set[int] = set()
        self._fqns: dict[int, str] = {}
        # Kept alive, so that no other object gets their ids.
        self._modules: list[torch.nn.Module] = []

    def replacement(self) -> Any:
        """Return a `__getattribute__` that notes what is looked at."""
        original = torch.nn.Module.__getattribute__
        seen, whole, of_all = self._seen, self._whole, _OF_ALL

        def looked_up(module: Any, name: str) -> Any:
            seen.add((id(module), name))
            if name in of_all:
                frame = sys._getframe(1)
                found = _attributes_asked_for(frame, name)
                if found is None:
                    whole.add(id(module))
                else:
                    seen.update((id(module), one) for one in found)
            return original(module, name)

        return looked_up

    def note_module(self, module: torch.nn.Module) -> None:
        """Note accesses of a module and of those below it by their fqns."""
        usual = torch.nn.Module.__getattribute__
        self._modules.append(module)
        for fqn, one in named_owners(module):
            self._fqns[id(one)] = fqn
            if type(one).__getattribute__ is not usual:
                self._whole.add(id(one))  # a class with a `__getattribute__` of its own

    def reads(self) -> AttributeReads:
        """Return what was looked at, by name."""
        found = AttributeReads()
        for number, name in self._seen:
            fqn = self._fqns.get(number)
            if fqn is not None:
                found.names.add(f"{fqn}.{name}" if fqn else name)
        found.whole = {self._fqns[number] for number in self._whole if number in self._fqns}
        return found


_RUNNING: list[_Accesses] = []


@contextlib.contextmanager
def recorded(module: torch.nn.Module, into: AttributeReads) -> Iterator[None]:
    """Note what code looks at inside the block, of a module and of copies that are noted.

    Args:
        module: the module itself, which closures may lead to.
        into: what is found is added to it, also if the block raises.
    """
    accesses, token = _Accesses(), object()
    try:
        noting = accesses.replacement()
        REPLACED.add(token, [Replacement(torch.nn.Module, "__getattribute__", noting)])
        accesses.note_module(module)
        _RUNNING.append(accesses)
        yield
    finally:
        REPLACED.remove(token)
        if accesses in _RUNNING:
            _RUNNING.remove(accesses)
        into.add(accesses.reads())


def note_copy(module: torch.nn.Module) -> None:
    """Note accesses of a traced copy of the module that is being recorded, if one is."""
    if _RUNNING:
        _RUNNING[-1].note_module(module)


def _attributes_asked_for(frame: FrameType, name: str) -> Collection[str] | None:
    """Return which attributes a function wants that reads `__dict__`, if any of the user's.

    Returns:
        None if it may want any.
    """
    code = frame.f_code
    if code.co_filename.startswith(_TPUPORT):
        return ()  # for tpuport itself, which compares attributes
    if name != "__dict__":
        return None
    if code is _CACHED:
        return ()  # of a cached property, whose name was looked at first
    if code.co_filename == _OF_MODULES and code.co_name not in _SHOWING:
        return (str(frame.f_locals.get("name", "")),) if code.co_name in _OF_ONE else ()
    key = _key_asked_for(code, frame.f_lasti)
    if key is None:
        return None
    return (str(key.argval if key.opname == "LOAD_CONST" else frame.f_locals[key.argval]),)


@functools.cache
def _key_asked_for(code: CodeType, place: int) -> dis.Instruction | None:
    """Return what loads the key that code asks `self.__dict__` for at a place; None for any key.

    A `__getattr__` like that of diffusers' models (`name in self.__dict__`) runs at each access of
    a layer.
    """
    steps = [step for step in dis.get_instructions(code) if step.opname not in _IDLE]
    index = next(i for i, step in enumerate(steps) if step.offset >= place)
    around = [step.opname for step in steps[max(index - 2, 0) : index + 3]]
    if index and steps[index - 1].is_jump_target:
        return None  # the key is one of two: `(a if b else c) in self.__dict__`
    if around[1:4] == ["LOAD_FAST", "LOAD_ATTR", "CONTAINS_OP"]:
        key = steps[index - 2]
    elif around[1:3] == ["LOAD_FAST", "LOAD_ATTR"] and around[4:] == ["BINARY_SUBSCR"]:
        key = steps[index + 1]
    else:
        return None
    return key if key.opname in ("LOAD_CONST", "LOAD_FAST") else None


_IDLE = frozenset({"CACHE", "RESUME", "NOP", "PRECALL", "EXTENDED_ARG"})


def unread(
    names: Iterable[str], reads: AttributeReads, owners: Mapping[str, tuple[str, str]]
) -> frozenset[str]:
    """Return those attributes of modules that no code looked at.

    Args:
        names: attributes by full name; others are left out.
        reads: what code looked at.
        owners: by full name, the fqn of the module and the name of its attribute.
    """
    known = [(name, *owners[name]) for name in names if name in owners]
    return frozenset(
        name
        for name, fqn, attribute in known
        if attribute not in ("training", "forward") and not reads.include(name, fqn)
    )
