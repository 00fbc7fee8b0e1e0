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
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch

from tpuport.foundation.pytree.children import (
    ATOMS,
    Atom,
    children,
    is_plain,
    rebuilt,
    refill,
    walk,
)
from tpuport.foundation.pytree.tensor_classes import is_class_of_tensors


def is_leaf(value: Any) -> bool:
    """Return whether `value` crosses the jit boundary as an array (or a generator as its key)."""
    if isinstance(value, torch.Tensor):
        return not is_sparse(value)
    return isinstance(value, (jax.Array, torch.Generator))


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is made of indices and values, for which jax has no array.

    It stays on the host: a program takes its values as constants.
    """
    # Asking for the memory is cheap, and goes through no function of torch.
    held = torch._C._has_storage(tensor)  # pyright: ignore[reportAttributeAccessIssue]
    return not held and tensor.layout in _SPARSE


_SPARSE = frozenset(
    {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
)


class Identity:
    """A key that is equal to that of the same object only, which it keeps."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value):#x}"


@dataclass
class TreeSpec:
    """A structure without its leaves, like a jax treedef: `unflatten` puts other leaves in.

    `key` is a hashable description of everything that is not a leaf, equal for structures that
    trace to the same program. `containers` are the flattened objects, by their index in `node`.
    """

    node: Any
    key: Any
    keep: list[Any] = field(default_factory=list)
    containers: dict[int, Any] = field(default_factory=dict)


class Flattener:
    """A depth-first flattening of values, which remembers shared objects.

    Args:
        leaf: Returns whether a value is a leaf.
        objects: Flatten plain objects and numpy arrays without tensors too, so that the
            rebuilt structure shares nothing that a call could change.
        shared: Whether a tensor that is held twice is one leaf.
        empty: Whether an empty list or dict is a container like others.
    """

    def __init__(
        self,
        leaf: Callable[[Any], bool],
        *,
        objects: bool = False,
        shared: bool = True,
        empty: bool = False,
    ) -> None:
        self.leaf = leaf
        self.objects, self.shared, self.empty = objects, shared, empty or objects
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self.seen: dict[int, tuple[str, int]] = {}
        self.containers: dict[int, Any] = {}
        self.keep: list[Any] = []
        self.barren: set[int] = set()

    def visit(self, value: Any, path: str) -> tuple[Any, Any]:
        """Return the (node, key) of a value."""
        if is_class_of_tensors(type(value)):
            return self._tensor(value, path)
        if self.leaf(value):
            # Number leaves have no identity: two equal ones are two leaves.
            shared = self.shared and is_leaf(value)
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
        if kind is weakref.ref:
            return self._weak(value)
        # A shape that data decides is a tuple of leaves.
        is_open = kind is torch.Size and any(map(self.leaf, value))
        if isinstance(value, ATOMS) and not is_open:
            return ("static", value), (kind, hashable(value, self.keep))
        known = self.seen.get(id(value))
        if known is not None:
            return known, known
        if kind in (list, tuple, dict, OrderedDict) and not value and not self.empty:
            return ("static_new", kind), (kind, ())
        container = isinstance(value, (list, tuple, dict, UserDict, deque, set, frozenset))
        container = container or (self.objects and is_plain(value))
        if not container and not self._bears(value):
            return ("static", value), (kind, hashable(value, self.keep))
        index = len(self.containers)
        self.containers[index] = value
        self.seen[id(value)] = ("ref", index)
        self.keep.append(value)
        return self.container(value, path, index)

    def _weak(self, value: weakref.ref[Any]) -> tuple[Any, Any]:
        """Return the (node, key) of a weak reference: a part's to what it is in by its place.

        torch_geometric's stores refer to their `Data` so, and each object has one of its own.
        """
        known = self.seen.get(id(value()), ("", 0))
        # A tuple is made after its parts.
        is_made_last = isinstance(value(), (tuple, frozenset))
        if known[0] != "ref" or is_made_last or value.__callback__ is not None:
            return ("static", value), (weakref.ref, hashable(value, self.keep))
        return ("weak", known), ("weak", known)

    def _tensor(self, value: torch.Tensor, path: str) -> tuple[Any, Any]:
        """Return the (node, key) of a tensor of a class of the user's: a container of a leaf."""
        known = self.seen.get(id(value))
        if known is not None:
            return known, known
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
        found = children(value)
        kind = found.kind
        steps = [*found.steps(), *(f".{name}" for name in found.held)]
        steps += [f"[key {i}]" for i in found.known_by_identity]
        pairs = [self.visit(v, path + s) for v, s in zip(found.all, steps, strict=True)]
        nodes, keys = iter([n for n, _ in pairs]), [k for _, k in pairs]
        count = len(found.parts)
        key = (
            kind,
            hashable(found.option, self.keep),
            tuple(hashable(k, self.keep) for k in found.equal_keys),
            (frozenset if isinstance(value, (set, frozenset)) else tuple)(keys[:count]),
            tuple(zip(found.held, keys[count:], strict=False)),
        )
        if found.known_by_identity:
            key = (*key, found.known_by_identity, *keys[count + len(found.held) :])
        return ("node", index, found.map(lambda _: next(nodes))), key

    def _bears(self, value: Any) -> bool:
        """Return whether there is a tensor somewhere below an object that is not a container."""

        def parts(of: Any) -> list[Any]:
            ends = isinstance(of, (*ATOMS, torch.nn.Module, np.ndarray)) or id(of) in self.barren
            return [] if ends else children(of).all

        seen: set[int] = set()
        for one in walk([value], parts, depth=_MAX_DEPTH):
            if self.leaf(one):
                return True
            seen.add(id(one))
        self.keep.append(value)
        self.barren |= seen
        return False


_MAX_DEPTH = 7


def hashable(value: Any, keep: list[Any]) -> Any:
    """Return a hashable key of a static value; objects without one are known by identity."""
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype), value.tobytes())
    if isinstance(value, types.MethodType):
        keep.append(value.__self__)
        return (value.__func__, id(value.__self__))
    if isinstance(value, (weakref.ref, torch.Tensor, Atom)):
        # Comparing them would compare a tensor or a referent, elementwise.
        return Identity(value)
    if isinstance(value, functools.partial):
        keep.append(value)
        held = (*value.args, *value.keywords.values())
        parts = [("id", id(v)) if isinstance(v, torch.Tensor) else hashable(v, keep) for v in held]
        return (functools.partial, id(value), *value.keywords, *parts)
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
    shared: bool = True,
) -> tuple[list[Any], TreeSpec]:
    """Flatten any structure into leaves and a `TreeSpec`.

    Returns:
        The leaves in order of first appearance (if `shared`, a tensor held twice is one leaf), and
        the `TreeSpec` that puts them back.
    """
    flattener = Flattener(leaf, objects=objects, shared=shared)
    node, key = flattener.visit(value, path)
    return flattener.leaves, TreeSpec(node, key, flattener.keep, flattener.containers)


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
    spec = TreeSpec(node, key, flattener.keep, flattener.containers)
    return flattener.leaves, spec, flattener.paths


def unflatten(spec: TreeSpec, leaves: list[Any], made: dict[int, Any] | None = None) -> Any:
    """Return the structure of `spec` around other leaves, in new containers.

    `made` receives the new containers by their index. Those that it has already are filled anew.
    """
    return unflatten_node(spec.node, leaves, {} if made is None else made)


def unflatten_node(node: Any, leaves: list[Any], made: dict[int, Any]) -> Any:
    """Rebuild a part of a structure; `made` has the containers that exist already."""
    tag, what = node[:2]
    if tag == "leaf":
        return leaves[what]
    if tag == "static":
        return what
    if tag == "static_new":
        return what()
    if tag == "ref":
        return made[what]
    if tag == "weak":
        return weakref.ref(unflatten_node(what, leaves, made))
    if tag == "array":
        made[what] = node[2].copy()
        return made[what]
    if what in made:
        refill(made[what], node[2].map(lambda part: unflatten_node(part, leaves, made)))
        return made[what]
    return rebuilt(
        node[2],
        lambda part: unflatten_node(part, leaves, made),
        lambda value: made.update({what: value}),
    )


def statics_of(spec: TreeSpec) -> list[Any]:
    """Return the values in a structure that are neither leaves nor containers."""
    nodes = walk([spec.node], lambda node: node[2].all if node[0] == "node" else [])
    return [node[1] for node in nodes if node[0] == "static"]


def map_tensors(fn: Callable[[Any], Any], value: Any) -> Any:
    """Return the same structure with `fn` applied to every tensor or jax array."""
    leaves, spec = flatten(value)
    if not leaves:
        return value
    return unflatten(
        spec, [leaf if isinstance(leaf, torch.Generator) else fn(leaf) for leaf in leaves]
    )
