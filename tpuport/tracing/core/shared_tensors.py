"""Tensors that are one on some paths of a program only: after `b = a if c else a * 2`, b and a.

A branch gives each of its results a value of its own, so a later write to one of two such tensors
has to reach the other where they are one. Of two containers that are one on some paths none may be
written to later, nor a constant of which the program has a copy, and that copy.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from tpuport.foundation.pytree.children import Children, children
from tpuport.tracing.core import int64

# Raises that the branch cannot be merged, or asks for a trace that explores it.
Refusal = Callable[[], BaseException]


@dataclass(frozen=True)
class Link:
    """What one storage knows about another.

    Attributes:
        other: the other one.
        test: whether both are one, as a value of the program; None where the one is a view.
        region: where that value may be used.
        refuse: makes the error where a write cannot follow it.
        holder: the host tensor that the other one stands for; where it is gone, nobody reads it.
    """

    other: "weakref.ref[Any]"
    test: jax.Array | None
    region: int
    refuse: Refusal
    holder: "weakref.ref[Any] | None" = None


@dataclass(frozen=True)
class MergedContainer:
    """A container that a branch made, and one from before that it is on some paths.

    Attributes:
        made: the one that the branch made.
        of: the other one.
        content: what each of them had after the branch.
        refuse: makes the error where one of them has something else at the end.
    """

    made: Any
    of: Any
    content: tuple[Children, Children]
    refuse: Refusal


class SharedTensors:
    """The links between the storages of a trace, its containers that stand for others, and copies.

    Attributes:
        merged: those containers.
        arguments: what the call was given, which its caller reads after it.
    """

    def __init__(self) -> None:
        # One link for each other storage and what it depends on, or their number would double with
        # each branch.
        self._links: dict[int, dict[Any, Link]] = {}
        self.merged: list[MergedContainer] = []
        self._copied: list[tuple[Callable[[], bool], Refusal]] = []
        self._given: dict[int, tuple[Any, list[Any]]] = {}
        self.arguments: tuple[Any, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._links)

    def add(
        self,
        one: Any,
        other: Any,
        test: jax.Array | None,
        region: int,
        refuse: Refusal,
        *,
        holder: Any = None,
    ) -> None:
        """Link two storages; `holder` is the host tensor that the second one stands for."""
        held = None if holder is None else weakref.ref(holder)
        self._note(one, Link(weakref.ref(other), test, region, refuse, held))
        self._note(other, Link(weakref.ref(one), test, region, refuse))

    def _note(self, storage: Any, link: Link) -> None:
        links = self._links.setdefault(storage.serial, {})
        kind = link.other, link.region, link.test is None, link.holder
        known = links.get(kind)
        if known is not None and known.test is not None and link.test is not None:
            link = replace(link, test=known.test | link.test)
        links[kind] = link

    def add_all(
        self,
        one: Any,
        other: Any,
        test: jax.Array | None,
        regions: list[int],
        refuse: Refusal,
        *,
        holder: Any = None,
    ) -> None:
        """Link a storage to another one, and to those that this one may be one with."""
        for third, link in list(self.of(other)):
            if third is not one:
                both = None
                if test is not None and link.test is not None and link.region in regions:
                    both = test & link.test
                held = None if link.holder is None else link.holder()
                self.add(one, third, both, regions[-1], refuse, holder=held)
        self.add(one, other, test, regions[-1], refuse, holder=holder)

    def of(self, storage: Any) -> Iterator[tuple[Any, Link]]:
        """Yield the storages that are linked to one and alive, with their links."""
        for link in self._links.get(storage.serial, {}).values():
            other = link.other()
            if other is not None and (link.holder is None or link.holder() is not None):
                yield other, link

    def note_given(self, made: Any, of: Any) -> None:
        """Note that a container, which a branch made, stands for one on some paths."""
        self._given.setdefault(id(made), (made, []))[1].append(of)

    def is_given(self, value: Any) -> bool:
        """Return whether a branch made a container that stands for one on some paths."""
        return id(value) in self._given

    def given_for(self, made: Any) -> list[Any]:
        """Return what a container is on some paths: itself, and those that branches gave."""
        found = {id(made): made}
        pending = [made]
        while pending:
            one = pending.pop()
            new = [of for of in self._given.get(id(one), (one, []))[1] if id(of) not in found]
            found.update((id(of), of) for of in new)
            pending += new
        return list(found.values())

    def note_merged(self, made: Any, of: Any, refuse: Refusal) -> None:
        """Note that a container stands for another one."""
        content = children(made), children(of)
        self.merged.append(MergedContainer(made, of, content, refuse))

    def note_copied(self, is_written: Callable[[], bool], refuse: Refusal) -> None:
        """Note that a copy stands for a part of a tensor for as long as neither is written to."""
        self._copied.append((is_written, refuse))

    def refuse_writes(self) -> None:
        """Raise if one of two containers that are one on some paths was written to, or a copy.

        Raises:
            BaseException: what the branch gave to refuse it with.
        """
        for is_written, refuse in self._copied:
            if is_written():
                raise refuse()
        for one in self.merged:
            now = children(one.made), children(one.of)
            if not all(a.is_same(b) for a, b in zip(one.content, now, strict=True)):
                raise one.refuse()

    def follow(self, storage: Any, regions: list[int]) -> None:
        """Repeat a write to a storage where it is also a write to others.

        A storage is linked to all that it may be one with, so nothing has to be followed further.
        """
        tests: dict[int, tuple[Any, jax.Array]] = {}
        for other, link in self.of(storage):
            if link.test is None or link.region not in regions:
                raise link.refuse()
            before = tests.get(other.serial)
            tests[other.serial] = other, link.test if before is None else before[1] | link.test
        for other, test in tests.values():
            # The storage of a host tensor is flat.
            other.set(_either(test, storage.held.reshape(other.held.shape), other.held))
            other.flow = max(other.flow, storage.flow)


def _either(test: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    if new.dtype == old.dtype and not int64.is_wide(new):
        return jnp.where(test, new, old)
    with int64.scope():  # one of them holds 64 bits
        return jnp.where(test, new, old)
