"""What Python values are made of: the parts of containers and objects, and where each part is."""

import contextlib
import enum
import functools
import operator
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from tpuport.foundation.pytree.tensor_classes import (
    attributes_beside,
    class_seen,
    is_class_of_tensors,
    of_class,
    plain_tensor,
    set_attributes_beside,
)


class Atom:
    """An object that structures hold as one value, whatever its attributes are."""

    __slots__ = ()


ATOMS = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, slice, range,
    torch.SymInt, torch.SymFloat, torch.SymBool, Atom,
)  # fmt: skip
# Values of exactly these types refer to no others: a quick test for the most common ones.
ATOMIC = frozenset({*ATOMS[:11], types.FunctionType, types.BuiltinFunctionType, slice, range})
_PLAIN_KEYS = frozenset({str, int, float, bool, type(None)})
# Objects of these packages are atomic: their state is not all in attributes.
OPAQUE = frozenset(
    "builtins torch numpy jax jaxlib logging threading _thread weakref re random enum".split()
)

# Containers without attributes.
_SEQUENCES: tuple[type[Any], ...] = (list, tuple, set, frozenset)
_BARE = frozenset({list, tuple, dict, set, frozenset, deque, defaultdict, types.CellType})


class Children(NamedTuple):
    """The parts of a container or object, and what else it takes to make another one like it.

    Attributes:
        kind: The class.
        keys: The keys of a dict, in order.
        parts: The elements, or the values of a dict.
        held: The attributes in `__dict__` and `__slots__`.
        option: A deque's `maxlen`, a defaultdict's `default_factory`.
        known_by_identity: Which of the keys are tensors, modules and the like: a copy of the dict
            has their copies, by which code looks its items up.
    """

    kind: type
    keys: list[Any] | None
    parts: list[Any]
    held: dict[str, Any]
    option: Any = None
    known_by_identity: tuple[int, ...] = ()

    @property
    def all(self) -> list[Any]:
        """Return the elements, the values of attributes and the keys that are known by identity."""
        if not self.known_by_identity:
            return [*self.parts, *self.held.values()]
        keys = self.keys or []
        return [*self.parts, *self.held.values(), *(keys[i] for i in self.known_by_identity)]

    @property
    def equal_keys(self) -> list[Any]:
        """Return the keys that equal ones stand for: all but those that are known by identity."""
        keys = self.keys or []
        if not self.known_by_identity:
            return keys
        return [key for i, key in enumerate(keys) if i not in self.known_by_identity]

    def steps(self) -> list[str]:
        """Return how code reaches each of the parts: `[0]`, `.logits`."""
        if self.keys is not None:
            identified = set(self.known_by_identity)
            return [_step(k, i, i not in identified) for i, k in enumerate(self.keys)]
        if issubclass(self.kind, torch.Tensor):
            return [""]
        if issubclass(self.kind, (set, frozenset)):
            return ["{}"] * len(self.parts)
        fields = getattr(self.kind, "_fields", ())
        return [f".{n}" for n in fields] or [f"[{i}]" for i in range(len(self.parts))]

    def map(self, function: Callable[[Any], Any]) -> "Children":
        """Return the same with a function applied to each of `all`, in that order."""
        parts = [function(part) for part in self.parts]
        held = {name: function(part) for name, part in self.held.items()}
        if not self.known_by_identity:
            return Children(self.kind, self.keys, parts, held, self.option)
        keys = list(self.keys or ())
        for i in self.known_by_identity:
            keys[i] = function(keys[i])
        return self._replace(keys=keys, parts=parts, held=held)

    def is_same(self, other: Self) -> bool:
        """Return whether both have the same objects in the same places."""
        ours, theirs = ([*(c.keys or ()), *c.held, *c.all] for c in (self, other))
        return len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))


def _step(key: Any, index: int, equal: bool) -> str:
    """Return how code reaches the value of a key; `equal` says that equal keys stand for it."""
    if isinstance(key, str):
        return f".{key}"
    return f"[{key}]" if equal and _has_plain_text(key) else f"[key {index}]"


def _has_plain_text(key: Any) -> bool:
    """Return whether no code of the user's makes the text of a key: it may raise, or do more."""
    if type(key) in (tuple, frozenset):
        return all(map(_has_plain_text, key))
    made = (getattr(type(key), name) for name in ("__str__", "__repr__", "__format__"))
    is_written = any(isinstance(one, types.FunctionType) for one in made)
    return not is_written or isinstance(key, (enum.Enum, type))


def children(value: Any) -> Children:
    """Return the parts of a container, and the attributes of any object.

    A container is read by the methods of its base class: a subclass may override its own, as
    transformers' `ModelOutput` does.
    """
    if is_class_of_tensors(type(value)):
        held = attributes_beside(value)
        return Children(class_seen(value), None, [plain_tensor(value)], held)
    held = {} if type(value) in _BARE else attributes_of(value)
    if isinstance(value, dict):
        option = value.default_factory if isinstance(value, defaultdict) else None
        keys = list(dict_class(value).keys(value))
        parts = [dict.__getitem__(value, key) for key in keys]
        plain = _PLAIN_KEYS.issuperset(map(type, keys))
        own = () if plain else tuple(i for i, key in enumerate(keys) if _has_identity(key))
        return Children(type(value), keys, parts, held, option, own)
    for base in _SEQUENCES:
        if isinstance(value, base):  # A class of the user's may count or walk in its own way.
            return Children(type(value), None, list(base.__iter__(value)), held)
    if isinstance(value, deque):
        return Children(type(value), None, list(deque.__iter__(value)), held, value.maxlen)
    if isinstance(value, types.CellType):
        return Children(types.CellType, None, content(value), {})
    return Children(type(value), None, [], held)


def _has_identity(key: Any) -> bool:
    """Return whether a key of a dict equals itself only, and so not its copy."""
    if type(key) in ATOMIC:
        return False
    if isinstance(key, (torch.Tensor, torch.nn.Module)):
        return True
    if isinstance(key, (tuple, frozenset)):
        return any(map(_has_identity, key))
    return type(key).__hash__ is object.__hash__ and is_plain(key)


def dict_class(value: dict[Any, Any]) -> Any:
    """Return the class whose methods read and write a dict, not those of a subclass.

    An OrderedDict keeps an order of its own, which the methods of dict neither see nor keep.
    """
    return OrderedDict if isinstance(value, OrderedDict) else dict


def content(cell: types.CellType) -> list[Any]:
    """Return what a closure's variable holds, as a list that is empty if it is not bound."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def refill(value: Any, content: Children) -> None:
    """Give a container or object this content in place; the parts of a tuple stay."""
    if isinstance(value, dict):
        # A subclass's method may mirror, check or reject the items; a mirror is among the
        # attributes.
        base = dict_class(value)
        base.clear(value)
        for key, part in zip(content.keys or (), content.parts, strict=True):
            base.__setitem__(value, key, part)
        if isinstance(value, defaultdict):
            value.default_factory = content.option
    elif isinstance(value, list):
        list.__setitem__(value, slice(None), content.parts)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, content.parts)
    elif isinstance(value, deque):
        deque.clear(value)
        deque.extend(value, content.parts)
    elif isinstance(value, types.CellType):
        if content.parts:
            value.cell_contents = content.parts[0]
        else:
            del value.cell_contents
    if type(value) not in _BARE:
        _set_attributes(value, content.held)


def _set_attributes(value: Any, held: dict[str, Any]) -> None:
    if is_class_of_tensors(type(value)):
        set_attributes_beside(value, held)
        return
    space, slots = getattr(value, "__dict__", None), _slot_names(type(value))
    if isinstance(space, dict):
        for name in [name for name in dict.keys(space) if name not in held]:
            dict.__delitem__(space, name)
        dict.update(space, {n: v for n, v in held.items() if n not in slots} if slots else held)
    for name in slots:
        if name in held:
            object.__setattr__(value, name, held[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)


def rebuilt(content: Children, build: Callable[[Any], Any], note: Callable[[Any], None]) -> Any:
    """Return a new container or object; no code of its class runs.

    Args:
        content: Its parts, as `build` takes them.
        build: Makes a part.
        note: Called with the new object before the parts are made, which may refer to it. Only a
            tuple and a frozenset are made last.
    """
    # The common kinds first: this is on the way of every call.
    if content.kind is tuple:
        made: Any = tuple(map(build, content.parts))
        note(made)
        return made
    if (content.kind is dict or content.kind is list) and not content.known_by_identity:
        made = content.kind()
        note(made)
        parts = map(build, content.parts)
        if content.keys is None:
            made.extend(parts)
        else:
            made.update(zip(content.keys, parts, strict=True))
        return made
    if issubclass(content.kind, torch.Tensor):
        made = of_class(build(content.parts[0]), content.kind)
        note(made)
        if isinstance(made, torch.Tensor):
            refill(made, content.map(build))
        return made
    blank = blank_of(content.kind)
    if issubclass(content.kind, (tuple, frozenset)):
        content = content.map(build)
        # Sizes may be arrays, which torch.Size takes none of.
        is_open = content.kind is torch.Size and not all(isinstance(p, int) for p in content.parts)
        made = tuple(content.parts) if is_open else blank(content.kind, content.parts)
        note(made)
    else:
        made = blank(content.kind)
        if issubclass(content.kind, deque):
            deque.__init__(made, (), content.option)
        note(made)
        content = content.map(build)
    refill(made, content)
    return made


CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


def held_by_callable(function: Any) -> list[Any]:
    """Return what one of `CALLABLES` refers to: its closure and defaults, or what it is made of."""
    if isinstance(function, types.MethodType):
        return [function.__self__, function.__func__]
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    found = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # its variable is not assigned yet
            found.append(cell.cell_contents)
    defaults = (function.__kwdefaults__ or {}).values()
    return [*found, *(function.__defaults__ or ()), *defaults]


def walk(
    roots: Iterable[Any], parts: Callable[[Any], Iterable[Any]], *, depth: int | None = None
) -> Iterator[Any]:
    """Yield each object that can be reached from some roots once, the nearest first.

    Args:
        roots: The objects to begin with.
        parts: Returns the parts of an object to go on with.
        depth: The longest way from a root; None for any.
    """
    seen: dict[int, Any] = {}  # the objects too, so that no other gets the id of one
    reached, far = list(roots), 0
    while reached:
        below: list[Any] = []
        for value in reached:
            if id(value) not in seen:
                seen[id(value)] = value
                yield value
                if far != depth:
                    below += parts(value)
        reached, far = below, far + 1


@functools.lru_cache(maxsize=1024)
def _slot_names(kind: type) -> tuple[str, ...]:
    """Return the names in `__slots__` of a class and of its bases."""
    names: list[str] = []
    for cls in kind.__mro__:
        slots: Any = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{cls.__name__.lstrip('_')}{name}" if is_private else name)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes that an object keeps in `__slots__`."""
    names = _slot_names(type(value))
    if not names:
        return {}
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def attributes_of(value: Any) -> dict[str, Any]:
    """Return all attributes in an object's `__dict__` and `__slots__`."""
    held = getattr(value, "__dict__", None)
    return (dict(held) if isinstance(held, dict) else {}) | slots_of(value)


def is_plain(value: Any) -> bool:
    """Return whether an object's attributes are all its state (or it is a numpy array)."""
    kind = type(value)
    if kind is np.ndarray:
        return value.dtype != object
    return is_open(value) and blank_of(kind) in _OF_ATTRIBUTES


def is_open(value: Any) -> bool:
    """Return whether all or most of what code reads of an object is in its attributes."""
    if isinstance(value, (torch.nn.Module, enum.Enum, BaseException)):
        return False
    return type(value).__module__.split(".")[0] not in OPAQUE


# What makes objects that have no state but their attributes.
_OF_ATTRIBUTES = (object.__new__, types.SimpleNamespace.__new__)


@functools.lru_cache(maxsize=4096)
def blank_of(kind: type) -> Callable[..., Any]:
    """Return the function that makes an empty object without running the class's own `__new__`."""
    return next(base for base in kind.__mro__ if _is_written_in_c(base)).__new__


def _is_written_in_c(kind: type) -> bool:
    """Return whether C code made this class (not a base), so that it may keep hidden state."""
    if not kind.__flags__ & _HEAP_TYPE or getattr(kind.__new__, "__self__", None) is kind:
        return True
    methods = (types.MethodDescriptorType, types.WrapperDescriptorType)
    return any(isinstance(m, methods) and m.__objclass__ is kind for m in vars(kind).values())


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement makes one, and so may C code
