"""Outputs of a call that share memory with its arguments or with the state of its module."""

from typing import Any

from tpuport.tracing.core.tensor import TracedTensor, meta_of
from tpuport.tracing.dynamic_shapes.extents import extents_of
from tpuport.tracing.state.request import Alias, TraceResult


def output_aliases(
    outcome: TraceResult, outputs: list[Any], made: list[Any], state: dict[str, Any]
) -> dict[int, Alias]:
    """Return which outputs are arguments, unchanged state, or views of these.

    Args:
        outcome: The outcome of the call.
        outputs: The flattened results of the call.
        made: The flattened arguments of the call.
        state: The tensors of the module after the call, by name.
    """
    if len(outputs) != len(outcome.out_leaves):
        return {}  # some outputs are numbers
    kept = {name: leaf for name, leaf in state.items() if name not in outcome.state}
    owners: dict[int, tuple[int | str, TracedTensor]] = {}
    for of, leaf in (*enumerate(made), *kept.items()):
        if isinstance(leaf, TracedTensor) and not leaf._chain:
            owners.setdefault(id(leaf._storage), (of, leaf))
    found: dict[int, Alias] = {}
    for index, leaf in enumerate(outputs):
        if not isinstance(leaf, TracedTensor) or id(leaf._storage) not in owners:
            continue
        of, owner = owners[id(leaf._storage)]
        meta, base = meta_of(leaf), meta_of(owner)
        if meta.dtype == base.dtype and not extents_of(leaf):
            offset = int(meta.storage_offset() - base.storage_offset())
            found[index] = Alias(of, leaf is owner, tuple(meta.shape), meta.stride(), offset)
    return found
