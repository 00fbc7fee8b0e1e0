"""The tensors that a call leaves in the module: which are new, and whose memory they share."""

from dataclasses import replace
from typing import Any

import torch

from tpuport.tracing.core.arguments import result_meta
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.tensor import TracedTensor, meta_of
from tpuport.tracing.core.values import value_of
from tpuport.tracing.session.new_leaves import note_leaves
from tpuport.tracing.session.output_aliases import (
    alias_of,
    earlier_tensors,
    is_whole,
    memory_id,
    offset_of,
    stand_in,
)
from tpuport.tracing.state.module_state import StateTree, moved_constants
from tpuport.tracing.state.request import Alias, Before, Outside, Sibling, TraceResult


def describe(outcome: TraceResult, before: StateTree, after: StateTree) -> None:
    """Add to the outcome the host tensors that the call moved, and what its state is like."""
    trace = outcome.trace
    other = ((n, t) for n, t in after.leaves.items() if t is not before.leaves.get(n))
    left = {n: stand_in(trace, t) for n, t in other if isinstance(t, torch.Tensor)}
    for name in moved_constants(before, after, left, outcome.python_changes):
        outcome.state.setdefault(name, value_of(after.leaves[name]))
    outcome.bound = frozenset(
        name for name, t in left.items() if not _is_one_tensor(t, before.leaves.get(name))
    )
    for name in sorted(outcome.bound):
        if getattr(left[name], "_may_keep_graph", False) and trace.options.takes_gradients:
            raise port_error(
                f"a branch on a traced value under no_grad leaves in {name!r} a tensor of before"
                " the call, with its graph, or another one without",
                code="TPU101",
                remedy="keep it .detach()ed, if no gradient is to flow through it, or leave the"
                " class to eager PyTorch: --eager NAME",
            )
        tensor, old = left[name], before.leaves.get(name)
        if isinstance(tensor, TracedTensor) and isinstance(old, TracedTensor):
            if tensor._storage is not old._storage:  # a clone has the same array
                outcome.state.setdefault(name, tensor._elem)
    written = {
        name: stand_in(trace, after.leaves[name])
        for name in outcome.state.keys() - outcome.bound
        if isinstance(after.leaves[name], torch.Tensor)
    }
    outcome.computed = frozenset(
        name
        for name, t in written.items()
        if isinstance(t, TracedTensor) and t.requires_grad and not t.is_leaf
    )
    for name in sorted(outcome.state):
        leaf = left.get(name, after.leaves[name])
        if isinstance(leaf, torch.Tensor):
            outcome.state_metas[name] = meta_of(stand_in(trace, leaf), like=True)


def describe_sharing(
    outcome: TraceResult,
    outputs: list[Any],
    made: list[Any],
    before: StateTree | None,
    after: StateTree | None,
) -> None:
    """Add to the outcome what the tensors that the call bound anew share, and the leaves it made.

    Args:
        outcome: The outcome of the call, which has its state.
        outputs: The program's results: what the call returns and what it puts into containers.
        made: The flattened arguments of the call.
        before: The module's tensors before the call.
        after: The module's tensors after the call.
    """
    outcome.state_aliases = _aliases(outcome, outputs, made, before, after)
    names = {} if after is None else {id(after.leaves[n]): n for n in outcome.bound}
    outcome.returned = {i: names[id(t)] for i, t in enumerate(outputs) if id(t) in names}
    note_leaves(outcome, outputs, made, after)


def _aliases(
    outcome: TraceResult,
    outputs: list[Any],
    made: list[Any],
    before: StateTree | None,
    after: StateTree | None,
) -> dict[str, Alias]:
    """Return, by name, what the tensors share memory with that a call bound to state.

    A tensor whose memory is its own has no entry.

    Args:
        outcome: The outcome of the call.
        outputs: The program's results.
        made: The flattened arguments of the call.
        before: The module's tensors before the call.
        after: The module's tensors after the call.
    """
    found: dict[str, Alias] = {}
    if before is None or after is None or not outcome.bound:
        return found
    owners = earlier_tensors(outcome.trace, before.leaves)
    for index, leaf in enumerate(made):
        if isinstance(leaf, TracedTensor):
            owners.setdefault(memory_id(leaf), (index, leaf))
    bound = {name: after.leaves[name] for name in sorted(outcome.bound & outcome.state.keys())}
    kept = {id(leaf) for leaf in bound.values()}
    for index, leaf in enumerate(outputs):
        if is_whole(leaf) and id(leaf) not in kept:
            traced = stand_in(outcome.trace, leaf)
            owners.setdefault(memory_id(traced), (Sibling(index), traced))
    # What is all of its memory first: others are views of it.
    for name, leaf in sorted(bound.items(), key=lambda item: not is_whole(item[1])):
        traced = stand_in(outcome.trace, leaf)
        of, owner = owners.setdefault(memory_id(traced), (name, traced))
        if of == name and outcome.trace.is_foreign(leaf):
            of = Outside(leaf)
        if of != name:
            is_written = isinstance(traced, TracedTensor) and traced._storage.version > 0
            # The host has a tensor with elements in any order as it is here, if it has no gaps.
            dense = isinstance(of, str) and result_meta(owner).stride() == owner.stride()
            alias = alias_of(traced, of, owner, is_dense=dense)
            # What is still in the module, or an argument, gets its new value in any case.
            is_gone = isinstance(of, Outside) or (
                isinstance(of, Before) and of.name in outcome.bound
            )
            # A host tensor that the call wrote to is that tensor, whatever stands for it.
            is_same = alias.is_same or leaf is owner
            found[name] = replace(alias, is_same=is_same, is_written=is_written and is_gone)
    return found


def _is_one_tensor(a: Any, b: Any) -> bool:
    """Return whether two traced tensors are one for the user: branches make others of them."""
    if not (isinstance(a, TracedTensor) and isinstance(b, TracedTensor)):
        return a is b
    if a._storage is not b._storage or a.dtype != b.dtype:
        return False
    return (a.shape, a.stride(), offset_of(a)) == (b.shape, b.stride(), offset_of(b))
