"""The memory from before a loop that the rounds of the loop write to."""

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.errors import PortError
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.storage import Flow, Storage
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import value_of, write
from tpuport.tracing.core.view_steps import replace_value
from tpuport.tracing.dispatch.inplace_ops import refuse_by_autograd


class _Unreadable:
    """The value of a tensor from before the loop, in which only its first round writes to it."""

    def __getattr__(self, name: str) -> NoReturn:
        raise _refusal()


class WrittenMemory:
    """What a loop carries besides its variables.

    If a variable is written to and is the same tensor after each round, it is `given`: the rounds
    get the tensor itself, and its storage is carried, so that other names and views see the writes.
    If a round writes to a variable and then replaces it, only the first round writes to the tensor
    from before the loop: what that leaves there is carried.
    """

    def __init__(self, trace: Trace, leaves: list[Any]) -> None:
        self.trace, self.leaves = trace, leaves
        self.given: set[int] = set()
        self._storages: dict[int, Storage] = {}
        self._first: list[int] = []

    @property
    def written(self) -> set[int]:
        """Return the variables that a round writes to."""
        return {*self.given, *self._first}

    def unchanged(self, inside: list[Any], found: list[Any]) -> set[int]:
        """Return the host tensors that a round gives back as they are.

        After the loop they are what they were before it, as `c` of `if self.is_lstm: h, c = ...`
        where there is none, and `h` and `c` began as one tensor of zeros.
        """
        return {
            at
            for at, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, TracedTensor)
            if found[at] is inside[at] and at not in self.written
        }

    def _own(self, index: int, *, written: bool = False) -> Storage | None:
        """Return the storage of a variable before the loop; of a host tensor if it is traced."""
        leaf = self.leaves[index]
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, TracedTensor):
            leaf = self.trace.promote(leaf) if written else self.trace.alias(leaf)
        return leaf._storage if isinstance(leaf, TracedTensor) else None

    def initial(self) -> list[jax.Array]:
        """Return the values before the loop."""
        values = [storage.value for storage in self._storages.values()]
        return values + [value_of(self.leaves[index]) for index in self._first]

    @contextlib.contextmanager
    def holding(self, values: list[jax.Array]) -> Iterator[None]:
        """Let the memory have the values with which a round begins, and then its own again."""
        storages = list(self._storages.values())
        first = [self._own(index) for index in self._first]
        storages += [storage for storage in first if storage is not None]
        for storage in storages:
            # A branch around the loop notes what the memory held: no value of a round.
            self.trace.writing(storage)
        before = [storage.held for storage in storages]
        unreadable: Any = _Unreadable()
        for index, storage in enumerate(storages):
            storage.held = values[index] if index < len(self._storages) else unreadable
            storage.wide, storage.narrow = False, None
            storage.version += 1
        try:
            yield
        finally:
            for storage, value in zip(storages, before, strict=True):
                storage.value, storage.version = value, storage.version + 1

    def wrote(self, inside: list[Any]) -> list[int]:
        """Return the variables, not given, that were written to since a round began with them."""
        return [
            index
            for index, tensor in enumerate(inside)
            if index not in self.given
            and isinstance(tensor, TracedTensor)
            and tensor._storage.version > 0
        ]

    def refuse_by_autograd(self) -> None:
        """Raise what eager PyTorch raises for the writes of the first round."""
        for index in self._first:
            refuse_by_autograd(self.leaves[index], [])

    def note(self, written: list[Storage], inside: list[Any], found: list[Any]) -> bool:
        """Note what a round wrote to, and return whether some of it is not carried yet.

        Args:
            written: the storages from outside of the loop.
            inside: the variables that the round began with.
            found: its results.

        Raises:
            PortError: what it wrote to shares memory with a variable that the round replaces.
        """
        known = len(self._storages) + len(self._first)
        self._storages.update({s.serial: s for s in written})
        for index in self.wrote(inside):
            storage = self._own(index, written=True)
            assert storage is not None
            if found[index] is inside[index]:
                self._storages[storage.serial] = storage
            elif index not in self._first:
                self._first.append(index)
        if len(self._storages) + len(self._first) == known:
            self._refuse_shared(inside, found)
            return False
        owners = [self._own(index) for index in range(len(self.leaves))]
        self.given = {i for i, s in enumerate(owners) if s and s.serial in self._storages}
        return True

    def _refuse_shared(self, inside: list[Any], found: list[Any]) -> None:
        """Refuse a loop in which the writes of a round would have to reach a replaced variable."""
        if not self._storages and not self._first:
            return
        shared = self.trace.shared
        self._refuse_first(inside, found)
        written = {*self._storages, *(inside[index]._storage.serial for index in self._first)}
        seen: set[int] = set()
        for index, leaf in enumerate(found):
            if index in self.given:
                if leaf is not self.leaves[index]:
                    raise _refusal()
            elif isinstance(leaf, TracedTensor) and leaf is not inside[index]:
                serial = leaf._storage.serial
                if serial in written or serial in seen or any(shared.of(leaf._storage)):
                    raise _refusal()
                seen.add(serial)

    def _refuse_first(self, inside: list[Any], found: list[Any]) -> None:
        """Refuse a loop of which not only the first round writes to what is from before it."""
        shared = self.trace.shared
        owners = [self._own(index) for index in range(len(self.leaves))]
        begun = [leaf._storage.serial for leaf in inside if isinstance(leaf, TracedTensor)]
        for index in self._first:
            own, leaf = owners[index], found[index]
            if own is None or owners.count(own) > 1 or any(shared.of(own)):
                raise _refusal()
            if isinstance(leaf, TracedTensor):
                # The next round writes to what this one has put in its place.
                serials = [leaf._storage.serial, *(s.serial for s, _ in shared.of(leaf._storage))]
                if min(serials) <= max(begun):
                    raise _refusal()

    def after(self, inside: list[Any], values: list[jax.Array], ran: jax.Array) -> list[jax.Array]:
        """Return the values after a round; `ran` is whether there was a round before it."""
        count = len(self._storages)
        first = [
            jnp.where(ran, value, inside[index]._storage.value)
            for index, value in zip(self._first, values[count:], strict=True)
        ]
        return [storage.value for storage in self._storages.values()] + first

    def write(self, values: list[jax.Array], flows: list[Flow]) -> None:
        """Write what the loop left in the memory."""
        count = len(self._storages)
        for storage, value in zip(self._storages.values(), values[:count], strict=True):
            stopped = not torch.is_grad_enabled() and jnp.issubdtype(value.dtype, jnp.inexact)
            storage.set(replace_value(storage.value, value) if stopped else value)
            self.trace.shared.follow(storage, self.trace.regions)
        for index, value in zip(self._first, values[count:], strict=True):
            write(self.leaves[index], value, flow=flows[index])


def _refusal() -> PortError:
    return port_error(
        "a loop writes to a tensor in place, and another name for that memory is replaced or read"
        " in the loop",
        code="TPU104",
        remedy="write to a copy (`b = a.clone()` before the loop), or make a new tensor in the loop"
        " (`a = a + 1` for `a += 1`)",
    )
