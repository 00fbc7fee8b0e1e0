"""The tensors to which a script can ask gradients after a call that made or marked them."""

from typing import Any

import torch

from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.tensor import TracedTensor, meta_of
from tpuport.tracing.session.output_aliases import stand_in
from tpuport.tracing.state.module_state import StateTree
from tpuport.tracing.state.request import NewLeaf, TraceResult


def note_leaves(
    outcome: TraceResult, outputs: list[Any], made: list[Any], after: StateTree | None
) -> None:
    """Add to the outcome the leaves that the call made, and the results that retain a gradient.

    Args:
        outcome: The outcome of the call.
        outputs: The program's results.
        made: The flattened arguments of the call.
        after: The module's tensors after the call.
    """
    found = _MadeLeaves(outcome.trace)
    for index, value in enumerate(made):
        if (leaf := found.leaf(value)) is not None:
            leaf.argument = index
    for index, value in enumerate(outputs):
        if (leaf := found.leaf(value)) is not None:
            leaf.results.append(index)
        else:
            found.note(outcome, index, value)
    kept = {} if after is None else after.leaves
    for name in sorted(outcome.bound & kept.keys()):
        if (leaf := found.leaf(kept[name])) is not None:
            leaf.state.append(name)
        else:
            found.note(outcome, name, kept[name])
    outcome.new_leaves = list(found.leaves.values())


class _MadeLeaves:
    """The leaves that a call made, by the names of their values.

    Args:
        trace: The trace of the call.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._retained = {id(tensor) for tensor in trace.gradient_leaves(retained=True)}
        self.leaves: dict[str, NewLeaf] = {}

    def _traced(self, value: Any) -> TracedTensor | None:
        if not isinstance(value, torch.Tensor):
            return None
        found = self._trace.substitutes.get(id(value), stand_in(self._trace, value))
        return found if isinstance(found, TracedTensor) else None

    def leaf(self, value: Any) -> NewLeaf | None:
        """Return the leaf that a value is; None if it is no leaf, or was one before the call."""
        tensor = self._traced(value)
        if tensor is None or tensor._leaf_name is None or not tensor._is_parameter:
            return None
        is_parameter = getattr(tensor, "_is_param", False)
        made = NewLeaf(tensor._leaf_name, meta_of(tensor), is_parameter)
        return self.leaves.setdefault(tensor._leaf_name, made)

    def note(self, outcome: TraceResult, place: int | str, value: Any) -> None:
        """Note of another result or state whether it retains its gradient, or repeats a value."""
        tensor = self._traced(value)
        if id(tensor) in self._retained:
            outcome.retained.append(place)
        if tensor is not None and tensor._repeats:
            outcome.repeated.append(place)
