"""Reads and writes by integer indices: embedding, take, put, index_add and their relatives."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpuport.foundation.interop import backend
from tpuport.tracing.core.constants import HOIST_BYTES
from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.lowering_registry import SAME, lowering, special
from tpuport.tracing.core.sparse_rows import sparse_lookup
from tpuport.tracing.core.tensor import meta_of
from tpuport.tracing.core.values import flow_of, value_of, wrap_as, write
from tpuport.tracing.core.view_steps import spaced_write, strided_step
from tpuport.tracing.lowerings._numeric import lowest, replaced, value_and_gradient
from tpuport.tracing.lowerings.basic import cast

aten = torch.ops.aten


def _at(index: Any, dim: int, ndim: int) -> tuple[Any, ...]:
    return (slice(None),) * (dim % ndim) + (index,)


def _wrapped(index: jax.Array, size: int) -> jax.Array:
    return jnp.where(index < 0, index + size, index)


# -- reading ---------------------------------------------------------------------------------------


@lowering(
    aten.index_select.default, reason="torchax takes no 0-d tensor or index and fills with nan"
)
def _index_select(x: jax.Array, dim: int, index: jax.Array) -> jax.Array:
    if not x.ndim:
        return x
    return jnp.take(x, index.reshape(-1), dim, mode="clip")


@lowering(aten.gather.default, reason="torchax takes no 0-d index")
def _gather(x: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool = False) -> jax.Array:
    if not index.size:
        return jnp.zeros(index.shape, x.dtype)
    if not x.ndim or not index.ndim:
        return jnp.take(x.reshape(-1), index, mode="clip")
    dim %= x.ndim
    # Along the other dims torch reads only as far as the index goes.
    part = x[tuple(slice(None) if d == dim else slice(0, n) for d, n in enumerate(index.shape))]
    return jnp.take_along_axis(part, _without_repeats(index, dim), dim, mode="clip")


def _without_repeats(index: jax.Array, dim: int) -> jax.Array:
    """Return a long known index with one entry in each other dim along which all are alike.

    Masked autoencoders write `gather(x, 1, ids.unsqueeze(-1).repeat(1, 1, width))`: of ids that do
    not depend on the inputs, the program then holds the short ones, and reads whole rows by them.
    """
    if isinstance(index, jax.core.Tracer) or index.nbytes < HOIST_BYTES:
        return index
    host = np.asarray(index)
    for d in range(host.ndim):
        first = host.take([0], d)
        if d != dim and (host == first).all():
            host = first
    if host.size == index.size:
        return index
    with jax.ensure_compile_time_eval():
        return jnp.asarray(host)


@special(aten.as_strided_scatter.default)
def as_strided_scatter(
    x: torch.Tensor,
    src: torch.Tensor,
    size: list[int],
    stride: list[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    """Return a copy of `x` with a strided window of its memory replaced.

    Eager's gradient of `x` is that of the elements inside of the window, which were replaced, and
    this has the same.

    Raises:
        PortError: `x` is not laid out in order.
    """
    start: Any = x.storage_offset()
    if start or not x.is_contiguous():
        raise port_error(
            "as_strided_scatter into a tensor that is not contiguous in memory",
            code="TPU203",
            remedy="call .contiguous() first, or write to an ordinary slice of a clone",
        )
    value, given = value_of(x), cast(value_of(src), backend.jax_dtype(x.dtype))
    window = np.arange(value.size)
    window = torch.from_numpy(window).as_strided(size, stride, storage_offset or 0).numpy()
    flat = value.reshape(-1)
    inside = jnp.zeros(flat.shape, flat.dtype).at[window].set(1)
    moved = (flat * inside).at[window].add(given)
    step = strided_step(value.size, size, stride, storage_offset or 0)
    made = value_and_gradient(lax.stop_gradient(step.inverse(flat, given)), moved)
    return wrap_as(None, made.reshape(value.shape), meta_of(x), current(), flow_of([x, src]))


_IN_PLACE = "XLA for the CPU computes it in place: see `was_read` in core/view_steps.py"


@lowering(aten.slice_scatter.default, reason=_IN_PLACE)
def _slice_scatter(
    x: jax.Array,
    source: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    first, _, step = slice(start, end, step).indices(x.shape[dim])
    if not source.size:
        return x
    places = [dim % x.ndim == d for d in range(x.ndim)]
    starts, strides = [first * p for p in places], [step if p else 1 for p in places]
    return spaced_write(x, source.astype(x.dtype), starts, strides)


@lowering(aten.select_scatter.default, reason=_IN_PLACE)
def _select_scatter(x: jax.Array, source: jax.Array, dim: int, index: int) -> jax.Array:
    dim, index = dim % x.ndim, index % x.shape[dim]
    return _slice_scatter(x, jnp.expand_dims(source, dim), dim, index, index + 1)


@lowering(aten.take.default, reason="torchax fills with nan out of range")
def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take(x.reshape(-1), _wrapped(index, x.size), mode="clip")


@lowering(
    aten.embedding.default,
    reason="torchax ignores scale_grad_by_freq, and padding_idx=-1 means the last row there",
)
def _embedding(
    weight: jax.Array,
    index: jax.Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    """Read rows of `weight` [n, d] at `index` [...]; the row `padding_idx` gets no gradient."""
    trace = current()
    if sparse and trace is not None and trace.options.takes_gradients and torch.is_grad_enabled():
        rows = sparse_lookup(weight, index, padding_idx)
    else:
        rows = jnp.take(weight, index, axis=0, mode="clip")
    if scale_grad_by_freq:
        uses = jnp.zeros(weight.shape[0], rows.dtype).at[index].add(1)[index][..., None]
        fixed = lax.stop_gradient(rows)
        rows = fixed + (rows - fixed) / uses
    if padding_idx >= 0:
        rows = jnp.where((index == padding_idx)[..., None], lax.stop_gradient(rows), rows)
    return rows


@special(aten.embedding_renorm_.default)
def _embedding_renorm(
    weight: torch.Tensor, index: torch.Tensor, max_norm: float, norm_type: float
) -> torch.Tensor:
    """Scale down in place the rows that `index` names and that are longer than `max_norm`."""
    table = value_of(weight)
    named = jnp.zeros(table.shape[0], bool).at[value_of(index).reshape(-1)].set(True)
    norms = jnp.linalg.norm(table.astype(jnp.float32), norm_type, axis=1)
    scale = jnp.where(named & (norms > max_norm), max_norm / (norms + 1e-7), 1.0)
    return write(weight, (table * scale[:, None]).astype(table.dtype), flow=flow_of([weight]))


# -- writing ---------------------------------------------------------------------------------------


@lowering(aten.index_add.default, reason="torchax drops alpha= and takes no 0-d tensor")
def _index_add(
    x: jax.Array, dim: int, index: jax.Array, source: jax.Array, *, alpha: Any = 1
) -> jax.Array:
    added = source if isinstance(alpha, int | float) and alpha == 1 else source * alpha
    added = cast(added, x.dtype)
    index = index.reshape(-1)
    if x.dtype == jnp.bool_:
        wide = _index_add(x.astype(jnp.int32), dim, index, added.astype(jnp.int32))
        return wide != 0
    flat = x.reshape(x.shape or (1,))
    added = added.reshape(added.shape or (1,))
    return flat.at[_at(index, dim, flat.ndim)].add(added).reshape(x.shape)


@lowering(aten.index_copy.default, reason="torchax squeezes a 1-d source")
def _index_copy(x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    flat = x.reshape(x.shape or (1,))
    source = source.reshape(source.shape or (1,))
    return replaced(flat, _at(index.reshape(-1), dim, flat.ndim), source).reshape(x.shape)


@lowering(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, reason=SAME)
def _index_fill(x: jax.Array, dim: int, index: jax.Array, value: Any) -> jax.Array:
    flat = x.reshape(x.shape or (1,))
    filled = flat.at[_at(index.reshape(-1), dim, flat.ndim)].set(cast(jnp.asarray(value), x.dtype))
    return filled.reshape(x.shape)


@lowering(aten.put.default, reason="torchax accumulates only one of several values for a place")
def _put(x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False) -> jax.Array:
    source = source.reshape(-1)
    if accumulate and x.dtype == jnp.bool_:
        return _put(x.astype(jnp.int32), index, source.astype(jnp.int32), True) != 0
    flat, where = x.reshape(-1), _wrapped(index.reshape(-1), x.size)
    return (flat.at[where].add(source) if accumulate else replaced(flat, where, source)).reshape(
        x.shape
    )


@lowering(
    aten.index_put.default,
    aten._unsafe_index_put.default,
    reason="of several values for one place jax gives one a gradient, torch all",
)
def _index_put(
    x: jax.Array, indices: list[Any], values: jax.Array, accumulate: bool = False
) -> jax.Array:
    where = tuple(slice(None) if i is None else i for i in indices)
    values = cast(values, x.dtype)
    return x.at[where].add(values) if accumulate else replaced(x, where, values)


# -- bags ------------------------------------------------------------------------------------------


@lowering(
    aten._embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    reason=(
        "torchax needs the offsets as Python numbers and ignores per_sample_weights and padding_idx"
    ),
)
def _embedding_bag(
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Reduce each bag of rows of `weight` [n, d] by sum (0), mean (1) or maximum (2).

    Bag b holds the rows `indices[offsets[b] : offsets[b + 1]]` of `indices` [m]; entries equal to
    `padding_idx` are ignored. An empty bag gives zeros.

    Returns:
        The bags [b, d], and the bag of each index, the size of each bag and the indices of the
        maxima, which only backward uses.
    """
    bags = offsets.shape[0] - (1 if include_last_offset else 0)
    counted = indices != padding_idx
    rows = _embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
    ends = offsets[1:]
    bag = jnp.searchsorted(ends[: bags - 1], jnp.arange(indices.shape[0]), side="right")
    size = jnp.zeros(bags, jnp.int32).at[bag].add(counted.astype(jnp.int32))
    if mode == 2:
        out, chosen = _largest(rows, bag, bags, counted, indices, size)
    else:
        if per_sample_weights is not None:
            rows = rows * per_sample_weights[:, None]
        kept = jnp.where(counted[:, None], rows, 0)
        out = jnp.zeros((bags, weight.shape[1]), rows.dtype).at[bag].add(kept)
        if mode == 1:
            out = out / jnp.maximum(size, 1)[:, None].astype(out.dtype)
        chosen = jnp.zeros(0, jnp.int32)
    # With include_last_offset torch's sizes have one entry more than there are bags.
    return out, bag, jnp.pad(size, (0, offsets.shape[0] - bags)), chosen


def _largest(
    rows: jax.Array,
    bag: jax.Array,
    bags: int,
    counted: jax.Array,
    indices: jax.Array,
    size: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    least = jnp.asarray(lowest(rows.dtype), rows.dtype)
    fixed = jnp.where(counted[:, None], lax.stop_gradient(rows), least)
    top = jnp.full((bags, rows.shape[1]), least).at[bag].max(fixed)
    position = jnp.arange(indices.shape[0])[:, None]
    first = jnp.where((fixed == top[bag]) & counted[:, None], position, indices.shape[0])
    first = jnp.full(top.shape, indices.shape[0]).at[bag].min(first)
    first = jnp.minimum(first, max(indices.shape[0] - 1, 0))
    out = jnp.take_along_axis(rows, first, 0) if indices.shape[0] else jnp.zeros_like(top)
    return jnp.where(size[:, None] > 0, out, 0), indices[first] if indices.shape[0] else first
