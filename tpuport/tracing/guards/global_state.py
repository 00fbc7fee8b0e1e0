"""The Python values outside of a module that its code reads, and whether they have changed.

These are globals, closures, defaults, class attributes, configuration objects and environment
variables. A program has baked them in. `code_reads` finds where they are; here their values are
read, and compared at each call.
"""

import contextlib
import contextvars
import copy
import functools
import operator
import os
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.foundation.patching.shim import REPLACED
from tpuport.foundation.pytree.sealed import Sealed
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.guards.code_reads import MISSING, VALUES, CodeReads, content
from tpuport.tracing.guards.copies import Same, SameOrCopy
from tpuport.tracing.guards.host_randomness import GENERATORS
from tpuport.tracing.guards.host_values import ASKED, answer_of, answers, has_bytes, memory_of

# Begins the names of values that are attributes of the module itself.
OWN = "self."
_CONTAINERS = (list, dict, set, deque)
_BASES = (list, tuple, dict, set, frozenset, deque)
_LARGEST = 4096
# Nothing below its members is read: einx copies a set of the names of all modules at each call.
_LARGEST_SET = 2**16


class GlobalState:
    """The Python values that code reads from outside, with what they were when a call began.

    Args:
        code: where they are.
        name: the module or function, for messages.
        module: the module whose own attributes count too, or a weak proxy of it; None if a program
            has a copy of it.
    """

    def __init__(self, code: CodeReads, name: str, module: Any = None) -> None:
        self.code, self._name, self._module = code, name, module
        self._first: _Restorable | None = None

    def begin(self) -> None:
        """Start another call."""
        self._first = None

    def snapshot(self) -> "OutsideValues":
        """Return the values that the code would read now."""
        return OutsideValues(self.code, self._module)

    def generators(self) -> list[Any]:
        """Return the random generators of the host that the code may draw from by a name."""
        values = (value for _, value in read_values(self.code, None))
        return [value for value in values if isinstance(value, GENERATORS)]

    @contextlib.contextmanager
    def left_alone(self) -> Iterator["Run"]:
        """Watch user code that is run in the block.

        If the block raises, the values are as they were before the call.

        Raises:
            PortError: it left a tensor of this call there. The old values are restored.
        """
        # A call may run the code several times (trace, reference): restore to before the first run.
        self._first = self._first or _Restorable(self.code, self._module)
        run = Run(self.snapshot())
        try:
            yield run
            run.changed = run.before.changed()
            left = dict(read_values(self.code, self._module)) if run.changed else {}
            kept = [name for name in run.changed if _holds_tensor_of_a_call(left.get(name))]
            if kept:
                self.refuse(kept)
        except BaseException:
            self._first.restore()
            raise

    def refuse(self, changed: list[str]) -> NoReturn:
        """Restore the values, and refuse a call that changes them each time.

        Raises:
            PortError: always.
        """
        if self._first is not None:
            self._first.restore()
        what = ", ".join(name.removeprefix(OWN).lstrip(".") for name in changed[:3])
        raise PortError(
            f"a call of {self._name} writes to what is outside of it ({what}), which"
            " a program would do once",
            code="TPU406",
            remedy="return what is written, or keep it as a buffer or attribute of the module;"
            " under porting(), leave the class to eager PyTorch: --eager",
        )


@dataclass
class Run:
    """A run of user code: the values before it, and after it the names of those it changed."""

    before: "OutsideValues"
    changed: list[str] = field(default_factory=list)


class OutsideValues:
    """The values that code reads from outside, at one time.

    Comparing the identities of what code reads takes a fraction of a microsecond for each
    namespace, container and object. Only if one differs are contents compared.
    """

    def __init__(self, reads: CodeReads, module: torch.nn.Module | None = None) -> None:
        self._reads, self._module = reads, module
        # The tensors among them; those of the module are not.
        self.tensors: list[torch.Tensor] = []
        self._values, self._kept = self._now()

    def changed(self) -> list[str]:
        """Return the names of the values that have changed since then."""
        if self._kept.are_same():
            return []
        now, kept = self._now()
        changed = [n for n in {**self._values, **now} if self._values.get(n) != now.get(n)]
        if not changed:
            self._kept = kept
        return changed

    def _now(self) -> tuple[dict[str, Any], "_Identities"]:
        freezer = _Freezer(self._reads)
        _identities(self._reads, freezer.identities)
        values = {name: freezer.freeze(value) for name, value in read_values(self._reads, None)}
        values |= _replaceable(self._reads)
        self.tensors = freezer.tensors
        if self._module is not None:
            freezer.sees_tensors = False
            own = _read_module(self._reads, self._module)
            values |= {name: freezer.freeze(value) for name, value in own}
        return values, freezer.identities


class _Identities:
    """The objects that namespaces, containers and other holders hold, to compare by identity."""

    def __init__(self) -> None:
        self._mappings: list[tuple[Any, Any, int, tuple[Any, ...]]] = []
        self._sequences: list[tuple[Any, Any, tuple[Any, ...]]] = []
        self._dicts: list[tuple[dict[Any, Any], tuple[Any, ...], tuple[Any, ...]]] = []
        self._others: list[tuple[Any, Any, Any]] = []

    def mapping(self, held: Any, names: list[str]) -> None:
        """Keep some entries of a namespace, and how many it has."""
        if names:
            # With two names or more, it returns a tuple.
            get = operator.itemgetter(*names, names[0])
            self._mappings.append((get, held, len(held), get(held)))

    def container(self, value: Any) -> None:
        """Keep what a container holds, of a large set the number of its members."""
        if isinstance(value, dict):
            self._dicts.append((value, tuple(value), tuple(value.values())))
        elif isinstance(value, (list, deque)):  # A tuple holds what it held.
            base: Any = list if isinstance(value, list) else deque
            self._sequences.append((base, value, tuple(base.__iter__(value))))
        elif isinstance(value, (set, frozenset)):
            is_large = _length(value) > _LARGEST
            now = _length(value) if is_large else set(value)
            self._others.append((_has_length if is_large else operator.eq, value, now))

    def other(self, same: Any, held: Any, value: Any) -> None:
        """Keep something that `same(held, value)` compares."""
        self._others.append((same, held, value))

    def are_same(self) -> bool:
        """Return whether all holders hold the same objects."""
        same = operator.is_
        try:
            for get, held, size, values in self._mappings:
                if len(held) != size or not all(map(same, get(held), values)):
                    return False
        except KeyError:
            return False
        for base, held, values in self._sequences:
            if base.__len__(held) != len(values):
                return False
            if not all(map(same, base.__iter__(held), values)):
                return False
        for held, keys, values in self._dicts:
            if len(held) != len(values) or not all(map(same, held.values(), values)):
                return False
            if not all(map(same, held, keys)):
                return False
        return all(test(held, value) for test, held, value in self._others)


def read_values(reads: CodeReads, module: torch.nn.Module | None) -> Iterator[tuple[str, Any]]:
    """Read what the code would read now, by readable names."""
    for namespace, name in reads.places.values():
        yield f"{namespace.get('__name__', '')}.{name}", namespace.get(name, MISSING)
    for index, cell in enumerate(reads.cells.values()):
        yield f"closure {index}", content(cell)
    for function in reads.functions:
        if function.__defaults__ or function.__kwdefaults__:
            defaults = (function.__defaults__, function.__kwdefaults__)
            yield f"defaults of {function.__qualname__}", defaults
    for cls in reads.classes:
        for name in reads.attributes(cls):
            yield f"{cls.__name__}.{name}", vars(cls)[name]
    names = os.environ if reads.variables is None else reads.variables
    for name in sorted(names):
        yield f"os.environ[{name!r}]", os.environ.get(name)
    yield from () if module is None else _read_module(reads, module)


def _read_module(reads: CodeReads, module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for fqn, one in module.named_modules():
        prefix = fqn + "." if fqn else ""
        for name, value in vars(one).items():
            if type(value) not in VALUES and name not in _INTERNAL and reads.reads(name):
                if prefix + name not in reads.unread:
                    yield f"{OWN}{prefix}{name}", value


def _identities(reads: CodeReads, identities: _Identities) -> None:
    """Keep the identities of what namespaces, classes, closures and functions hold."""
    by_namespace: dict[int, tuple[Any, list[str]]] = {}
    for namespace, name in reads.places.values():
        if name in namespace:
            by_namespace.setdefault(id(namespace), (namespace, []))[1].append(name)
    for namespace, names in by_namespace.values():
        identities.mapping(namespace, names)
    for cls in reads.classes:
        identities.mapping(vars(cls), reads.attributes(cls))
    for owner, names in reads.replaceable:
        held = vars(owner)
        # By its number of entries, one that it does not hold is noticed when it gets it.
        identities.mapping(held, [name for name in (*names, "__doc__") if name in held])
    for cell in reads.cells.values():
        identities.other(_holds, cell, content(cell))
    for function in reads.functions:
        held = (function.__defaults__, function.__kwdefaults__)
        identities.other(_has_defaults, function, held)
    if reads.variables is None or reads.variables:
        names = reads.variables
        identities.other(_has_variables, names, _variables(names))


def _replaceable(reads: CodeReads) -> dict[str, Any]:
    """Return the functions of torch and of libraries that code may call, as a script has them."""
    return {
        f"{_full_name(owner)}.{name}": Same(REPLACED.original(owner, name))
        for owner, names in reads.replaceable
        for name in names
    }


def _full_name(owner: Any) -> str:
    is_class = isinstance(owner, type)
    return f"{owner.__module__}.{owner.__qualname__}" if is_class else owner.__name__


def _length(value: Any) -> int:
    return int(_base_of(value).__len__(value))


def _has_length(value: Any, length: int) -> bool:
    return _length(value) == length


def _holds(cell: types.CellType, value: Any) -> bool:
    return content(cell) is value


def _has_defaults(function: types.FunctionType, held: tuple[Any, Any]) -> bool:
    return function.__defaults__ is held[0] and function.__kwdefaults__ is held[1]


def _variables(names: set[str] | None) -> dict[str, str | None]:
    return dict(os.environ) if names is None else {name: os.environ.get(name) for name in names}


def _has_variables(names: set[str] | None, values: dict[str, str | None]) -> bool:
    return _variables(names) == values


def _has_value(variable: contextvars.ContextVar[Any], value: Any) -> bool:
    return variable.get(MISSING) is value


def _has_attributes(value: Any, held: dict[str, Any]) -> bool:
    return all(getattr(value, name, MISSING) is one for name, one in held.items())


def _has_own(value: threading.local, held: tuple[int, dict[str, Any]]) -> bool:
    return _has_entries(value.__dict__, held)


def _has_entries(space: dict[str, Any], held: tuple[int, dict[str, Any]]) -> bool:
    size, entries = held
    return len(space) == size and all(space.get(n, MISSING) is v for n, v in entries.items())


def _base_of(value: Any) -> Any:
    """Return the built-in class of a container: one of the user's may refuse to count or walk."""
    return next((base for base in _BASES if isinstance(value, base)), None)


class _Freezer:
    """A converter of Python values to ones that compare by content."""

    def __init__(self, reads: CodeReads) -> None:
        self._reads = reads
        self.identities = _Identities()
        # Lists, dicts, sets and the attributes of objects, which code may change in place.
        self.mutable: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        # Whether a tensor is told from another one. Those of a module are state of the program.
        self.sees_tensors = True
        self._known: dict[int, Any] = {}
        self._left = _LARGEST

    def freeze(self, value: Any) -> Any:
        """Return a value that compares equal as long as this one has the same content."""
        self._left = _LARGEST
        return self._frozen(value)

    def _frozen(self, value: Any) -> Any:
        kind = type(value)
        if kind in VALUES:
            return (kind, repr(value) if kind in (float, complex) else value)
        known = self._known.get(id(value))
        if known is not None:
            return known
        self._known[id(value)] = Same(value)
        self._left -= 1
        made = self._known[id(value)] = self._contents(value) if self._left > 0 else Same(value)
        return made

    def _contents(self, value: Any) -> Any:
        kind = type(value)
        base = _base_of(value)
        if base is not None:
            size = base.__len__(value)
            if size > (_LARGEST_SET if base in (set, frozenset) else self._left):
                return (Same(value), size)
            self.identities.container(value)
            if kind in _CONTAINERS:
                self.mutable.append(value)
        if base in (list, tuple, deque):
            return (kind, tuple(map(self._frozen, base.__iter__(value))))
        if base in (set, frozenset):
            members = base.__iter__(value)
            return (kind, frozenset(v if isinstance(v, VALUES) else id(v) for v in members))
        memory = memory_of(value)
        if memory is not None:
            held = memory.tobytes()
            self.identities.other(has_bytes, value, held)
            return (kind, memory.shape, held)
        if isinstance(value, contextvars.ContextVar):
            now = value.get(MISSING)
            self.identities.other(_has_value, value, now)
            return (Same(value), self._frozen(now))
        if isinstance(value, ASKED):
            self.identities.other(answers, value, answer := answer_of(value))
            return (Same(value), answer)
        if isinstance(value, dict):
            items = tuple(
                (k if isinstance(k, VALUES) else id(k), v)
                for k, v in pytree.dict_class(value).items(value)
            )
            return (kind, tuple((k, self._frozen(v)) for k, v in items), self._attributes(value))
        return self._attributes(value)

    def _attributes(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not self.sees_tensors:
            return torch.Tensor
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        kind = type(value)
        if isinstance(value, threading.local):
            # Each thread has attributes of its own.
            own = {n: one for n, one in value.__dict__.items() if self._reads.reads(n)}
            self.identities.other(_has_own, value, (len(value.__dict__), own))
            return (Same(value), tuple((n, self._frozen(one)) for n, one in own.items()))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        opaque = (*pytree.ATOMS, torch.Tensor, torch.nn.Module, weakref.ref, torch.Generator)
        if isinstance(value, opaque) or kind.__module__.split(".")[0] in pytree.OPAQUE:
            return None if isinstance(value, dict) else Same(value)
        held, number = pytree.attributes_of(value), len(self._known)
        names = [name for name in held if self._reads.reads(name)]
        space = getattr(value, "__dict__", None)
        if isinstance(space, dict):
            self.identities.mapping(space, [name for name in names if name in space])
            self.mutable.append(space)
        # A class with a `__getattr__` for all names may give anything.
        known = space if isinstance(space, dict) else ()
        slots = {name: held[name] for name in names if name not in known}
        if slots:
            self.identities.other(_has_attributes, value, slots)
        bound = (value.args, value.keywords) if isinstance(value, functools.partial) else ()
        return (
            None if isinstance(value, dict) else SameOrCopy(value, number),
            tuple((name, self._frozen(held[name])) for name in names),
            tuple(map(self._frozen, bound)),
        )

    def _function(self, value: types.FunctionType) -> Any:
        """Freeze the attributes of a function, such as a count of its calls."""
        space = value.__dict__
        if not space and value.__name__ not in self._reads.given_attributes:
            return Same(value)
        names = [name for name in space if self._reads.reads(name)]
        held = len(space), {name: space[name] for name in names}
        self.identities.other(_has_entries, space, held)
        self.mutable.append(space)
        return (Same(value), tuple((name, self._frozen(space[name])) for name in names))


class _Restorable:
    """The values outside, with what is needed to restore them."""

    def __init__(self, reads: CodeReads, module: torch.nn.Module | None) -> None:
        self._places = [(s, name, s.get(name, MISSING)) for s, name in reads.places.values()]
        self._cells = [(cell, content(cell)) for cell in reads.cells.values()]
        self._attributes = [
            (cls, name, vars(cls)[name]) for cls in reads.classes for name in reads.attributes(cls)
        ]
        freezer = _Freezer(reads)
        for _, value in read_values(reads, module):
            freezer.freeze(value)
        self._containers = [(value, copy.copy(value)) for value in freezer.mutable]

    def restore(self) -> None:
        """Restore the values."""
        for container, before in self._containers:
            _put_back(container, before)
        for cls, name, value in self._attributes:
            if vars(cls).get(name, MISSING) is not value:
                setattr(cls, name, value)
        for space, name, value in self._places:
            if value is MISSING:
                space.pop(name, None)
            elif space.get(name, MISSING) is not value:
                space[name] = value
        for cell, value in self._cells:
            if content(cell) is not value:
                cell.cell_contents = value


def _put_back(container: Any, before: Any) -> None:
    """Restore a container. One whose content is the same is left alone, as code may run in it."""
    if isinstance(container, list):
        container[:] = before
    elif not isinstance(container, dict):
        container.clear()
        container.extend(before) if isinstance(container, deque) else container.update(before)
    elif [*map(id, container)] == [*map(id, before)]:
        for key, value in before.items():
            if container[key] is not value:
                container[key] = value
    else:
        container.clear()
        container.update(before)


def _holds_tensor_of_a_call(value: Any) -> bool:
    """Return whether a value holds a tensor of a trace, one with a graph, or a sealed value."""
    leaves, spec = pytree.flatten(value, objects=True)
    return any(
        isinstance(leaf, TracedTensor) or (isinstance(leaf, torch.Tensor) and not leaf.is_leaf)
        for leaf in leaves
    ) or any(isinstance(static, Sealed) for static in pytree.statics_of(spec))


_INTERNAL = frozenset(torch.nn.Module().__dict__)
