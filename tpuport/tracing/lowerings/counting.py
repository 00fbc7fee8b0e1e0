"""Histograms, repetitions and segments: results whose sizes are given, over places that are not."""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpuport.tracing.core.concretize import raise_if
from tpuport.tracing.core.context import current
from tpuport.tracing.core.cumulative import cumulative
from tpuport.tracing.core.errors import port_error
from tpuport.tracing.core.lowering_registry import lowering, special
from tpuport.tracing.core.values import value_of, wrap_as
from tpuport.tracing.lowerings._numeric import wide

aten = torch.ops.aten


# -- histograms ------------------------------------------------------------------------------------


def _edges(x: jax.Array, bins: list[int], limits: Any) -> list[jax.Array]:
    """Return the edges of equal bins of each column of `x` [N, D], over the data or the limits."""
    found = []
    for column, count in enumerate(bins):
        if limits:
            low, high = (jnp.asarray(v, x.dtype) for v in limits[2 * column : 2 * column + 2])
        elif x.shape[0]:
            low, high = jnp.min(x[:, column]), jnp.max(x[:, column])
        else:
            low, high = jnp.zeros((), x.dtype), jnp.ones((), x.dtype)
        flat = low == high
        low, high = jnp.where(flat, low - 0.5, low), jnp.where(flat, high + 0.5, high)
        found.append(jnp.linspace(low, high, count + 1, dtype=x.dtype))
    return found


def _counts(
    x: jax.Array, edges: list[jax.Array], weight: jax.Array | None, density: bool
) -> jax.Array:
    """Count the rows of `x` [N, D] in bins; the last bin of each column holds its upper edge."""
    sizes = tuple(edge.shape[0] - 1 for edge in edges)
    inside = jnp.ones(x.shape[0], jnp.bool_)
    places = []
    for column, edge in enumerate(edges):
        values = x[:, column]
        inside &= (values >= edge[0]) & (values <= edge[-1])
        place = jnp.searchsorted(edge, values, side="right") - 1
        places.append(jnp.clip(place, 0, sizes[column] - 1))
    given = jnp.ones(x.shape[0], x.dtype) if weight is None else weight.reshape(-1)
    counts = jnp.zeros(sizes, x.dtype).at[tuple(places)].add(jnp.where(inside, given, 0))
    if density:
        counts = counts / jnp.sum(counts)
        for column, edge in enumerate(edges):
            shape = [-1 if d == column else 1 for d in range(len(edges))]
            counts = counts / jnp.diff(edge).reshape(shape)
    return counts


def _result(value: jax.Array, like: torch.Tensor) -> torch.Tensor:
    """Wrap counts, of which no meta kernel knows the shape."""
    meta = torch.empty(value.shape, dtype=like.dtype, device="meta")
    return wrap_as(None, value, meta, current())


def _rows(x: torch.Tensor, columns: int) -> jax.Array:
    return lax.stop_gradient(value_of(x)).reshape(-1, columns)


def _value(x: torch.Tensor | None) -> jax.Array | None:
    return None if x is None else lax.stop_gradient(value_of(x))


@special(aten.histogram.bin_ct)
def histogram(
    x: torch.Tensor,
    bins: int = 100,
    *,
    range: Any = None,
    weight: torch.Tensor | None = None,
    density: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the elements in equal bins; return the counts and the edges."""
    rows = _rows(x, 1)
    edges = _edges(rows, [bins], range)
    return _result(_counts(rows, edges, _value(weight), density), x), _result(edges[0], x)


@special(aten.histogram.bins_tensor)
def histogram_of_bins(
    x: torch.Tensor,
    bins: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    density: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the elements between the edges given."""
    edges = lax.stop_gradient(value_of(bins))
    return _result(_counts(_rows(x, 1), [edges], _value(weight), density), x), _result(edges, x)


@special(aten._histogramdd_bin_edges.default)
def histogramdd_bin_edges(
    x: torch.Tensor,
    bins: list[int],
    *,
    range: Any = None,
    weight: torch.Tensor | None = None,
    density: bool = False,
) -> list[torch.Tensor]:
    """Return the edges of equal bins of each of the last dim's columns."""
    del weight, density
    return [_result(edge, x) for edge in _edges(_rows(x, x.shape[-1]), list(bins), range)]


@special(aten._histogramdd_from_bin_cts.default)
def histogramdd(
    x: torch.Tensor,
    bins: list[int],
    *,
    range: Any = None,
    weight: torch.Tensor | None = None,
    density: bool = False,
) -> torch.Tensor:
    """Count vectors in equal boxes."""
    rows = _rows(x, x.shape[-1])
    return _result(_counts(rows, _edges(rows, list(bins), range), _value(weight), density), x)


@special(aten._histogramdd_from_bin_tensors.default)
def histogramdd_of_bins(
    x: torch.Tensor,
    bins: list[torch.Tensor],
    *,
    weight: torch.Tensor | None = None,
    density: bool = False,
) -> torch.Tensor:
    """Count vectors in the boxes between the edges given."""
    edges = [lax.stop_gradient(value_of(edge)) for edge in bins]
    return _result(_counts(_rows(x, x.shape[-1]), edges, _value(weight), density), x)


# -- places ----------------------------------------------------------------------------------------


@special(aten.repeat_interleave.Tensor)
def repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    """Return each position as often as `repeats` says.

    Raises:
        PortError: nobody says how many that are.
    """
    if output_size is None:
        raise port_error(
            "the size of the result of repeat_interleave depends on data",
            code="TPU203",
            remedy="pass output_size=, the sum of the repeats",
        )
    ends = cumulative(jnp.cumsum, value_of(repeats), 0)
    error = RuntimeError("allocated size does not match required size")
    raise_if(jnp.not_equal(jnp.sum(value_of(repeats)), output_size), error)
    places = jnp.searchsorted(ends, jnp.arange(output_size), side="right")
    meta = torch.empty(output_size, dtype=repeats.dtype, device="meta")
    return wrap_as(None, places, meta, current())


@lowering(aten.nonzero_static.default)
def _nonzero_static(x: jax.Array, *, size: int, fill_value: int = -1) -> jax.Array:
    """Return the coordinates of the first `size` elements that are not zero, then the filling."""
    if not x.ndim:
        return jnp.zeros((size, 0), jnp.int32)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), 1)


# -- segments --------------------------------------------------------------------------------------


@lowering(aten.segment_reduce.default)
def _segment_reduce(
    data: jax.Array,
    reduce: str,
    *,
    lengths: jax.Array | None = None,
    indices: jax.Array | None = None,
    offsets: jax.Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: Any = None,
) -> jax.Array:
    """Reduce the segments of `data` [..., N, ...] along a dim, which follow one another.

    Either `lengths` [..., S] or `offsets` [..., S + 1] say where they are.
    """
    del indices, unsafe
    axis %= data.ndim
    if offsets is None:
        assert lengths is not None
        starts = jnp.pad(lengths, [(0, 0)] * axis + [(1, 0)])
        offsets = cumulative(jnp.cumsum, starts, -1)
    places = jnp.arange(data.shape[axis])
    inside = (places >= offsets[..., :-1, None]) & (places < offsets[..., 1:, None])
    inside = inside.reshape(inside.shape + (1,) * (data.ndim - axis - 1))
    rows, along = jnp.expand_dims(wide(data), axis), axis + 1
    if reduce in ("max", "min"):
        start = (-jnp.inf if reduce == "max" else jnp.inf) if initial is None else initial
        function = jnp.max if reduce == "max" else jnp.min
        return function(jnp.where(inside, rows, start), along, initial=start)
    if reduce == "prod":
        return jnp.prod(jnp.where(inside, rows, 1), along) * (1 if initial is None else initial)
    total = jnp.sum(jnp.where(inside, rows, 0), along) + (0 if initial is None else initial)
    if reduce == "sum":
        return total
    count = jnp.sum(inside, along)
    mean = total / jnp.maximum(count, 1)
    return jnp.where(count > 0, mean, jnp.nan if initial is None else initial)
