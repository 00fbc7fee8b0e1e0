"""Reads with boolean masks and index lists of data-dependent length."""

from typing import Any

import jax.numpy as jnp
import torch

from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import current
from tpuport.tracing.core.sym_node import Linear, NumberNode
from tpuport.tracing.core.tensor import TracedTensor
from tpuport.tracing.core.values import value_of
from tpuport.tracing.dynamic_shapes.extents import (
    attach,
    count_node,
    elements_span,
    extents_of,
    filled,
    isolated,
    note_dynamic,
    refuse,
    require_equal,
    strip,
    valid,
    wrap_now,
)
from tpuport.tracing.dynamic_shapes.handlers import handles, run
from tpuport.tracing.dynamic_shapes.joining import compacted

aten = torch.ops.aten


def traced_mask(value: Any) -> bool:
    """Return whether `value` is a traced boolean tensor.

    The number of its True elements is then not known.
    """
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.bool, torch.uint8):
        return False
    trace = current()
    return isinstance(value, TracedTensor) or (trace is not None and trace.alias(value) is not None)


def true_count(mask: torch.Tensor) -> NumberNode:
    """Return the number of True elements of a mask.

    A mask has one such number however often it is counted. The negated mask has its size minus
    that.
    """
    trace = current()
    assert trace is not None
    negated = mask._negates if isinstance(mask, TracedTensor) else None
    size = mask.numel() if not extents_of(mask) else None
    if negated is not None and negated[1] is negated[0]._elem and size is not None:  # type: ignore[index]
        inner = true_count(negated[0])  # type: ignore[index]
        assert inner.expr is not None
        expr = Linear(int(size)).plus(inner.expr, -1)
        return NumberNode(size - inner.value, int, 0, int(size), expr)
    array = value_of(mask)
    known = trace.mask_counts.get(id(array))
    if known is None:
        plain = filled(mask, False) if extents_of(mask) else mask
        total = jnp.sum(value_of(plain).astype(jnp.int32))
        known = trace.mask_counts[id(array)] = (array, count_node(total, array.size))
    note_dynamic(trace)
    return known[1]


def _positions(mask: torch.Tensor) -> tuple[list[torch.Tensor], NumberNode]:
    """Return index tensors of the True elements, and their number.

    There is one index tensor for each dim of the mask, each int64[bound].
    """
    node = true_count(mask)
    array = value_of(filled(mask, False) if extents_of(mask) else mask) != 0
    bound = array.size
    flat = compacted(array, bound)
    parts = jnp.unravel_index(flat, array.shape) if array.ndim else (flat,)
    return [attach(wrap_now(p, torch.int64), {0: node}) for p in parts], node


@handles("nonzero")
def nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return int64[count, ndim]: coordinates of the elements that are not zero."""
    source = args[0]
    mask = source if source.dtype is torch.bool else source != 0
    if mask.dim() == 0:
        raise refuse(func, " (nonzero of a 0-d tensor)")
    parts, node = _positions(mask)
    stacked = torch.stack([strip(p) for p in parts], 1)
    stacked = attach(stacked, {0: node})
    stacked._bounds = (
        (0, max(torch.Tensor.size(source)) - 1) if torch.Tensor.numel(source) else None
    )
    stacked._ascends = source.dim() == 1
    return stacked


@handles("masked_select")
def masked_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the elements of `x` where `mask` holds, both broadcast against each other."""
    source, mask = torch.broadcast_tensors(args[0], args[1])
    if not mask.dim():
        source, mask = source.reshape(1), mask.reshape(1)
    return index(aten.index.Tensor, (source, [mask]), {})


def expand_masks(indices: list[Any]) -> tuple[list[Any], NumberNode | None, bool]:
    """Replace the masks in an index list by the positions of their True elements.

    Return the list, the data-dependent length of its index tensors (None if there is none), and
    whether there is one.
    """
    out: list[Any] = []
    node = None
    for item in indices:
        if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
            if traced_mask(item):
                parts, found = _positions(item)
                out += parts
                node = node or found
                if node.expr != found.expr:
                    require_equal(
                        node,
                        found,
                        "shape mismatch: indexing tensors could not be broadcast together",
                    )
            else:
                out += list(item.nonzero().unbind(1))
            continue
        if isinstance(item, torch.Tensor) and extents_of(item):
            if item.dim() != 1 and set(extents_of(item)) != {0}:
                raise refuse(aten.index.Tensor, " with an index of several dims")
            found = extents_of(item)[0]
            if node is not None:
                require_equal(
                    node, found, "shape mismatch: indexing tensors could not be broadcast together"
                )
            node = node or found
        out.append(item)
    return out, node, node is not None


def from_front(source: Any, indices: list[Any]) -> list[Any]:
    """Make index tensors into dims of data-dependent size count from the front.

    A negative index counts from the real end; one out of range fails the program, as in eager.
    """
    out: list[Any] = []
    dim = 0
    for item in indices:
        is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
        size = extents_of(source).get(dim)
        dim += item.dim() if is_mask else 1
        if size is None or is_mask or not isinstance(item, torch.Tensor):
            out.append(item)
            continue
        given = value_of(strip(item))
        outside = (given >= size.value) | (given < -size.value)
        for at, node in extents_of(item).items():
            shape = [-1 if d == at else 1 for d in range(given.ndim)]
            outside &= value_of(valid(node, given.shape[at])).reshape(shape)
        message = f"index is out of bounds for dimension {dim - 1}, whose size depends on data"
        raise_if(jnp.any(outside), IndexError(message))
        found = wrap_now(jnp.where(given < 0, given + size.value, given), item.dtype)
        out.append(attach(found, dict(extents_of(item))) if extents_of(item) else found)
    return out


def _with_selected_first(source: Any, indices: list[Any]) -> Any:
    """Run `x[i, j]` where the indices have their data-dependent dim behind another one.

    That dim is moved to the front of the indices, and back in the result. Return None for others,
    and for masks, whose dims are those of `x`.
    """
    used = [dim for dim, item in enumerate(indices) if item is not None]
    items = [indices[dim] for dim in used]
    behind = {d - item.dim() for item in items for d in extents_of(item)}
    rank = max((item.dim() for item in items), default=0)
    if len(behind) != 1 or -rank in behind or used[-1] - used[0] >= len(used):
        return None
    if (isinstance(source, TracedTensor) and 0 in extents_of(source)) or any(
        item.dtype in (torch.bool, torch.uint8) for item in items
    ):
        return None
    (selected,) = (rank + d for d in behind)
    fronts = []
    for item in items:
        whole = item[(None,) * (rank - item.dim())]
        if torch.Tensor.size(whole)[selected] != 1 and not extents_of(whole):
            raise refuse(aten.index.Tensor, " beside an index of another size")
        fronts.append(whole.permute(selected, *(d for d in range(rank) if d != selected)))
    first = used[0]
    found = source[(slice(None),) * first + tuple(fronts)]
    order = [d for d in range(found.dim()) if d != first]
    order.insert(first + selected, first)
    return found.permute(order)


@handles("index")
def index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `x[indices]` with masks or index tensors of data-dependent length."""
    turned = _with_selected_first(args[0], list(args[1]))
    if turned is not None:
        return turned
    source, indices = args[0], from_front(args[0], list(args[1]))
    expanded, node, dynamic = expand_masks(indices)
    positions = [d for d, item in enumerate(expanded) if item is not None]
    bound = max(
        (
            torch.Tensor.size(expanded[d])[0] if expanded[d].dim() else 1
            for d in positions
            if extents_of(expanded[d])
        ),
        default=0,
    )
    plain = [cut_to(item, bound) for item in expanded]
    result = run(func, (strip(source), plain), {})
    out_extents: dict[int, NumberNode] = {}
    ranks = [plain[d].dim() for d in positions]
    rank = max(ranks)
    together = positions == list(range(positions[0], positions[-1] + 1))
    first = positions[0] if together else 0
    if dynamic:
        assert node is not None
        out_extents[first] = node
    for d, n in extents_of(source).items():
        if d < len(expanded) and expanded[d] is not None:
            continue
        before = sum(1 for p in positions if p < d)
        out_extents[d - before + (rank if (d > first or not together) else 0)] = n
    made = isolated(attach(result, out_extents)) if out_extents else result
    if isinstance(made, TracedTensor):
        made._bounds = elements_span(source)
    return made


def cut_to(item: Any, bound: int) -> Any:
    """Return an index tensor with a physical size of `bound`."""
    if not isinstance(item, torch.Tensor):
        return item
    if not extents_of(item):
        return item
    plain = strip(item)
    return (
        plain
        if plain.shape[0] == bound
        else torch.nn.functional.pad(plain, (0, bound - plain.shape[0]))
    )


@handles("index_select")
def index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Select rows by an index list of data-dependent length."""
    source, dim, positions = args[0], args[1] % max(args[0].dim(), 1), args[2]
    result = run(func, (source, dim, positions), {})
    extents = {d: n for d, n in extents_of(source).items() if d != dim}
    if extents_of(positions):
        extents[dim] = extents_of(positions)[0]
    return isolated(attach(result, extents)) if extents else result


@handles("bincount")
def bincount(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count the elements that are 0, 1, and so on.

    The length is that of the largest value (or `minlength`), so the values must have a known bound,
    as indices from topk or argmax have.
    """
    source = args[0]
    weights = args[1] if len(args) > 1 else kwargs.get("weights")
    minlength = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    if (
        not isinstance(source, TracedTensor)
        or source._bounds is None
        or source._bounds[1] > 1 << 20
    ):
        raise refuse(
            func,
            ": its length has no known bound (clamp the values, or pass indices made by topk"
            " or argmax)",
        )
    bound = max(source._bounds[1] + 1, int(minlength))
    plain = strip(source)
    array = value_of(plain)
    given = value_of(weights) if weights is not None else jnp.ones(array.shape, jnp.int32)
    keep = valid(extents_of(source)[0], array.shape[0]) if extents_of(source) else None
    array = array if keep is None else jnp.where(value_of(keep), array, bound)
    counts = jnp.zeros(bound, given.dtype).at[array].add(given, mode="drop")
    largest = jnp.max(jnp.where(array < bound, array, -1), initial=-1) + 1
    dtype = torch.int64 if weights is None else weights.dtype
    node = NumberNode(jnp.maximum(largest, minlength), int, int(minlength), bound)
    note_dynamic(current())
    return attach(wrap_now(counts, dtype), {0: node})
