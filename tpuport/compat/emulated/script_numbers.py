"""What a script changes on modules between calls: `net.alpha = step / 1000`, `net.mode = "b"`."""

from collections.abc import Iterable
from typing import Any

import torch

from tpuport.compat.emulated.parts import has_parts
from tpuport.foundation.errors import PortError
from tpuport.tracing.guards.module_changes import changed_numbers
from tpuport.tracing.session.tracer import NEEDS_VALUE
from tpuport.tracing.state.module_state import StateTree


class ScriptNumbers:
    """The numbers that a script changes.

    A number that changes a second time becomes an input, so that one program serves all its values.
    If the code turns out to need the value while it is traced, to index a list for example
    (`self.layers[self.stage]`), the number is compiled into the programs again: one for each value.
    """

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._inputs: set[str] = set()
        self._fixed: set[str] = set()

    def again(self, before: StateTree, after: StateTree) -> list[str]:
        """Return the names of the numbers that become inputs, as they have changed before."""
        found = [name for name in changed_numbers(before, after) if name not in self._fixed]
        known = [name for name in found if name in self._changed]
        self._changed.update(found)
        self._inputs.update(known)
        return known

    def fixed_for(self, error: Exception, numbers: set[str], values: dict[str, Any]) -> bool:
        """Make inputs parts of the programs again if a refusal says that code needs their values.

        Args:
            error: what a call of the program raised.
            numbers: the names of all numbers that are inputs, which are changed.
            values: their values by name, which are changed.

        Returns:
            Whether there was one, so that the call may succeed now.
        """
        if not isinstance(error, PortError) or error.code not in NEEDS_VALUE:
            return False
        names, self._inputs = self._inputs & numbers, set()
        self._fixed |= names
        numbers -= names
        for name in names:
            del values[name]
        return bool(names)


_MOST_NEW_STRUCTURES = 6


class NewStructures:
    """Counts the calls in a row before each of which a script made another structure.

    Lightning's trainer, which its modules refer to, counts batches: another program for each call
    would take longer than a program for each submodule.
    """

    def __init__(self) -> None:
        self._count = 0

    def seen(self) -> None:
        """Note that a call has a structure for which there may be a program."""
        self._count = 0

    def new(self, changed: Iterable[str], module: torch.nn.Module) -> None:
        """Note that a call has a structure that no call had.

        Args:
            changed: the names of what differs from the call before.
            module: the module; one without parts has nothing that could be programs instead.

        Raises:
            PortError: it is one of too many in a row.
        """
        self._count += 1
        if self._count >= _MOST_NEW_STRUCTURES and has_parts(module):
            names = ", ".join(map(repr, list(changed)[:3]))
            raise PortError(
                f"the Python attributes {names} were changed before each of the last"
                f" {self._count} calls, so each call is compiled again",
                code="TPU405",
                remedy=(
                    "keep what changes outside of the module, or put its layers into a submodule,"
                    " which is a program of its own"
                ),
            )
