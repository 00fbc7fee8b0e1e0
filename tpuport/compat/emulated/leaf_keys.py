"""Keys of the tensors of a user's module, by which a call notices that one has another value."""

import itertools
from typing import Any

import torch

from tpuport.compat.emulated import spread
from tpuport.foundation.interop.device_mark import mark_of
from tpuport.tracing.core.guards import NotedTensor
from tpuport.tracing.guards.module_changes import key_of
from tpuport.tracing.state.module_state import StateTree


class LeafKeys:
    """Makes the keys.

    Writes to tensors on the accelerator are counted, in whatever way they are made. Plain
    attributes may be tensors of the host, whose content is looked at.
    """

    def __init__(self) -> None:
        self._noted: dict[str, tuple[NotedTensor, int]] = {}
        self._serials = itertools.count()

    def at_first(self, tree: StateTree) -> dict[str, tuple[Any, ...]]:
        """Return the keys of a module on one device, whatever the script spreads later."""
        return {name: (key[0], None, None, key[3]) for name, key in self.of_all(tree).items()}

    def of_all(self, tree: StateTree) -> dict[str, tuple[Any, ...]]:
        """Return the keys of all tensors of a module."""
        return {n: self.of(n, leaf, n in tree.registered) for n, leaf in tree.leaves.items()}

    def of(self, name: str, leaf: Any, registered: bool) -> tuple[Any, ...]:
        """Return a key that changes when a tensor gets another value or sharding, or moves."""
        serial = None if registered else self._serial(name, leaf)
        mesh = spread.mesh() if registered else None
        return key_of(leaf), spread.sharding_of(leaf), mesh, serial

    def _serial(self, name: str, leaf: Any) -> int | None:
        if not isinstance(leaf, torch.Tensor) or mark_of(leaf) is not None:
            return None
        known = self._noted.get(name)
        if known is None or known[0].tensor is not leaf or known[0].is_written():
            known = self._noted[name] = NotedTensor(leaf), next(self._serials)
            known[0].share()
        return known[1]
