"""Flattening of any Python structure into leaves, and rebuilding it around other leaves.

This works for what research code passes around: lists, tuples, named tuples, dicts and their
subclasses (transformers' ModelOutput), UserDict (BatchFeature), dataclasses, and plain objects that
hold tensors (key-value caches). Shared references stay shared.
"""

import decimal
import enum
import functools
import types
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch

ATOMS = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, slice, range,
    torch.SymInt, torch.SymFloat, torch.SymBool,
)  # fmt: skip


# Values of exactly these types refer to no others: a quick test for the most common ones.
ATOMIC = frozenset({*ATOMS[:11], types.FunctionType, types.BuiltinFunctionType, slice, range})


def is_leaf(value: Any) -> bool:
    """Return whether `value` crosses the jit boundary as an array (or a generator as its key)."""
    return isinstance(value, (torch.Tensor, jax.Array, torch.Generator))


@functools.lru_cache(maxsize=1024)
def _slot_names(kind: type) -> tuple[str, ...]:
    """Return the names in `__slots__` of a class and of its bases."""
    names: list[str] = []
    for cls in kind.__mro__:
        slots: Any = cls.__dict__.get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
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


@dataclass
class TreeSpec:
    """A structure without its leaves, like a jax treedef: `unflatten` puts other leaves in.

    `key` is a hashable description of everything that is not a leaf, equal for structures that
    trace to the same program. `containers` are the flattened objects, by their index in `node`.
    """

    node: Any
    key: Any
    num_leaves: int
    keep: list[Any] = field(default_factory=list)
    containers: dict[int, Any] = field(default_factory=dict)


class Flattener:
    """A depth-first flattening of values, which remembers shared objects.

    Args:
        leaf: Returns whether a value is a leaf.
        objects: Flatten plain objects and numpy arrays without tensors too, so that the
            rebuilt structure shares nothing that a call could change.
    """

    def __init__(self, leaf: Callable[[Any], bool], *, objects: bool = False) -> None:
        self.leaf = leaf
        self.objects = objects
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self.seen: dict[int, tuple[str, int]] = {}
        self.containers: dict[int, Any] = {}
        self.keep: list[Any] = []
        self.bearing: dict[int, bool] = {}

    def visit(self, value: Any, path: str) -> tuple[Any, Any]:
        """Return the (node, key) of a value."""
        if self.leaf(value):
            # Number leaves have no identity: two equal ones are two leaves.
            shared = is_leaf(value)
            known = self.seen.get(id(value)) if shared else None
            if known is None:
                known = ("leaf", len(self.leaves))
                if shared:
                    self.seen[id(value)] = known
                self.leaves.append(value)
                self.paths.append(path)
                self.keep.append(value)
            return known, known
        kind = type(value)
        if isinstance(value, ATOMS):
            return ("static", value), (kind, hashable(value, self.keep))
        known = self.seen.get(id(value))
        if known is not None:
            return known, known
        if kind in (list, tuple, dict, OrderedDict) and not value and not self.objects:
            return ("static_new", kind), (kind, ())
        container = isinstance(value, (list, tuple, dict, UserDict, deque, set, frozenset))
        container = container or (self.objects and is_plain(value))
        if not container and not self._bears(value, 0):
            return ("static", value), (kind, hashable(value, self.keep))
        index = len(self.containers)
        self.containers[index] = value
        self.seen[id(value)] = ("ref", index)
        self.keep.append(value)
        return self.container(value, path, index)

    def container(self, value: Any, path: str, index: int) -> tuple[Any, Any]:
        """Return the (node, key) of a container's current content."""
        kind = type(value)
        if isinstance(value, np.ndarray):
            return ("array", index, value.copy()), (kind, hashable(value, self.keep))
        if isinstance(value, (list, tuple)):
            fields = getattr(kind, "_fields", ())
            names = [f".{n}" for n in fields] or [f"[{i}]" for i in range(len(value))]
            parts = [self.visit(v, path + n) for n, v in zip(names, value, strict=True)]
            return ("seq", index, kind, [n for n, _ in parts]), (kind, tuple(k for _, k in parts))
        if isinstance(value, deque):
            parts = [self.visit(v, f"{path}[{i}]") for i, v in enumerate(value)]
            node = ("deque", index, kind, value.maxlen, [n for n, _ in parts])
            return node, (kind, value.maxlen, tuple(k for _, k in parts))
        if isinstance(value, (set, frozenset)):
            parts = [self.visit(v, f"{path}{{}}") for v in value]
            node = ("set", index, kind, [n for n, _ in parts])
            return node, (kind, frozenset(k for _, k in parts))
        items: list[tuple[Any, Any]] = []
        if isinstance(value, dict):
            items = list(dict.items(value))
        attributes = attributes_of(value)
        if isinstance(value, defaultdict):
            attributes["default_factory"] = value.default_factory
        prefix = path + "."
        parts = [
            (k, self.visit(v, f"{path}.{k}" if isinstance(k, str) else f"{path}[{k}]"))
            for k, v in items
        ]
        held = [(k, self.visit(v, prefix + k)) for k, v in attributes.items()]
        items_of, held_of = ([(k, n) for k, (n, _) in pairs] for pairs in (parts, held))
        node = ("object", index, kind, items_of, held_of)
        key = (
            kind,
            tuple((hashable(k, self.keep), v) for k, (_, v) in parts),
            tuple((k, v) for k, (_, v) in held),
        )
        return node, key

    def _bears(self, value: Any, depth: int) -> bool:
        """Return whether there is a tensor somewhere below an object that is not a container."""
        if self.leaf(value):
            return True
        if isinstance(value, (*ATOMS, torch.nn.Module, np.ndarray)) or depth > 6:
            return False
        known = self.bearing.get(id(value))
        if known is not None:
            return known
        self.bearing[id(value)] = False
        if isinstance(value, dict):
            parts = list(dict.values(value))
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = list(value)
        else:
            parts = []
        parts += attributes_of(value).values()
        self.keep.append(value)
        self.bearing[id(value)] = any(self._bears(part, depth + 1) for part in parts)
        return self.bearing[id(value)]


# Objects of these packages are atomic: their state is not all in attributes.
OPAQUE = frozenset(
    "builtins torch numpy jax jaxlib logging threading _thread weakref re random enum".split()
)


def is_plain(value: Any) -> bool:
    """Return whether an object's attributes are all its state (or it is a numpy array)."""
    kind = type(value)
    if kind is np.ndarray:
        return value.dtype != object
    return is_open(value) and _blank_of(kind) is object.__new__


def is_open(value: Any) -> bool:
    """Return whether all or most of what code reads of an object is in its attributes."""
    if isinstance(value, (torch.nn.Module, enum.Enum, BaseException)):
        return False
    return type(value).__module__.split(".")[0] not in OPAQUE


@functools.lru_cache(maxsize=4096)
def _blank_of(kind: type) -> Callable[..., Any]:
    """Return the function that makes an empty object without running the class's own `__new__`."""
    return next(base for base in kind.__mro__ if _is_written_in_c(base)).__new__


def _is_written_in_c(kind: type) -> bool:
    """Return whether C code made this class (not a base), so that it may keep hidden state."""
    if not kind.__flags__ & _HEAP_TYPE or getattr(kind.__new__, "__self__", None) is kind:
        return True
    methods = (types.MethodDescriptorType, types.WrapperDescriptorType)
    return any(isinstance(m, methods) and m.__objclass__ is kind for m in vars(kind).values())


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement makes one, and so may C code


def hashable(value: Any, keep: list[Any]) -> Any:
    """Return a hashable key of a static value; objects without one are known by identity."""
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype), value.tobytes())
    if isinstance(value, types.MethodType):
        keep.append(value.__self__)
        return (value.__func__, id(value.__self__))
    if isinstance(value, weakref.ref):
        # Comparing it would compare its referent, elementwise for a tensor.
        keep.append(value)
        return (weakref.ref, id(value))
    if isinstance(value, slice):
        return (value.start, value.stop, value.step)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(value)
    if isinstance(value, (float, complex, np.generic, decimal.Decimal)):
        return (value, repr(value))  # 0.0 == -0.0, and 1.0 == Decimal("1.00")
    if isinstance(value, (int, str, bytes)) and not isinstance(value, enum.Enum):
        held = getattr(value, "__dict__", None)  # of a user's subclass
        return (value, hashable(tuple(held.items()), keep)) if held else value
    try:
        hash(value)
    except (TypeError, ValueError):  # ValueError: a memoryview that can be written to
        keep.append(value)
        return ("id", id(value))
    return value


def flatten(
    value: Any,
    *,
    leaf: Callable[[Any], bool] = is_leaf,
    path: str = "",
    objects: bool = False,
) -> tuple[list[Any], TreeSpec]:
    """Flatten any structure into leaves and a `TreeSpec`.

    Returns:
        The leaves in order of first appearance (a tensor held twice is one leaf), and the
        `TreeSpec` that puts them back.
    """
    leaves, spec, _ = flatten_with_paths(value, leaf=leaf, path=path, objects=objects)
    return leaves, spec


def flatten_with_paths(
    value: Any,
    *,
    leaf: Callable[[Any], bool] = is_leaf,
    path: str = "",
    objects: bool = False,
) -> tuple[list[Any], TreeSpec, list[str]]:
    """Flatten a structure, and return the Python path of each leaf too ("logits", "[0].keys")."""
    flattener = Flattener(leaf, objects=objects)
    node, key = flattener.visit(value, path)
    spec = TreeSpec(node, key, len(flattener.leaves), flattener.keep, flattener.containers)
    return flattener.leaves, spec, flattener.paths


def unflatten(spec: TreeSpec, leaves: list[Any], made: dict[int, Any] | None = None) -> Any:
    """Return the structure of `spec` around other leaves, in new containers.

    `made` receives the new containers by their index.
    """
    return unflatten_node(spec.node, leaves, {} if made is None else made)


def unflatten_node(node: Any, leaves: list[Any], made: dict[int, Any]) -> Any:
    """Rebuild a part of a structure; `made` has the containers that exist already."""
    tag, what = node[0], node[1]
    if tag == "leaf":
        return leaves[what]
    if tag == "static":
        return what
    if tag == "static_new":
        return what()
    if tag == "ref":
        return made[what]
    return _unflatten_container(node, lambda part: unflatten_node(part, leaves, made), made)


def _unflatten_container(node: Any, build: Callable[[Any], Any], made: dict[int, Any]) -> Any:
    tag, index, kind = node[:3]
    result: Any
    if tag == "array":
        result = made[index] = kind.copy()
    elif tag == "set":
        result = made[index] = kind(map(build, node[3]))
    elif tag == "deque":
        result = made[index] = kind((), node[3])
        result.extend(map(build, node[4]))
    elif tag == "seq" and issubclass(kind, list):
        result = made[index] = kind.__new__(kind)
        result.extend(map(build, node[3]))
    elif tag == "seq":
        parts = list(map(build, node[3]))
        result = made[index] = kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    else:
        result = made[index] = _blank_of(kind)(kind)
        for name, part in node[3]:
            set_item(result, name, build(part))
        for name, part in node[4]:
            object.__setattr__(result, name, build(part))
    return result


def set_item(target: Any, name: Any, value: Any) -> None:
    """Set an item of a dict without calling a subclass's `__setitem__`.

    That may mirror, check or reject the item; a mirror is restored with the attributes.
    """
    setter = OrderedDict.__setitem__ if isinstance(target, OrderedDict) else dict.__setitem__
    setter(target, name, value)


def statics_of(spec: TreeSpec) -> list[Any]:
    """Return the values in a structure that are neither leaves nor containers."""
    found: list[Any] = []
    stack: list[Any] = [spec.node]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple) and len(node) == 2 and node[0] == "static":
            found.append(node[1])
        elif isinstance(node, (tuple, list)):
            stack += node
    return found


def map_tensors(fn: Callable[[Any], Any], value: Any) -> Any:
    """Return the same structure with `fn` applied to every tensor or jax array."""
    leaves, spec = flatten(value)
    if not leaves:
        return value
    return unflatten(
        spec, [leaf if isinstance(leaf, torch.Generator) else fn(leaf) for leaf in leaves]
    )
