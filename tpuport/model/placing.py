"""Sharding constraints on the inputs and outputs of modules, while a program is traced."""

from typing import Any

from tpuport.model import structure
from tpuport.model.tensor import TracedTensor
from tpuport.model.trace import Trace


def constrain(trace: Trace, module: str, side: str, value: Any) -> None:
    """Give the tensors in the inputs or outputs of a module their places, as they are.

    Tensors keep their identity, so aliases, views and containers stay what they were: only the
    value that a tensor is next read as is replaced by the same value with a constraint.
    """
    assert trace.placement is not None
    leaves, _ = structure.flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, TracedTensor) or leaf._storage.trace is not trace:
            continue
        before = leaf._elem
        if trace.places is not None:
            trace.places.append((module, side, before.ndim))
        after = trace.placement.activation(module, side, before)
        if after is before:
            continue
        storage = leaf._storage
        # Views of it see the constraint too, unless the storage outlives the stretch of the trace
        # in which the constraint is: its value must not be of that stretch.
        inside = all(storage.serial in effects.created for effects in trace.effects)
        if not leaf._chain and storage.serial >= trace.first_serial and inside:
            storage.value = after
        leaf._keep(after)
