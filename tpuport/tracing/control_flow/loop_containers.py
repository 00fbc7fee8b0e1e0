"""Containers and objects among the variables of a loop, and which of them may be one after rounds.

A round is traced once, with new containers around its values. In eager PyTorch a container may stay
the same object in all rounds, move from one variable to another (`a, b = b, a`), be replaced by a
new one (`state = {...}`), and have other names (`old = state`). What is written by one of two names
has to reach the other: an object that stays is filled with the results, and a write, by a round or
after the loop, to one that may be one with another on some paths is refused.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from tpuport.foundation.pytree.children import ATOMS, Children, children, walk
from tpuport.foundation.pytree.snapshot import MAX_DEPTH
from tpuport.tracing.control_flow.given_containers import UNCHANGING, held_elsewhere
from tpuport.tracing.control_flow.growth import Surroundings
from tpuport.tracing.core.shared_tensors import Refusal, SharedTensors

# Rounds that are thought through to see which variables may hold the same object.
_ROUNDS = 32


class LoopContainers:
    """The containers that a loop's variables are before it, in a round, and after that.

    Args:
        shared: What is one on some paths of the trace.
        before: The containers in the variables before the loop, by their index in the `TreeSpec`.
        functions: The test and body of the loop.
        rounds: The number of rounds; None where data decides.

    Attributes:
        places: The places outside of the loop that hold its variables, with the ids of their
            holders.
    """

    def __init__(
        self,
        shared: SharedTensors,
        before: dict[int, Any],
        functions: Sequence[Callable[..., Any]],
        rounds: int | None = None,
    ) -> None:
        self.shared = shared
        self.before = {i: one for i, one in before.items() if not isinstance(one, UNCHANGING)}
        self.rounds = rounds
        self.places: set[tuple[int, int | None, str]] = set()
        self._around = Surroundings(functions) if self.before else None
        self._inside: dict[int, Any] = {}
        self._content: dict[int, Children] = {}
        # What the functions reach beside the variables, by id; None if it has to be looked for.
        self._reach: set[int] | None = None
        # By index: what a variable is after a round, as objects of its beginning, from outside of
        # the loop and new ones.
        self._next: dict[int, list[Any]] = {}

    def begin(self, inside: dict[int, Any]) -> None:
        """Note the containers that a round begins with, by their index."""
        self._inside = {i: inside[i] for i in self.before}
        self._content = {i: children(one) for i, one in self._inside.items()}
        self._reach = None

    def note_round(
        self, found: dict[int, Any], outside: Set[int], refuse: Callable[[], BaseException]
    ) -> None:
        """Note what a round leaves in the variables.

        Args:
            found: Its containers, by their index.
            outside: The ids of what the round wrote to besides.
            refuse: Makes the error.

        Raises:
            BaseException: what `refuse` makes, if the round wrote to an object that is one with
                another that is read.
        """
        if self._around is None:
            return
        self._next = {i: self.shared.given_for(found[i]) for i in self.before}
        inside = self._inside.items()
        written = [i for i, one in inside if not self._content[i].is_same(children(one))]
        if not written and not outside:
            return
        held, reached, staying = self._held(), self._reached(), self.staying()
        for state in self._states():
            for i, objects in state.items():
                others = set().union(*(state[j] for j in state if j != i))
                is_read = objects & (others | (reached if i in staying else held))
                if (i in written and is_read) or objects & outside:
                    raise refuse()

    def staying(self) -> dict[int, Any]:
        """Return the containers from before the loop that their variables still are after it."""
        return {
            i: one
            for i, one in self.before.items()
            if all(of is self._inside[i] for of in self._next.get(i, [None]))
        }

    def watch(self, made: dict[int, Any], refuse: Refusal) -> None:
        """Have a trace refused if one of two containers that may be one is written to after this.

        Args:
            made: The containers in the variables after the loop, by their index.
            refuse: Makes the error, or asks for another trace.
        """
        if self._around is None:
            return
        states, staying = self._states(), self.staying()
        ends = states[-1:] if self.rounds is not None and self.rounds < _ROUNDS else states
        held, known = self._held(), self._known()
        for i in self.before.keys() - staying:
            for identity in set().union(*(state[i] for state in ends)) & known.keys():
                for of in self.shared.given_for(known[identity]):
                    self.shared.note_given(made[i], of)
                    if identity in held or of is not known[identity]:
                        self.shared.note_merged(made[i], of, refuse)
            for j in self.before:
                if j != i and any(state[i] & state[j] for state in ends):
                    self.shared.note_merged(made[i], made[j], refuse)

    def _known(self) -> dict[int, Any]:
        """Return the objects from before the loop that variables may be, by their ids."""
        reached = self._reached()
        found = [one for objects in self._next.values() for one in objects if id(one) in reached]
        return {id(one): one for one in (*self.before.values(), *found)}

    def _below(self, value: Any) -> list[Any]:
        """Return what a value holds, but for variables of the loop."""
        found, own = children(value), id(value)
        if not any(holder == own for holder, *_ in self.places):
            return found.all
        parts = [one for i, one in enumerate(found.parts) if (own, i, "") not in self.places]
        held = [one for n, one in found.held.items() if (own, None, n) not in self.places]
        return [*parts, *held]

    def _reached(self) -> set[int]:
        """Return the ids of what the functions reach beside the variables."""

        def parts(value: Any) -> list[Any]:
            return [] if isinstance(value, (*ATOMS, torch.Tensor)) else self._below(value)

        if self._reach is None:
            assert self._around is not None
            found = walk(self._around.snapshot.roots, parts, depth=MAX_DEPTH)
            self._reach = {id(one) for one in found}
        return self._reach

    def _held(self) -> set[int]:
        """Return which of these objects code that still runs can read, by their ids."""
        assert self._around is not None
        known = set(self._known())
        roots = [*self._around.cells, *self._around.snapshot.roots]
        held = held_elsewhere(known, roots, self.shared.arguments, self._below)
        return held | (known & self._reached())

    def _states(self) -> list[dict[int, set[Any]]]:
        """Return which objects the variables may be before each round and after the last."""
        index_of = {id(one): i for i, one in self._inside.items()}
        reached = self._reached()
        states: list[dict[int, set[Any]]] = [{i: {id(one)} for i, one in self.before.items()}]
        for number in range(_ROUNDS if self.rounds is None else min(self.rounds, _ROUNDS)):
            now: dict[int, set[Any]] = {}
            for i, objects in self._next.items():
                now[i] = set()
                for one in objects:
                    at = index_of.get(id(one))
                    new = {id(one) if id(one) in reached else (number, id(one))}
                    now[i] |= new if at is None else states[-1][at]
            states.append(now)
        return states
