"""The structures that a user's module has had: programs belong to one.

A structure is all that is compiled into programs: Python attributes, layers, hooks, and values
outside of the module that its code reads. Attributes that no program of it has looked at do not
count.
"""

import dataclasses
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tpuport.compat.emulated.script_numbers import NewStructures
from tpuport.tracing.guards.attribute_reads import AttributeReads, unread
from tpuport.tracing.guards.code_reads import CodeReads
from tpuport.tracing.guards.global_state import OWN, GlobalState, OutsideValues
from tpuport.tracing.guards.linked_arguments import Links, linked_cells
from tpuport.tracing.guards.module_changes import Frame, differences, frame_of
from tpuport.tracing.state.module_state import StateTree, state_tree
from tpuport.tracing.state.overlaps import overlapping


@dataclass
class ModuleStructure:
    """One structure of a module.

    Attributes:
        number: tells it from others.
        outside: what the module's code reads outside.
        values: the values there.
        frame: the module's own part.
        unread: the attributes that have changed and count no more, by full name.
        reads: which attributes code looked at while its programs were traced; None before that.
        earlier: what it looked at in the structure before, for the time until then.
    """

    number: int
    outside: GlobalState
    values: OutsideValues
    unread: frozenset[str]
    frame: Frame | None = None
    reads: AttributeReads | None = None
    earlier: AttributeReads | None = None


class Structures:
    """The structures of one module.

    Args:
        module: a reference to it.
        numbers: the names of numbers that are inputs of its programs; the set changes.
    """

    def __init__(self, module: weakref.ref[torch.nn.Module], numbers: set[str]) -> None:
        self._module, self._numbers = module, numbers
        # What ties the arguments of the call to the module.
        self.links: Links | None = None
        # Whether a call has left tensors that share memory.
        self.shares = False
        self._in_a_row = NewStructures()
        self.now = self._new(0, frozenset(), self._look(frozenset()))
        self._known = [self.now]
        # Whether the module was found to have this structure; if not, the next call looks again.
        self._is_found = True

    @property
    def _user(self) -> torch.nn.Module:
        module = self._module()
        assert module is not None, "called by the module itself"
        return module

    def _look(self, unread: frozenset[str]) -> GlobalState:
        """Find what the code reads outside of the module."""
        user = self._user
        reads = CodeReads([user], unread=unread)
        reads.leave_out(linked_cells(user, self.links))
        return GlobalState(reads, type(user).__name__, weakref.proxy(user))

    def _new(self, number: int, unread: frozenset[str], outside: GlobalState) -> ModuleStructure:
        made = ModuleStructure(number, outside, outside.snapshot(), unread)
        made.frame = self.frame(self.tree(made), made)
        return made

    def tree(self, of: ModuleStructure | None = None) -> StateTree:
        """Return the module's state, without attributes that do not count in a structure.

        Args:
            of: the structure; the present one by default.
        """
        of = of or self.now
        tree = state_tree(self._user, self._numbers, graphs=True, unread=of.unread)
        tree.drop_unread(of.outside.code.reads)
        return tree

    def frame(self, tree: StateTree, of: ModuleStructure | None = None) -> Frame:
        """Return what needs another program when it changes, of the module with this state.

        Args:
            tree: the state.
            of: the structure; the present one by default.
        """
        shared = tuple(sorted(overlapping(tree.leaves))) if self.shares else ()
        tied = {name: list(others) for name, others in tree.aliases.items()}
        frame = frame_of(tree, self._user, self.links)
        # Code that reads such a tensor from outside reads this state.
        outside = {id(one): index for index, one in enumerate((of or self.now).values.tensors)}
        seen = {name: outside[id(t)] for name, t in tree.leaves.items() if id(t) in outside}
        return dataclasses.replace(frame, tied=tied, shared=shared, outside=seen)

    def changed(self, tree: StateTree) -> list[str] | None:
        """Return the names of the values outside that changed; None if nothing changed anywhere."""
        outside = self.now.values.changed()
        if outside or not self._is_found or self.frame(tree) != self.now.frame:
            return outside
        self._in_a_row.seen()
        return None

    def unread(
        self, before: StateTree, after: StateTree, outside: list[str], inputs: Iterable[str]
    ) -> frozenset[str]:
        """Return the attributes that do not count, with those of now that have changed.

        Args:
            before: the state that the module had.
            after: the state that it has.
            outside: the names of values outside that have changed.
            inputs: the names of state that programs take.
        """
        reads = self.now.reads or self.now.earlier
        if reads is None:
            return self.now.unread
        own = (name.removeprefix(OWN) for name in outside if name.startswith(OWN))
        changed = {*differences(before, after), *own} - before.registered - after.registered
        found = unread(changed, reads, {**before.owners, **after.owners})
        return self.now.unread | _without_inputs(found, inputs)

    def leave_out(self, unread: frozenset[str], outside: list[str]) -> bool:
        """Let attributes count no more in this structure, if nothing else has changed."""
        now, names = self.now, {OWN + name for name in unread}
        if not self._is_found or unread == now.unread or not names.issuperset(outside):
            return False
        before, counted = now.unread, now.frame
        now.unread = unread
        if counted is None or counted.without(unread) != self.frame(self.tree()):
            now.unread = before
            return False
        self._look_again()
        self._in_a_row.seen()
        return True

    def count(self, names: frozenset[str]) -> None:
        """Let attributes count again in this structure."""
        self.now.unread -= names
        self._look_again()

    def _look_again(self) -> None:
        now = self.now
        now.outside = self._look(now.unread)
        now.values = now.outside.snapshot()
        now.frame = self.frame(self.tree())

    def note_reads(self, reads: AttributeReads) -> bool:
        """Note what code looked at while a program was traced.

        Returns:
            Whether it looked at attributes that did not count; they count from now on.
        """
        self.now.reads = self.now.reads or AttributeReads()
        self.now.reads.add(reads)
        again = {n for n in self.now.unread if reads.include(n, n.rpartition(".")[0])}
        if again:
            self.count(frozenset(again))
        return bool(again)

    def note_outside(self) -> None:
        """Take values outside that the call has set as those of this structure."""
        if self.now.values.changed():
            self.now.values = self.now.outside.snapshot()

    def forget(self) -> None:
        """Look at the module again at the next call."""
        self._is_found = False

    def find(
        self,
        changed: Iterable[str],
        inputs: Iterable[str],
        unread: frozenset[str],
        outside: GlobalState | None = None,
    ) -> None:
        """Switch to the structure that the module has now, an old one if it was seen before.

        Args:
            changed: the names of what differs from the structure before, for messages.
            inputs: the names of state that programs take.
            unread: the attributes that do not count in a new structure.
            outside: what code reads outside; by default it is found again for a new structure.

        Raises:
            PortError: there were too many new ones in a row.
        """
        # If it is refused, the next call looks again.
        self._is_found = False
        for known in self._known:
            if not known.values.changed() and known.frame == self.frame(self.tree(known), known):
                self.now, self._is_found = known, True
                self._in_a_row.seen()
                if held := known.unread - _without_inputs(known.unread, inputs):
                    self.count(held)
                return
        self._in_a_row.new(changed, self._user)
        unread = _without_inputs(unread, inputs)
        reads = self.now.reads or self.now.earlier
        self.now = self._new(len(self._known), unread, outside or self._look(unread))
        self.now.earlier = reads
        self._known.append(self.now)
        self._is_found = True


def _without_inputs(names: frozenset[str], inputs: Iterable[str]) -> frozenset[str]:
    """Return the attributes that hold no input of a program."""
    held = [path for path in inputs if path.startswith(tuple(names))] if names else []
    return frozenset(
        name
        for name in names
        if not any(path == name or path.startswith((name + "[", name + ".")) for path in held)
    )
