"""Elementwise ops, whose data-dependent sizes must agree."""

from typing import Any

import torch

from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.values import map_tensors
from tpuport.tracing.dynamic_shapes.extents import (
    Extents,
    attach,
    bound_of,
    carries_gradients,
    cut_padding,
    extents_of,
    isolated,
    node_of,
    require_equal,
    resized,
    spread,
    strip,
)
from tpuport.tracing.dynamic_shapes.handlers import run, tensors_of


def pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise op; data-dependent sizes must agree.

    A static size that is combined with one must equal it at run time.
    """
    tensors = tensors_of(args, kwargs)
    rank = max(t.dim() for t in tensors)
    found: Extents = {}
    sizes: dict[int, int] = {}
    replaced: dict[int, torch.Tensor] = {id(t): strip(t) for t in tensors}
    for out_dim in range(rank):
        users = [
            (t, out_dim - (rank - t.dim())) for t in tensors if out_dim - (rank - t.dim()) >= 0
        ]
        nodes = [(t, d, extents_of(t)[d]) for t, d in users if d in extents_of(t)]
        if not nodes:
            continue
        # One element at most, as of `x[:, :1]`, serves all.
        longer = [one for one in nodes if one[2].high > 1] or nodes
        statics = [t for t, d in users if d not in extents_of(t) and bound_of(t, d) != 1]
        node = (
            node_of(bound_of(statics[0], out_dim - (rank - statics[0].dim())))
            if statics
            else longer[0][2]
        )
        size = int(node.low) if statics else min(bound_of(t, d) for t, d, _ in longer)
        for t, d, other in nodes:
            message = (
                "The size of tensor a must match the size of tensor b at non-singleton dimension"
                f" {out_dim}"
            )
            if statics:
                replaced[id(t)] = spread(replaced[id(t)], d, other, node, size, message)
            elif other.high <= 1 < node.high:
                raise_if((other.value != 1) & (other.value != node.value), RuntimeError(message))
                replaced[id(t)] = resized(replaced[id(t)], d, 1)
            else:
                require_equal(other, node, message)
                replaced[id(t)] = resized(replaced[id(t)], d, size)
        if not statics:
            found[out_dim] = node
            sizes[out_dim] = size
    for t in tensors:
        replaced[id(t)] = _shared(func, t, replaced[id(t)], rank, found, sizes)

    def swap(value: Any) -> Any:
        return replaced.get(id(value), value)

    result = run(
        func,
        tuple(map_tensors(swap, a) for a in args),
        {k: map_tensors(swap, v) for k, v in kwargs.items()},
    )
    if isinstance(result, (tuple, list)):
        return tuple(attach(r, dict(found)) for r in result)
    made = attach(result, found)
    return isolated(made) if func._opname in _VALUE_OF_ONE_ELEMENT else made


# Ops that take a value of no dims, and are linear in it.
_VALUE_OF_ONE_ELEMENT = {"fill", "masked_fill"}


def _shared(
    func: Any,
    tensor: torch.Tensor,
    plain: torch.Tensor,
    rank: int,
    found: Extents,
    sizes: dict[int, int],
) -> torch.Tensor:
    """Return an operand that several rows share so that padding adds nothing to its gradient."""
    lead = rank - tensor.dim()
    own = extents_of(tensor)
    missing = {
        dim: node
        for dim, node in found.items()
        if dim - lead not in own or own[dim - lead].high <= 1 < node.high
    }
    if not missing or not carries_gradients(tensor) or func._opname in _VALUE_OF_ONE_ELEMENT:
        return plain
    shape = [1] * lead + list(plain.shape)
    for dim in missing:
        shape[dim] = sizes[dim]
    return cut_padding(plain.expand(shape), missing)
