"""Pooling over 1 to 3 spatial dims.

Maxima with indices, averages, adaptive and fractional windows, unpooling.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpuport.tracing.core.lowering_registry import lowering
from tpuport.tracing.lowerings._numeric import is_float, lowest, value_and_gradient, wide

aten = torch.ops.aten


def _spread(value: Any, count: int) -> tuple[int, ...]:
    """Expand a size, stride or padding given as one number or as one a dim."""
    values = [value] if isinstance(value, int) else list(value)
    return tuple(values * count if len(values) == 1 else values)


def _output_size(
    size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool
) -> int:
    """Return the number of windows along a dim.

    With ceil_mode a last window that starts inside the input or its left padding counts.
    """
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (span + stride - 1 if ceil_mode else span) // stride + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1
    return count


class _Windows:
    """The positions of the windows of a pooling.

    `padding` is (low, high) for each dim, where high is as much as the last window needs.
    """

    def __init__(
        self, x: jax.Array, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
    ) -> None:
        rank = len(kernel) if not isinstance(kernel, int) else x.ndim - 2
        self.rank = rank
        self.kernel = _spread(kernel, rank)
        self.stride = _spread(stride, rank) if stride or stride == 0 else self.kernel
        self.dilation = _spread(dilation, rank)
        self.low = _spread(padding, rank)
        self.sizes = x.shape[-rank:]
        self.out = tuple(
            _output_size(n, k, s, p, d, ceil_mode)
            for n, k, s, p, d in zip(
                self.sizes, self.kernel, self.stride, self.low, self.dilation, strict=True
            )
        )
        self.padding = tuple(
            (p, max((o - 1) * s + d * (k - 1) + 1 - n - p, 0))
            for n, k, s, p, d, o in zip(
                self.sizes, self.kernel, self.stride, self.low, self.dilation, self.out, strict=True
            )
        )

    def reduce(self, x: jax.Array, init: Any, operation: Any) -> jax.Array:
        """Apply lax.reduce_window over the last `rank` dims.

        jax knows its gradient only if `init` is a numpy value.
        """
        lead = x.ndim - self.rank
        return lax.reduce_window(
            x,
            init,
            operation,
            (1,) * lead + self.kernel,
            (1,) * lead + self.stride,
            ((0, 0),) * lead + self.padding,
            window_dilation=(1,) * lead + self.dilation,
        )


# -- maxima ----------------------------------------------------------------------------------------


@lowering(
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    reason=(
        "torchax has no gradient for dilated windows, drops nan, and gives the last of equal maxima"
    ),
)
def _max_pool_with_indices(
    x: jax.Array,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the maxima of windows and their flat positions in the input's spatial dims.

    The position is that of the first maximum, or of the last nan.
    """
    windows = _Windows(x, kernel_size, stride, padding, dilation, ceil_mode)
    index = _first_maximum(lax.stop_gradient(x), windows)
    if all(d == 1 for d in windows.dilation) and is_float(x):
        value = windows.reduce(x, np.asarray(lowest(x.dtype), x.dtype), lax.max)
    else:
        # XLA cannot differentiate dilated windows: read the maxima by their positions.
        lead = x.shape[: x.ndim - windows.rank]
        flat = x.reshape(*lead, math.prod(windows.sizes))
        value = jnp.take_along_axis(flat, index.reshape(*lead, -1), -1, mode="clip").reshape(
            index.shape
        )
    return value, index


def _first_maximum(x: jax.Array, windows: _Windows) -> jax.Array:
    """Return the flat spatial position of each window's maximum, by reducing (value, position)."""
    lead = x.ndim - windows.rank
    where = jnp.arange(math.prod(windows.sizes), dtype=jnp.int32).reshape(windows.sizes)
    where = jnp.broadcast_to(where, x.shape)

    def first(a: Any, b: Any) -> Any:
        (av, ai), (bv, bi) = a, b
        beats = (bv > av) | ((bv == av) & (bi < ai))
        if is_float(x):
            beats = jnp.where(bv != bv, (av == av) | (bi > ai), beats & (av == av))
        return jnp.where(beats, bv, av), jnp.where(beats, bi, ai)

    least = np.asarray(lowest(x.dtype), x.dtype)
    beyond = np.int32(np.iinfo(np.int32).max)
    return lax.reduce_window(
        (x, where),
        (least, beyond),
        lambda a, b: first(a, b),
        (1,) * lead + windows.kernel,
        (1,) * lead + windows.stride,
        ((0, 0),) * lead + windows.padding,
        window_dilation=(1,) * lead + windows.dilation,
    )[1]


@lowering(
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    reason="torchax approximates it",
)
def _max_pool_backward(
    grad: jax.Array,
    x: jax.Array,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: jax.Array,
) -> jax.Array:
    lead = x.shape[: x.ndim - len(kernel_size)]
    rows = jnp.arange(math.prod(lead))[:, None]
    out = jnp.zeros((math.prod(lead), math.prod(x.shape[len(lead) :])), grad.dtype)
    out = out.at[rows, indices.reshape(rows.shape[0], -1)].add(grad.reshape(rows.shape[0], -1))
    return out.reshape(x.shape)


@lowering(
    aten.max_unpool2d.default,
    aten.max_unpool3d.default,
    reason="torchax loops over elements in Python",
)
def _max_unpool(
    x: jax.Array,
    indices: jax.Array,
    output_size: Sequence[int],
    stride: Any = None,
    padding: Any = None,
) -> jax.Array:
    rank = len(output_size)
    lead = x.shape[: x.ndim - rank]
    flat, where = x.reshape(math.prod(lead), -1), indices.reshape(math.prod(lead), -1)
    place = jnp.zeros((flat.shape[0], math.prod(output_size)), x.dtype)
    place = place.at[jnp.arange(flat.shape[0])[:, None], where]
    # One of several inputs for the same place wins, but torch gives all of them the gradient.
    out = value_and_gradient(place.set(lax.stop_gradient(flat)), place.add(flat))
    return out.reshape(*lead, *output_size)


# -- averages --------------------------------------------------------------------------------------


@lowering(
    aten.avg_pool2d.default,
    aten.avg_pool3d.default,
    reason="torchax adds bfloat16 in bfloat16, and builds the divisor element by element in Python",
)
def _avg_pool(
    x: jax.Array,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> jax.Array:
    windows = _Windows(x, kernel_size, stride, padding, 1, ceil_mode)
    wider = wide(x) if is_float(x) else x
    total = windows.reduce(wider, np.zeros((), wider.dtype), lax.add)
    if divisor_override is not None:
        divisor = np.asarray(divisor_override)
    else:
        divisor = _window_sizes(windows, count_include_pad)
    divisor = jnp.asarray(divisor, total.dtype)
    return (
        total / divisor
        if is_float(total)
        else lax.div(total, jnp.broadcast_to(divisor, total.shape))
    )


def _window_sizes(windows: _Windows, count_include_pad: bool) -> np.ndarray:
    """Count the places of each window that are inside the padded input, or inside the input."""
    sizes = np.ones((1,) * windows.rank, np.int64)
    for dim in range(windows.rank):
        pad = windows.low[dim]
        start = np.arange(windows.out[dim]) * windows.stride[dim] - pad
        end = np.minimum(start + windows.kernel[dim], windows.sizes[dim] + pad)
        if not count_include_pad:
            start, end = np.maximum(start, 0), np.minimum(end, windows.sizes[dim])
        sizes = sizes * np.expand_dims(
            end - start, tuple(d for d in range(windows.rank) if d != dim)
        )
    return sizes


def _adaptive_edges(size: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    steps = np.arange(out)
    return steps * size // out, -(-(steps + 1) * size // out)


@lowering(
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
    reason=(
        "torchax averages bfloat16 in bfloat16, and fails for windows of several lengths without"
        " a batch"
    ),
)
def _adaptive_avg_pool(x: jax.Array, output_size: Sequence[int]) -> jax.Array:
    """Average windows [i * n // o, ceil((i + 1) * n / o)) along the last dims, one by one."""
    y = wide(x)
    rank = len(output_size)
    for offset, out in enumerate(output_size):
        axis = x.ndim - rank + offset
        y = _adaptive_along(y, axis, out)
    return y


def _adaptive_along(y: jax.Array, axis: int, out: int) -> jax.Array:
    size = y.shape[axis]
    if out and size % out == 0:
        split = (*y.shape[:axis], out, size // out, *y.shape[axis + 1 :])
        return jnp.mean(y.reshape(split), axis + 1)
    starts, ends = _adaptive_edges(size, out)
    longest = int((ends - starts).max(initial=1))
    index = np.minimum(starts[:, None] + np.arange(longest), size - 1)
    inside = np.arange(longest) < (ends - starts)[:, None]
    taken = jnp.take(y, index.reshape(-1), axis, mode="clip")
    taken = taken.reshape(*y.shape[:axis], out, longest, *y.shape[axis + 1 :])
    column = (slice(None), slice(None)) + (None,) * (y.ndim - axis - 1)
    total = jnp.sum(jnp.where(inside[column], taken, 0), axis + 1)
    return (
        total / (ends - starts).astype(np.float32)[(slice(None),) + (None,) * (y.ndim - axis - 1)]
    )


# -- maxima over windows of several sizes ----------------------------------------------------------


@lowering(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def _adaptive_max_pool(x: jax.Array, output_size: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    rank = len(output_size)
    edges = [_adaptive_edges(n, o) for n, o in zip(x.shape[-rank:], output_size, strict=True)]
    return _window_maxima(x, [(starts, ends - starts) for starts, ends in edges])


def _window_maxima(x: jax.Array, windows: list[tuple[Any, Any]]) -> tuple[jax.Array, jax.Array]:
    """Return the first maxima of windows and their flat positions.

    The windows are given by (starts, lengths) along each of the last dims.

    `starts` is [out], or [N, C, out] where windows differ by channel (then all lengths are equal).
    """
    rank = len(windows)
    lead, sizes = x.shape[:-rank], x.shape[-rank:]
    flat_position = jnp.zeros((), jnp.int32)
    inside = np.ones((), bool)
    for axis, (starts, lengths) in enumerate(windows):
        lengths = np.asarray(lengths)
        longest = int(lengths.max(initial=1))
        index = jnp.minimum(jnp.asarray(starts)[..., None] + jnp.arange(longest), sizes[axis] - 1)
        before, after = axis, rank - axis - 1
        # [..., out_0, ..., out_r, window_0, ..., window_r]
        shape = (*index.shape[:-2],) + (1,) * before + (index.shape[-2],) + (1,) * after
        shape += (1,) * before + (longest,) + (1,) * after
        flat_position = flat_position * sizes[axis] + index.reshape(shape)
        kept = np.broadcast_to(
            np.arange(longest) < lengths.reshape(-1, 1), (index.shape[-2], longest)
        )
        inside = inside & kept.reshape(shape[len(shape) - 2 * rank :])
    outs, place = flat_position.shape[-2 * rank : -rank], math.prod(flat_position.shape[-rank:])
    position = jnp.broadcast_to(flat_position, (*lead, *flat_position.shape[-2 * rank :]))
    flat = x.reshape(*lead, math.prod(sizes))
    values = jnp.take_along_axis(flat, position.reshape(*lead, -1), -1, mode="clip")
    values = jnp.where(
        inside, values.reshape(position.shape), jnp.asarray(lowest(x.dtype), x.dtype)
    )
    values, position = values.reshape(*lead, *outs, place), position.reshape(*lead, *outs, place)
    best = jnp.argmax(values, -1, keepdims=True)
    if is_float(values):
        # torch picks the last of several nan, argmax the first.
        nans = jnp.isnan(values)
        last = place - 1 - jnp.argmax(nans[..., ::-1], -1, keepdims=True)
        best = jnp.where(jnp.any(nans, -1, keepdims=True), last, best)
    picked = [jnp.take_along_axis(a, best, -1, mode="clip")[..., 0] for a in (values, position)]
    return picked[0], picked[1]


@lowering(aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default)
def _fractional_max_pool(
    x: jax.Array, kernel_size: Sequence[int], output_size: Sequence[int], samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Take maxima of equal windows, whose starts `samples` [N, C, dims] in [0, 1) decide."""
    rank = len(output_size)
    batched = x.reshape((1,) * (rank + 2 - x.ndim) + x.shape)
    windows = []
    for dim in range(rank):
        # The samples are stored last dim first for 2-d windows and first dim first for 3-d ones.
        sample = samples[: batched.shape[0], :, rank - 1 - dim if rank == 2 else dim]
        size, kernel, out = batched.shape[2 + dim], kernel_size[dim], output_size[dim]
        windows.append((_fractional_starts(sample, size, kernel, out), np.full(out, kernel)))
    value, index = _window_maxima(batched, windows)
    shape = (*x.shape[: x.ndim - rank], *output_size)
    return value.reshape(shape), index.reshape(shape)


def _fractional_starts(sample: jax.Array, size: int, kernel: int, out: int) -> jax.Array:
    last = jnp.full((*sample.shape, 1), size - kernel, jnp.int32)
    if out == 1:
        return last
    alpha = (size - kernel) / (out - 1)
    steps = jnp.arange(out - 1, dtype=jnp.float32)
    drawn = sample[..., None].astype(jnp.float32)
    starts = jnp.floor((steps + drawn) * alpha) - jnp.floor(drawn * alpha)
    return jnp.concatenate([starts.astype(jnp.int32), last], -1)
