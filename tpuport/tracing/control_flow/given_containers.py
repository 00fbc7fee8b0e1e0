"""Containers and objects from before a branch that its sides give.

Where both sides give the same one, the branch does, too: what the sides changed in it is among
their changes. Where only one side does (`st = {"a": x} if c else old`), the branch gives a new one
that stands for it on some paths. What is written to one of the two later has to reach the other if
code that still runs can read that: then the branch cannot be merged.
"""

import dis
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from types import CellType, CodeType, FrameType
from typing import Any

import torch

from tpuport.foundation.pytree import ATOMIC, ATOMS, Flattener, children, walk
from tpuport.foundation.pytree.snapshot import MAX_DEPTH, Snapshot
from tpuport.foundation.pytree.tree import Identity
from tpuport.foundation.user_frames import user_frames
from tpuport.tracing.core.shared_tensors import Refusal, SharedTensors

UNCHANGING = (*ATOMS, torch.Tensor, torch.nn.Module, tuple, frozenset, CellType)


def from_before(snapshot: Snapshot | None, shared: SharedTensors) -> Callable[[Any], bool]:
    """Return what tells a container or object that a side may give and code may write to.

    That is one from before the branch, or one that a branch has made and that may be one of those.
    """
    saved = () if snapshot is None else snapshot.saved
    known = {id(value) for value, _ in saved if not isinstance(value, UNCHANGING)}
    return lambda value: id(value) in known or shared.is_given(value)


class SideFlattener(Flattener):
    """A flattening of what a side gives, which notes the containers from before the branch.

    Args:
        leaf: Returns whether a value is a leaf.
        before: Tells those containers.
        kept: The ids of those that both sides give, of which no new ones are made.

    Attributes:
        given: The containers from before, by their paths in the result.
        places: The index of each container in the spec, by its path.
    """

    def __init__(
        self,
        leaf: Callable[[Any], bool],
        before: Callable[[Any], bool],
        kept: Collection[int],
    ) -> None:
        super().__init__(leaf, shared=False, empty=True)
        self.before, self.kept = before, kept
        self.given: dict[str, Any] = {}
        self.places: dict[str, int] = {}

    def visit(self, value: Any, path: str) -> tuple[Any, Any]:
        """Return the (node, key) of a value."""
        if self.before(value):
            self.given[path] = value
            if id(value) in self.kept:
                self.keep.append(value)
                return ("static", value), (type(value), Identity(value))
        return super().visit(value, path)

    def container(self, value: Any, path: str, index: int) -> tuple[Any, Any]:
        """Return the (node, key) of a container's current content."""
        self.places[path] = index
        return super().container(value, path, index)


def given_by_both(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[int]:
    """Return the ids of the containers that two sides give at the same place of their results."""
    return {id(value) for path, value in one.items() if other.get(path) is value}


def watch_merged(
    shared: SharedTensors,
    pairs: list[tuple[Any, Any]],
    snapshot: Snapshot,
    refuse: Refusal,
) -> None:
    """Have a trace refused if one of two containers that may be one is written to later.

    Args:
        shared: What is one on some paths of the trace.
        pairs: The containers that the branch gives, each with one that a side gives in its place.
        snapshot: What the branch may have changed.
        refuse: Makes the error, or asks for a trace that explores the branch.
    """
    for made, given in pairs:
        shared.note_given(made, given)
    # What stands for another container already stands for that as well.
    pairs = [(made, of) for made, given in pairs for of in shared.given_for(given)]
    held = held_elsewhere({id(of) for _, of in pairs}, snapshot.roots, shared.arguments)
    # Two that stand for one container may be one, too.
    standing = {(id(made), id(of)) for made, of in pairs}
    standing |= {(id(one.made), id(one.of)) for one in shared.merged}
    counts = Counter(of for _, of in standing)
    for made, of in pairs:
        if id(of) in held or counts[id(of)] > 1:
            shared.note_merged(made, of, refuse)


def held_elsewhere(
    wanted: set[int],
    roots: list[Any],
    arguments: Iterable[Any],
    below: Callable[[Any], list[Any]] = lambda value: children(value).all,
) -> set[int]:
    """Return which containers running code can read by a name or in a container of it.

    Args:
        wanted: The ids of those that are looked for.
        roots: What the functions of a branch or loop reach. Those that are its names only, tuples
            of operands, cells and the arguments of a call, do not hold what is in them.
        arguments: What the call of the program was given.
        below: Returns what a value holds.
    """
    if not wanted:
        return set()
    found: set[int] = set()
    names = {id(one) for one in roots if isinstance(one, (tuple, list, dict, CellType))}
    reached = [*roots, *arguments]
    for frame in user_frames():
        rebound = _rebound(frame)
        kept = [] if rebound is None else [v for n, v in frame.f_locals.items() if n not in rebound]
        found |= wanted & {id(value) for value in kept}
        reached += kept

    def parts(value: Any) -> list[Any]:
        if type(value) in ATOMIC or isinstance(value, (*ATOMS, torch.Tensor)):
            return []
        held = below(value)
        if id(value) not in names:
            found.update(wanted & set(map(id, held)))
        return held

    for _ in walk(reached, parts, depth=MAX_DEPTH):
        pass
    return found


def _rebound(frame: FrameType) -> frozenset[str] | None:
    """Return the names that the call which a frame waits for is assigned to; None for all.

    All are gone where it returns that call's result.
    """
    return _names_after(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def _names_after(code: CodeType, offset: int) -> frozenset[str] | None:
    names: set[str] = set()
    for step in dis.get_instructions(code):
        if step.offset <= offset:
            continue
        if step.opname.startswith("RETURN") and not names:
            return None
        if step.opname.startswith("STORE_") and not step.opname.endswith(("ATTR", "SUBSCR")):
            stored = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            names.update(map(str, stored))
        elif not step.opname.startswith(("UNPACK", "COPY", "CACHE")):
            break
    return frozenset(names)
