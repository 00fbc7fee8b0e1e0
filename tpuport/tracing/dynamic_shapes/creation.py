"""New tensors whose sizes depend on data."""

import math
from typing import Any

import jax.numpy as jnp
import torch

from tpuport.foundation.interop import backend
from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import TracedTensor, meta_of
from tpuport.tracing.core.values import value_of
from tpuport.tracing.dynamic_shapes.extents import (
    Extents,
    attach,
    bound_of,
    extents_of,
    filled,
    isolating,
    natural,
    node_of,
    refuse,
    require_equal,
    strip,
    wrap_now,
)
from tpuport.tracing.dynamic_shapes.handlers import handles, run


@handles(
    "zeros",
    "ones",
    "full",
    "empty",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
    "rand",
    "randn",
    "randint",
)
def _create(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_new = func._opname.startswith("new_")
    at = [argument.name for argument in func._schema.arguments].index("size")
    sizes = args[at]
    if not any(isinstance(s, torch.SymInt) for s in sizes):
        return NotImplemented
    negative = RuntimeError(f"{func._opname}: a size is negative")
    nodes = [natural(node_of(s), negative) for s in sizes]
    if any(n.high == math.inf for n in nodes):
        raise refuse(func, " without an upper bound")
    physical = [int(n.high) for n in nodes]
    head = (strip(args[0]),) if is_new else args[:at]
    made = run(func, (*head, physical, *args[at + 1 :]), kwargs)
    if not isinstance(made, TracedTensor):
        made = wrap_now(value_of(made), made.dtype)
    return attach(made, {d: n for d, n in enumerate(nodes) if n.low != n.high})


@handles("arange")
def _arange(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    if isinstance(step, torch.SymInt) or not isinstance(step, int):
        raise refuse(func, " with a traced step")
    if isinstance(start, float) or isinstance(end, float):
        raise refuse(func, " between a traced integer and a float")
    low, high = node_of(start), node_of(end)
    span = high.sub(low)  # type: ignore[attr-defined]
    message = "upper bound and lower bound inconsistent with step sign"
    raise_if((span.value if step > 0 else -span.value) < 0, RuntimeError(message))
    if step != 1:
        widest = span.high if step > 0 else -span.low
        if widest == math.inf:
            raise refuse(func, " without an upper bound")
        span = NumberNode(-(-span.value // step), int, 0, max(-(-widest // abs(step)), 0))
    if span.high == math.inf:
        raise refuse(func, " without an upper bound")
    bound = max(int(span.high), 0)
    values = low.value + step * jnp.arange(bound, dtype=jnp.int32)
    dtype = kwargs.get("dtype") or torch.int64
    made = wrap_now(values.astype(backend.jax_dtype(dtype)), dtype)
    if step > 0 and math.inf not in (-low.low, low.high):
        made._bounds = (low.low, low.high + step * max(bound - 1, 0))
    return attach(made, {0: NumberNode(span.value, int, 0, bound, span.expr)})


@handles("randperm")
def _randperm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], torch.SymInt):
        return NotImplemented
    node = natural(args[0].node, RuntimeError("randperm: n is negative"))
    if node.high == math.inf:
        raise refuse(func, " without an upper bound")
    bound = int(node.high)
    order = run(func, (bound, *args[1:]), kwargs)
    # Those below the size are in the order of a permutation of that size.
    beyond = (order >= wrap_now(node.value)).to(torch.int32)
    made = attach(order[torch.sort(beyond, stable=True).indices], {0: node})
    made._bounds = (0, max(bound - 1, 0))
    return made


@handles("multinomial")
def _multinomial(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw rows that data selects, or as many as data decides."""
    weights, count = args[:2]
    extents, last = extents_of(weights), weights.dim() - 1
    if not extents and not isinstance(count, torch.SymInt):
        return NotImplemented
    replaces = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    if set(extents) - {last} or (extents and last and not replaces):
        raise refuse(func, " in a matrix")
    node, real = node_of(count), extents.get(last, node_of(bound_of(weights, last)))
    raise_if(node.value <= 0, RuntimeError("cannot sample n_sample <= 0 samples"))
    high = node.high
    if not replaces:
        message = "cannot sample n_sample > prob_dist.size(-1) samples without replacement"
        raise_if(node.value > real.value, RuntimeError(message))
        high = min(high, bound_of(weights, last))
    if high == math.inf:
        raise refuse(func, " without an upper bound")
    # Padding has no weight, so it is drawn last if at all: beyond the samples that are real.
    made = run(func, (filled(weights, 0), max(int(high), 1), *args[2:]), kwargs)
    if node.low == node.high:
        return made
    count = NumberNode(node.value, int, max(node.low, 0), max(int(high), 1), node.expr)
    return attach(made, {last: count})


@handles("expand")
def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Expand dims of size 1, to sizes that may depend on data."""
    base, sizes = args[0], list(args[1])
    lead = len(sizes) - base.dim()
    extents: Extents = {}
    physical: list[int] = []
    for dim, size in enumerate(sizes):
        own = extents_of(base).get(dim - lead)
        if own is None and not isinstance(size, torch.SymInt):
            grows = size > 1 and (dim < lead or bound_of(base, dim - lead) == 1)
            if grows and any(size == bound_of(base, d) for d in extents_of(base)):
                # A C++ function may have read the padded size and passed it here (torch.meshgrid
                # does).
                raise refuse(func, " to its largest size")
            physical.append(size)
            continue
        message = f"expand: dim {dim} has another size and is not 1"
        if own is not None:
            # Composite C++ functions pass the padded size that they read.
            if isinstance(size, torch.SymInt) or size not in (-1, bound_of(base, dim - lead)):
                require_equal(own, node_of(size), message)
            extents[dim] = own
            physical.append(-1)
        elif dim >= lead and bound_of(base, dim - lead) != 1:
            require_equal(node_of(bound_of(base, dim - lead)), size.node, message)
            physical.append(-1)
        else:
            node = natural(size.node, RuntimeError(f"expand: the size of dim {dim} is negative"))
            if node.high == math.inf:
                raise refuse(func, " without an upper bound")
            extents[dim] = node
            physical.append(int(node.high))
    result = run(func, (strip(base), physical), {})
    if not isinstance(result, TracedTensor):
        result = wrap_now(value_of(result), result.dtype)
    copied = {d: n for d, n in extents.items() if d - lead not in extents_of(base)}
    return attach(_isolating_view(result, copied), extents)


def _isolating_view(view: TracedTensor, copied: Extents) -> TracedTensor:
    """Return a view whose copies past these sizes add nothing to the gradient of their source."""
    if view._frozen or not view._chain:
        return view
    step = view._chain[-1]
    for dim, node in copied.items():
        step = isolating(step, dim, node)
    chain = (*view._chain[:-1], step)
    return TracedTensor(view._storage, chain, meta_of(view), None, view._own_flow, view._detached)
