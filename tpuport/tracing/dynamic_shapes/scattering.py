"""Writes and scatters with boolean masks and index lists of data-dependent length."""

from typing import Any

import jax.numpy as jnp
import torch

from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import current
from tpuport.tracing.core.cumulative import cumulative
from tpuport.tracing.core.sym_node import NumberNode
from tpuport.tracing.core.tensor import meta_of
from tpuport.tracing.core.values import flow_of, value_of, wrap_as
from tpuport.tracing.dynamic_shapes.extents import (
    attach,
    bound_of,
    elements_span,
    extents_of,
    filled,
    node_of,
    refuse,
    require_equal,
    resized,
    spread,
    strip,
    valid,
    wrap_now,
)
from tpuport.tracing.dynamic_shapes.handlers import handles, run
from tpuport.tracing.dynamic_shapes.rowwise import rowwise
from tpuport.tracing.dynamic_shapes.selection import (
    cut_to,
    expand_masks,
    from_front,
    traced_mask,
    true_count,
)
from tpuport.tracing.lowerings._numeric import replaced

aten = torch.ops.aten


@handles("index_put", "_unsafe_index_put")
def index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `x[indices] = values` with masks or index tensors of data-dependent length.

    Indices past the count write nothing.
    """
    target, indices, values = args[0], from_front(args[0], list(args[1])), args[2]
    accumulate = bool(args[3]) if len(args) > 3 else bool(kwargs.get("accumulate", False))
    masks = [i for i in indices if i is not None]
    if (
        len(masks) == 1
        and traced_mask(masks[0])
        and not extents_of(target)
        and not extents_of(values)
    ):
        lead = indices.index(masks[0]) if masks[0] is indices[0] else len(indices) - 1
        broadcast = values.dim() == 0 or (
            values.dim() < 1 + target.dim() - masks[0].dim() - lead or values.shape[0] == 1
        )
        if broadcast and lead == 0 and not accumulate:
            return _masked_fill(target, masks[0], values)
    expanded, node, dynamic = expand_masks(indices)
    if not dynamic or node is None:
        if extents_of(values):
            count = extents_of(values).get(0)
            if count is not None:
                size = next(torch.Tensor.size(i)[0] for i in expanded if i is not None)
                node = NumberNode(size, int, size, size)
                message = "shape mismatch: value tensor cannot be broadcast"
                values = spread(strip(values), 0, count, node, size, message)
        made = run(func, (target, expanded, values, accumulate), {})
        return attach(made, dict(extents_of(target)))
    bound = max(torch.Tensor.size(i)[0] for i in expanded if i is not None and extents_of(i))
    keep = valid(node, bound)
    values = _matched_values(
        values, node, bound, target.dim() - len([i for i in expanded if i is not None])
    )
    return _put_rows(target, [cut_to(i, bound) for i in expanded], values, keep, accumulate)


def _matched_values(
    values: torch.Tensor, node: NumberNode, bound: int, row_rank: int
) -> torch.Tensor:
    """Return values with one row per index, checked against the count."""
    if values.dim() <= row_rank or (0 not in extents_of(values) and values.shape[0] == 1):
        return values
    given = extents_of(values).get(0)
    size = torch.Tensor.size(values)[0]
    message = (
        "shape mismatch: value tensor cannot be broadcast to indexing result:"
        " the mask selects another number of elements"
    )
    if given is not None:
        return spread(strip(values), 0, given, node, bound, message)
    require_equal(node, NumberNode(size, int, size, size), message)
    return resized(strip(values), 0, bound)


def _put_rows(
    target: torch.Tensor,
    indices: list[Any],
    values: torch.Tensor,
    keep: torch.Tensor,
    accumulate: bool,
) -> torch.Tensor:
    plain = strip(target)
    array = value_of(plain)
    positions = [d for d, i in enumerate(indices) if i is not None]
    if positions != list(range(positions[0], positions[-1] + 1)):
        raise refuse(aten.index_put.default, " with index tensors apart from each other")
    first = positions[0]
    # Rows past the count get an index out of range, which the scatter drops.
    moved = [jnp.where(value_of(keep), value_of(indices[d]), array.shape[d]) for d in positions]
    where = (slice(None),) * first + tuple(moved)
    new = value_of(values).astype(array.dtype)
    updated = (
        array.at[where].add(new, mode="drop") if accumulate else replaced(array, where, new, "drop")
    )
    made = wrap_as(
        aten.index_put.default, updated, meta_of(plain), current(), flow_of([target, values])
    )
    return attach(made, dict(extents_of(target))) if extents_of(target) else made


def _masked_fill(target: torch.Tensor, mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    if mask.dtype is torch.uint8:
        mask = mask != 0
    shaped = mask.reshape(list(mask.shape) + [1] * (target.dim() - mask.dim()))
    values = (
        values.squeeze(0)
        if values.dim() and values.shape[0] == 1 and values.dim() > target.dim() - mask.dim()
        else values
    )
    return torch.where(shaped, values.to(target.dtype), target)


@handles("masked_scatter")
def masked_scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write elements of `source`, in order, where `mask` holds."""
    target, mask, source = args
    if extents_of(target) or extents_of(mask):
        raise refuse(func)
    target, mask = torch.broadcast_tensors(target, mask)
    count = true_count(mask)
    given = extents_of(source)
    if given and set(given) != {0}:
        raise refuse(func, " along a dim that is not the first")
    plain = strip(source).reshape(-1)
    size = plain.shape[0]
    if given:
        row = size // max(torch.Tensor.size(source)[0], 1)
        _require_enough(count, given[0].value * row)
    else:
        _require_enough(count, size)
    taking = value_of(mask).reshape(-1).astype(jnp.int32)
    order = cumulative(jnp.cumsum, taking, 0) - 1
    taken = (
        plain[wrap_now(jnp.clip(order, 0, max(size - 1, 0)), torch.int64)]
        if size
        else plain.new_zeros(target.numel())
    )
    return torch.where(mask, taken.reshape(target.shape).to(target.dtype), target)


def _require_enough(count: NumberNode, available: Any) -> None:
    message = "masked_scatter: expected self and source to have enough elements for the mask"
    raise_if(count.value > available, RuntimeError(message))


@handles("index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce", "index_fill")
def scatter_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Scatter along a dim with a data-dependent number of index rows.

    Rows past the count add nothing.
    """
    target, dim, positions = args[0], args[1] % max(args[0].dim(), 1), args[2]
    node = extents_of(positions).get(0 if positions.dim() == 1 else dim)
    if node is None and dim not in extents_of(target) and _share_rows(func, args):
        return rowwise(func, args, kwargs)
    sizes = extents_of(target)
    if _scatters_all(func, args, dim):
        # An index past the real size is an error, which `value_checks` looks for.
        made = attach(run(func, (strip(target), *args[1:]), kwargs), sizes)
        made._bounds = _written(func, args)
        return made
    if node is None or any(d != dim for d in sizes):
        raise refuse(func)
    along = 0 if positions.dim() == 1 else dim
    if any(d != along for d in extents_of(positions)):
        raise refuse(func, " in another dim")
    plain, target = strip(positions), strip(target)
    size = plain.shape[along]
    keep = valid(node, size)
    shaped = keep.reshape([-1 if d == along else 1 for d in range(plain.dim())])
    extended = torch.cat([target, torch.ones_like(target.narrow(dim, 0, 1))], dim)
    # Rows past the count go to an extra row that is cut off afterwards.
    moved = torch.where(shaped, plain, torch.full((), target.shape[dim], dtype=plain.dtype))
    rest = [filled(a, 1) if isinstance(a, torch.Tensor) else a for a in args[3:]]
    source = args[3] if len(args) > 3 else None
    if isinstance(source, torch.Tensor) and source.dim():
        _require_rows(func, node, extents_of(source).get(dim) or node_of(bound_of(source, dim)))
    rest = [_rows_to(a, dim, size) if isinstance(a, torch.Tensor) and a.dim() else a for a in rest]
    result = run(func, (extended, dim, moved, *rest), kwargs)
    made = attach(result.narrow(dim, 0, target.shape[dim]), sizes)
    made._bounds = _written(func, args)
    return made


def _require_rows(func: Any, rows: NumberNode, given: NumberNode) -> None:
    """Make the program fail, as eager does, if a source has not the rows that the index asks for.

    `index_add` and `index_copy` ask for as many. `scatter` and its kind leave what is beyond the
    index alone.
    """
    if func._opname.startswith("index"):
        require_equal(rows, given, "index and source must have the same number of rows")
    elif rows.expr != given.expr:
        message = "Expected index to be no larger than src: it has more rows"
        raise_if(rows.value > given.value, RuntimeError(message))


def _written(func: Any, args: tuple[Any, ...]) -> tuple[float, float] | None:
    """Return the bounds of a tensor some of whose integers are replaced, None where not known."""
    if func._opname not in ("scatter", "index_copy") or "reduce" in func._overloadname:
        return None
    spans = [elements_span(one) for one in (args[0], args[3])]
    return None if None in spans else (min(s[0] for s in spans), max(s[1] for s in spans))


def _scatters_all(func: Any, args: tuple[Any, ...], dim: int) -> bool:
    """Return whether rows of a known number go to a target of which data decides this size only."""
    others = [one for one in args[2:] if isinstance(one, torch.Tensor)]
    from_end = func._opname == "index_fill"  # counts negative indices from the real end
    return set(extents_of(args[0])) == {dim} and not any(map(extents_of, others)) and not from_end


def _share_rows(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether all operands of a scatter have the data-dependent rows of its target."""
    others = [a for a in args[3:] if isinstance(a, torch.Tensor) and a.dim()]
    if not func._opname.startswith("index"):
        others.append(args[2])
    wanted = {dim: node.expr for dim, node in extents_of(args[0]).items()}
    found = [{dim: node.expr for dim, node in extents_of(one).items()} for one in others]
    return bool(wanted) and all(one == wanted for one in found)


def _rows_to(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    return resized(tensor, dim, size)


@handles("nll_loss_forward")
def nll_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute the negative log likelihood of rows; rows past the count get the ignored target."""
    scores, target, weight, reduction, ignored = args
    node = extents_of(target).get(0) or extents_of(scores).get(0)
    if (
        node is None
        or scores.dim() != 2
        or set(extents_of(scores)) | set(extents_of(target)) != {0}
    ):
        raise refuse(func)
    for operand in (scores, target):
        if 0 not in extents_of(operand):
            raise refuse(func, " against one of static size")
        require_equal(node, extents_of(operand)[0], "input and target have different batch sizes")
    bound = min(torch.Tensor.size(scores)[0], torch.Tensor.size(target)[0])
    plain = filled(target, ignored).narrow(0, 0, bound)
    scores = filled(scores, 0).narrow(0, 0, bound)
    result = run(func, (scores, plain, weight, reduction, ignored), {})
    return (attach(result[0], {0: node}), result[1]) if reduction == 0 else result
