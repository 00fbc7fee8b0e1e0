"""What a custom backward reads from outside: weights and numbers of the modules that it calls.

The backward runs in a later trace than its forward. The tensors and traced numbers that its context
and its functions refer to then hold other values, which jax hands to it, for as long as it runs.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.core
import torch

from tpuport.foundation.pytree.children import (
    ATOMS,
    CALLABLES,
    children,
    held_by_callable,
    is_open,
    walk,
)
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.storage import Storage
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.sym_numbers import SYMBOLIC
from tpuport.tracing.core.tensor import TracedTensor


class BoundTensors:
    """The tensors and numbers of a trace that can be reached from some objects.

    Args:
        trace: The trace.
        roots: The objects.
    """

    def __init__(self, trace: Trace, roots: Iterable[Any]) -> None:
        self.tensors: list[TracedTensor] = []
        # The host tensors among them that stand for traced ones.
        self.hosts: dict[int, TracedTensor] = {}
        self.numbers: list[NumberNode] = []
        for found in walk(roots, _parts):
            if isinstance(found, SYMBOLIC) and isinstance(found.node, NumberNode):
                if isinstance(found.node.held, jax.core.Tracer):
                    self.numbers.append(found.node)
            if not isinstance(found, torch.Tensor):
                continue
            tensor = found if isinstance(found, TracedTensor) else trace.alias(found)
            if tensor is None or tensor._storage.trace is not trace:
                continue
            if tensor is not found:
                self.hosts[id(found)] = tensor
            self.tensors.append(tensor)
        self._ids = {id(tensor) for tensor in self.tensors}
        self.storages = list(dict.fromkeys(tensor._storage for tensor in self.tensors))
        trace.held += self.storages

    def __contains__(self, tensor: Any) -> bool:
        return id(tensor) in self._ids

    @property
    def values(self) -> list[jax.Array]:
        """Return the values of the storages, then of the numbers."""
        stored = [storage.value for storage in self.storages]
        return stored + [node.held for node in self.numbers]

    @contextlib.contextmanager
    def holding(self, values: Iterable[jax.Array], trace: Trace) -> Iterator[None]:
        """Give the storages and numbers other values inside the block, as parts of another trace.

        None of them may be written there, and `backward()` gives them gradients.
        """
        before = [(storage, storage.value, storage.trace) for storage in self.storages]
        numbers, given = [node.held for node in self.numbers], list(values)
        for storage, value in zip(self.storages, given, strict=False):
            _put(storage, value, trace)
        for node, value in zip(self.numbers, given[len(self.storages) :], strict=True):
            _hold(node, value)
        gathered, read_only, hosts = trace.gathered, trace.read_only, trace.substitutes
        trace.gathered = gathered | {id(t): t for t in self.tensors if not t._frozen}
        trace.read_only = read_only | {storage.serial for storage in self.storages}
        trace.substitutes = hosts | self.hosts
        try:
            yield
        finally:
            trace.gathered, trace.read_only, trace.substitutes = gathered, read_only, hosts
            for storage, value, owner in before:
                _put(storage, value, owner)
            for node, value in zip(self.numbers, numbers, strict=True):
                _hold(node, value)

    def take_gradients(self) -> list[TracedTensor | None]:
        """Return the gradient that `backward()` left for each storage, and forget it.

        Numbers, which come after the storages, have none.

        Raises:
            PortError: it left one for a view.
        """
        found: list[TracedTensor | None] = []
        for storage in self.storages:
            total: TracedTensor | None = None
            for tensor in self.tensors:
                grad = tensor._left_grad if tensor._storage is storage else None
                if grad is None:
                    continue
                if tensor._chain:
                    raise port_error(
                        "backward() in a custom backward reaches a view that was made outside of"
                        f" it, of shape {tuple(tensor.shape)}",
                        code="TPU403",
                        remedy="pass that tensor to `apply` as an argument",
                    )
                tensor.grad = None
                total = grad if total is None else total + grad  # pyright: ignore[reportAssignmentType]
            found.append(total)
        return found + [None] * len(self.numbers)


def _put(storage: Storage, value: Any, trace: Any) -> None:
    storage.value, storage.trace = value, trace
    storage.version += 1  # no view may use what it read before


def _hold(node: NumberNode, value: jax.Array) -> None:
    node.held, node._narrow = value, None


def _parts(value: Any) -> list[Any]:
    """Return what code can reach from an object: attributes, elements, what functions close over.

    Storages that a function writes later are not followed.
    """
    if isinstance(value, CALLABLES):
        return held_by_callable(value)
    if isinstance(value, (torch.Tensor, *ATOMS)):
        return []
    containers = (list, tuple, dict, set, frozenset)
    known = isinstance(value, (torch.nn.Module, *containers)) or is_open(value)
    return children(value).all if known else []


def held_by(function: Any) -> list[Any]:
    """Return the objects that a function reaches without its arguments.

    They are what it closes over, is bound to, or has as a default, also through other functions.
    """

    def parts(one: Any) -> list[Any]:
        return held_by_callable(one) if isinstance(one, CALLABLES) else []

    return [one for one in walk([function], parts) if not isinstance(one, CALLABLES)]
