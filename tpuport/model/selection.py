"""Boolean masks and index lists of data-dependent length: reading, writing, scattering by them."""

from typing import Any

import jax.numpy as jnp
import torch

from tpuport.model.bounded import (
    attach,
    compacted,
    count_node,
    extents_of,
    filled,
    handles,
    note_dynamic,
    refuse,
    require_equal,
    run,
    strip,
    valid,
    wrap_now,
)
from tpuport.model.decisions import raise_if
from tpuport.model.number_node import Linear, NumberNode
from tpuport.model.tensor import TracedTensor
from tpuport.model.trace import current

aten = torch.ops.aten


def traced_mask(value: Any) -> bool:
    """Whether `value` is a boolean tensor that is traced.

    Its number of True elements is not known.
    """
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.bool, torch.uint8):
        return False
    trace = current()
    return isinstance(value, TracedTensor) or (trace is not None and trace.alias(value) is not None)


def true_count(mask: torch.Tensor) -> NumberNode:
    """How many elements of a mask are True.

    One number per mask, and size minus it for the negated mask.
    """
    from tpuport.model.dispatch import value_of

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
    """Index tensors (one a dim of the mask, each int64[bound]) of the True elements, and their
    number.
    """
    from tpuport.model.dispatch import value_of

    node = true_count(mask)
    array = value_of(filled(mask, False) if extents_of(mask) else mask) != 0
    bound = array.size
    flat = compacted(array, bound)
    parts = jnp.unravel_index(flat, array.shape) if array.ndim else (flat,)
    return [attach(wrap_now(p, torch.int64), {0: node}) for p in parts], node


@handles("nonzero")
def nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """int64[count, ndim]: coordinates of the elements that are not zero."""
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
    return stacked


@handles("masked_select")
def masked_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The elements of `x` where `mask` holds, both broadcast against each other."""
    source, mask = torch.broadcast_tensors(args[0], args[1])
    return index(aten.index.Tensor, (source, [mask]), {})


def _expanded(indices: list[Any]) -> tuple[list[Any], NumberNode | None, bool]:
    """Index list with masks replaced by their positions.

    The data-dependent length of the index tensors, if any.
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


@handles("index")
def index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[indices]` with masks or index tensors of data-dependent length."""
    source, indices = args[0], list(args[1])
    expanded, node, dynamic = _expanded(indices)
    positions = [d for d, item in enumerate(expanded) if item is not None]
    if any(
        d in extents_of(source) and expanded[d] is not None and not dynamic
        for d in range(len(expanded))
    ):
        # static indices into a data-dependent dim: torch checks their range in eager, so do the
        # real elements
        pass
    bound = max(
        (
            torch.Tensor.size(expanded[d])[0] if expanded[d].dim() else 1
            for d in positions
            if extents_of(expanded[d])
        ),
        default=0,
    )
    plain = [_cut(item, bound) for item in expanded]
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
    made = attach(result, out_extents) if out_extents else result
    if isinstance(source, TracedTensor) and isinstance(made, TracedTensor):
        made._bounds = source._bounds
    return made


def _cut(item: Any, bound: int) -> Any:
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


@handles("index_put", "_unsafe_index_put")
def index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[indices] = values` with masks or index tensors of data-dependent length.

    Rows past the count write nothing.
    """
    target, indices, values = args[0], list(args[1]), args[2]
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
    expanded, node, dynamic = _expanded(indices)
    if not dynamic or node is None:
        if extents_of(values):
            count = extents_of(values).get(0)
            if count is not None:
                size = next(torch.Tensor.size(i)[0] for i in expanded if i is not None)
                require_equal(
                    count,
                    NumberNode(size, int, size, size),
                    "shape mismatch: value tensor cannot be broadcast",
                )
                values = strip(values).narrow(0, 0, size)
        return run(func, (target, expanded, values, accumulate), {})
    bound = max(torch.Tensor.size(i)[0] for i in expanded if i is not None and extents_of(i))
    keep = valid(node, bound)
    values = _matched_values(
        values, node, bound, target.dim() - len([i for i in expanded if i is not None])
    )
    return _put_rows(target, [_cut(i, bound) for i in expanded], values, keep, accumulate)


def _matched_values(
    values: torch.Tensor, node: NumberNode, bound: int, row_rank: int
) -> torch.Tensor:
    """Values with one row per index, checked against the count."""
    if values.dim() <= row_rank or (values.shape[0] == 1 and 0 not in extents_of(values)):
        return values
    given = extents_of(values).get(0)
    size = torch.Tensor.size(values)[0]
    message = (
        "shape mismatch: value tensor cannot be broadcast to indexing result:"
        " the mask selects another number of elements"
    )
    require_equal(node, given or NumberNode(size, int, size, size), message)
    plain = strip(values)
    if size < bound:
        rest = list(plain.shape)
        rest[0] = bound - size
        return torch.cat([plain, plain.new_zeros(rest)], 0)
    return plain.narrow(0, 0, bound)


def _put_rows(
    target: torch.Tensor,
    indices: list[Any],
    values: torch.Tensor,
    keep: torch.Tensor,
    accumulate: bool,
) -> torch.Tensor:
    from tpuport.model.dispatch import grad_frozen, value_of, wrap_as
    from tpuport.model.tensor import meta_of

    plain = strip(target)
    array = value_of(plain)
    positions = [d for d, i in enumerate(indices) if i is not None]
    if positions != list(range(positions[0], positions[-1] + 1)):
        raise refuse(aten.index_put.default, " with index tensors apart from each other")
    first = positions[0]
    # Rows past the count go out of range, where the scatter drops them.
    moved = [jnp.where(value_of(keep), value_of(indices[d]), array.shape[d]) for d in positions]
    where = (slice(None),) * first + tuple(moved)
    new = value_of(values).astype(array.dtype)
    updated = (
        array.at[where].add(new, mode="drop")
        if accumulate
        else array.at[where].set(new, mode="drop")
    )
    made = wrap_as(
        aten.index_put.default, updated, meta_of(plain), current(), grad_frozen([target, values])
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
    """Elements of `source` in order, written where `mask` holds."""
    target, mask, source = args
    if extents_of(target) or extents_of(mask):
        raise refuse(func)
    from tpuport.model.dispatch import value_of

    mask = mask.expand(target.shape)
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
    order = jnp.cumsum(value_of(mask).reshape(-1).astype(jnp.int32)) - 1
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
    """Scatters along a dim by index rows of data-dependent number.

    Rows past the count add nothing.
    """
    target, dim, positions = args[0], args[1] % max(args[0].dim(), 1), args[2]
    node = extents_of(positions).get(0 if positions.dim() == 1 else dim)
    if node is None or extents_of(target):
        raise refuse(func)
    along = 0 if positions.dim() == 1 else dim
    if any(d != along for d in extents_of(positions)):
        raise refuse(func, " in another dim")
    plain = strip(positions)
    size = plain.shape[along]
    keep = valid(node, size)
    shaped = keep.reshape([-1 if d == along else 1 for d in range(plain.dim())])
    extended = torch.cat([target, target.narrow(dim, 0, 1)], dim)
    # Rows past the count go to an extra row that is cut off again.
    moved = torch.where(shaped, plain, torch.full((), target.shape[dim], dtype=plain.dtype))
    rest = [strip(a) if isinstance(a, torch.Tensor) else a for a in args[3:]]
    source = args[3] if len(args) > 3 else None
    given = extents_of(source).get(dim) if isinstance(source, torch.Tensor) else None
    if given is not None:
        require_equal(node, given, "index and source must have the same number of rows")
    elif isinstance(source, torch.Tensor) and source.dim():
        rows = torch.Tensor.size(source)[dim]
        require_equal(
            node,
            NumberNode(rows, int, rows, rows),
            "index and source must have the same number of rows",
        )
    rest = [_rows_to(a, dim, size) if isinstance(a, torch.Tensor) and a.dim() else a for a in rest]
    result = run(func, (extended, dim, moved, *rest), kwargs)
    return result.narrow(dim, 0, target.shape[dim])


def _rows_to(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    from tpuport.model.bounded import _resized

    return _resized(tensor, dim, size)


@handles("index_select")
def index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows by an index list of data-dependent length."""
    source, dim, positions = args[0], args[1] % max(args[0].dim(), 1), args[2]
    result = run(func, (source, dim, positions), {})
    extents = {d: n for d, n in extents_of(source).items() if d != dim}
    if extents_of(positions):
        extents[dim] = extents_of(positions)[0]
    return attach(result, extents) if extents else result


@handles("nll_loss_forward")
def nll_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Negative log likelihood of rows: the ones past the count get the ignored target."""
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
    result = run(func, (strip(scores).narrow(0, 0, bound), plain, weight, reduction, ignored), {})
    return (attach(result[0], {0: node}), result[1]) if reduction == 0 else result


@handles("bincount")
def bincount(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Counts of 0, 1, ...

    Up to the largest value (or `minlength`); the largest must be bounded (an index of topk,
    argmax).
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
    from tpuport.model.dispatch import value_of

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
