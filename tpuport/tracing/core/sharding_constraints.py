"""Sharding constraints on the inputs and outputs of modules, while a program is traced."""

from typing import Any

from tpuport.foundation import pytree
from tpuport.tracing.core.context import Trace
from tpuport.tracing.core.tensor import TracedTensor


def constrain(trace: Trace, module: str, side: str, value: Any) -> None:
    """Add sharding constraints to the tensors in a module's inputs or outputs, in place.

    Tensors keep their identity, so aliases, views and containers stay valid. Only the value that
    is read from a tensor next is replaced, by the same value with a constraint.
    """
    assert trace.options.placement is not None
    leaves, _ = pytree.flatten(value)
    for leaf in leaves:
        if not isinstance(leaf, TracedTensor) or leaf._storage.trace is not trace:
            continue
        before = leaf._held
        after = trace.options.placement.activation(module, side, before)
        if after is not before:
            hold(trace, leaf, after)


def hold(trace: Trace, tensor: TracedTensor, value: Any) -> None:
    """Have a tensor hold its value with a sharding constraint."""
    storage = tensor._storage
    # Views must see the constraint too, so the storage's value is replaced where that is safe.
    # A storage that outlives the nested trace must not hold a tracer of that trace.
    inside = all(storage.serial in effects.created for effects in trace.effects)
    if not tensor._chain and storage.serial >= trace.first_serial and inside:
        storage.value = value
    tensor._keep(value)
