"""Taking tensors out of any Python structure, and putting others back.

Works for what research code passes around: lists, tuples, named tuples, dicts and their subclasses
(transformers' ModelOutput), UserDict (BatchFeature), dataclasses, and plain objects that hold
tensors (key-value caches). Shared references stay shared.
"""

import types
import weakref
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, slice, range,
    torch.SymInt, torch.SymFloat, torch.SymBool,
)  # fmt: skip


def is_leaf(value: Any) -> bool:
    """Whether `value` crosses the jit boundary as an array (or a generator as its key)."""
    return isinstance(value, (torch.Tensor, jax.Array, torch.Generator))


def _slot_names(cls: type) -> tuple[str, ...]:
    slots: Any = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


@dataclass
class Spec:
    """A structure with its leaves taken out: rebuild it around other leaves with `rebuild`.

    `key` is a hashable description of everything that is not a leaf, equal for structures that
    trace to the same program.
    """

    node: Any
    key: Any
    num_leaves: int
    keep: list[Any] = field(default_factory=list)


class _Flattener:
    def __init__(self, leaf: Callable[[Any], bool]) -> None:
        self.leaf = leaf
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self.seen: dict[int, tuple[str, int]] = {}
        self.nodes = 0
        self.keep: list[Any] = []
        self.bearing: dict[int, bool] = {}

    def visit(self, value: Any, path: str) -> tuple[Any, Any]:
        """(node, key) of a value."""
        if self.leaf(value):
            # Numbers that are leaves are values, not objects: equal ones are not one leaf.
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
        if isinstance(value, _ATOMS):
            return ("static", value), (kind, _hashable(value, self.keep))
        known = self.seen.get(id(value))
        if known is not None:
            return known, known
        if kind in (list, tuple, dict, OrderedDict) and not value:
            return ("static_new", kind), (kind, ())
        container = isinstance(value, (list, tuple, dict, UserDict, deque, set, frozenset))
        if not container and not self._bears(value, 0):
            return ("static", value), (kind, _hashable(value, self.keep))
        self.seen[id(value)] = ("ref", self.nodes)
        self.keep.append(value)
        index = self.nodes
        self.nodes += 1
        return self._container(value, kind, path, index)

    def _container(self, value: Any, kind: type, path: str, index: int) -> tuple[Any, Any]:
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
            return ("static", value), (kind, _hashable(frozenset(value), self.keep))
        items: list[tuple[Any, Any]] = []
        if isinstance(value, dict):
            items = list(dict.items(value))
        attributes = dict(getattr(value, "__dict__", {}))
        slots = [
            name
            for cls in kind.__mro__
            for name in _slot_names(cls)
            if name not in ("__dict__", "__weakref__") and hasattr(value, name)
        ]
        attributes.update({name: getattr(value, name) for name in slots})
        prefix = path + "."
        parts = [
            (k, self.visit(v, f"{path}.{k}" if isinstance(k, str) else f"{path}[{k}]"))
            for k, v in items
        ]
        held = [(k, self.visit(v, prefix + k)) for k, v in attributes.items()]
        node = (
            "object",
            index,
            kind,
            [(k, n) for k, (n, _) in parts],
            [(k, n) for k, (n, _) in held],
        )
        key = (
            kind,
            tuple((_hashable(k, self.keep), v) for k, (_, v) in parts),
            tuple((k, v) for k, (_, v) in held),
        )
        return node, key

    def _bears(self, value: Any, depth: int) -> bool:
        """Whether a tensor hangs somewhere below an object that is not a container."""
        if self.leaf(value):
            return True
        if isinstance(value, (*_ATOMS, torch.nn.Module, np.ndarray)) or depth > 6:
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
        parts += list(getattr(value, "__dict__", {}).values())
        parts += [
            getattr(value, name)
            for name in getattr(type(value), "__slots__", ())
            if hasattr(value, name)
        ]
        self.keep.append(value)
        self.bearing[id(value)] = any(self._bears(part, depth + 1) for part in parts)
        return self.bearing[id(value)]


def _hashable(value: Any, keep: list[Any]) -> Any:
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype), value.tobytes())
    if isinstance(value, types.MethodType):
        keep.append(value.__self__)
        return (value.__func__, id(value.__self__))
    if isinstance(value, weakref.ref):
        # Its equality is that of what it refers to: for a tensor, an elementwise comparison.
        keep.append(value)
        return (weakref.ref, id(value))
    if isinstance(value, slice):
        return (value.start, value.stop, value.step)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(value)
    if isinstance(value, float):
        return (value, str(value)) if value != value or value == 0 else value
    try:
        hash(value)
    except TypeError:
        keep.append(value)
        return ("id", id(value))
    return value


def flatten(
    value: Any, *, leaf: Callable[[Any], bool] = is_leaf, path: str = ""
) -> tuple[list[Any], Spec]:
    """Take the leaves out of any structure.

    Returns:
        The leaves in order of first appearance (a tensor held twice is one leaf), and the `Spec`
        that puts them back.
    """
    leaves, spec, _ = flatten_with_paths(value, leaf=leaf, path=path)
    return leaves, spec


def flatten_with_paths(
    value: Any, *, leaf: Callable[[Any], bool] = is_leaf, path: str = ""
) -> tuple[list[Any], Spec, list[str]]:
    """`flatten`, with the Python path of each leaf ("logits", "[0].keys")."""
    flattener = _Flattener(leaf)
    node, key = flattener.visit(value, path)
    spec = Spec(node, key, len(flattener.leaves), flattener.keep)
    return flattener.leaves, spec, flattener.paths


def rebuild(spec: Spec, leaves: list[Any]) -> Any:
    """The structure of `spec` around other leaves, in new containers."""
    made: dict[int, Any] = {}
    return _rebuild(spec.node, leaves, made)


def _rebuild(node: Any, leaves: list[Any], made: dict[int, Any]) -> Any:
    tag = node[0]
    if tag == "leaf":
        return leaves[node[1]]
    if tag == "static":
        return node[1]
    if tag == "static_new":
        return node[1]()
    if tag == "ref":
        return made[node[1]]
    if tag == "seq":
        _, index, kind, parts = node
        if issubclass(kind, list):
            result: Any = kind.__new__(kind)
            made[index] = result
            result.extend(_rebuild(p, leaves, made) for p in parts)
            return result
        values = [_rebuild(p, leaves, made) for p in parts]
        made[index] = kind(*values) if hasattr(kind, "_fields") else kind(values)
        return made[index]
    if tag == "deque":
        _, index, kind, maxlen, parts = node
        made[index] = kind((), maxlen)
        made[index].extend(_rebuild(p, leaves, made) for p in parts)
        return made[index]
    _, index, kind, items, attributes = node
    result = kind.__new__(kind)
    made[index] = result
    for name, part in items:
        # The subclass's own __setitem__ may mirror, check or reject: the mirror is already in the
        # attributes.
        setter = OrderedDict.__setitem__ if isinstance(result, OrderedDict) else dict.__setitem__
        setter(result, name, _rebuild(part, leaves, made))
    for name, part in attributes:
        object.__setattr__(result, name, _rebuild(part, leaves, made))
    return result


def map_tensors(fn: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with `fn` applied to every tensor or jax array."""
    leaves, spec = flatten(value)
    if not leaves:
        return value
    return rebuild(
        spec, [leaf if isinstance(leaf, torch.Generator) else fn(leaf) for leaf in leaves]
    )


def to_torch(value: Any) -> Any:
    """Copy every tensor or jax array of any structure to plain CPU torch tensors (bfloat16 and
    int64 kept).

    Args:
        value: an output of a ported call, `ported.params`, or any structure of tensors and jax
            arrays.

    Returns:
        The same structure holding plain `torch.Tensor`s on the CPU.
    """
    from tpuport.model import backend
    from tpuport.model import tensor as tensors

    def one(leaf: Any) -> Any:
        if isinstance(leaf, tensors.TracedTensor):
            return tensors.to_cpu(leaf)
        if isinstance(leaf, jax.Array):
            return backend.to_torch(leaf)
        if isinstance(leaf, backend.TorchaxTensor):
            return backend.to_torch(leaf.jax())
        return leaf

    return map_tensors(one, value)


def to_numpy(value: Any) -> Any:
    """Copy every tensor or jax array of any structure to numpy arrays (bfloat16 as
    ml_dtypes.bfloat16).
    """
    from tpuport.model import backend

    def one(leaf: Any) -> Any:
        return backend.to_numpy_array(leaf) if isinstance(leaf, torch.Tensor) else np.asarray(leaf)

    return map_tensors(one, to_torch(value))
