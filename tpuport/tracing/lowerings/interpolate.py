"""Resizing of images, one dim after another.

Each output is a weighted sum of a few inputs at places known while tracing.

torch's own decompositions gather once for each corner of a cell; here a dim is one gather, and
doubling by nearest neighbour is a broadcast. Antialiased filters follow `_upsample_bilinear2d_aa`
(ATen's UpSampleKernel.cpp), which is Pillow's resize.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.tracing.core.lowering_registry import lowering
from tpuport.tracing.lowerings._numeric import wide

aten = torch.ops.aten
_GATHERS = "decomposed into a gather for each corner of a cell"


@dataclass(frozen=True)
class _Taps:
    """The inputs [out, k] that each output along a dim reads, and their weights [out, k]."""

    index: np.ndarray
    weight: np.ndarray


def _ratio(size: int, out: int, align_corners: bool, scale: float | None) -> np.float32:
    """Return the input steps of an output step, in float32 as ATen computes it."""
    if align_corners:
        return np.float32((size - 1) / (out - 1)) if out > 1 else np.float32(0)
    if scale is not None and scale > 0:
        return np.float32(1.0 / scale)
    return np.float32(size) / np.float32(out)


def _source(size: int, out: int, align_corners: bool, scale: float | None) -> np.ndarray:
    """Return each output's place between the inputs (may be negative near the edge)."""
    ratio = _ratio(size, out, align_corners, scale)
    steps = np.arange(out, dtype=np.float32)
    return ratio * steps if align_corners else ratio * (steps + np.float32(0.5)) - np.float32(0.5)


def _linear_taps(size: int, out: int, align_corners: bool, scale: float | None) -> _Taps:
    source = np.maximum(_source(size, out, align_corners, scale), np.float32(0))
    low = np.minimum(source.astype(np.int32), size - 1)
    part = np.clip(source - low, 0, 1).astype(np.float32)
    index = np.stack([low, np.minimum(low + 1, size - 1)], 1)
    return _Taps(index, np.stack([1 - part, part], 1))


def _cubic(x: np.ndarray, a: float) -> np.ndarray:
    """Evaluate Keys' cubic kernel."""
    x = np.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0)).astype(np.float32)


def _cubic_taps(size: int, out: int, align_corners: bool, scale: float | None) -> _Taps:
    source = _source(size, out, align_corners, scale)
    low = np.floor(source)
    part = np.clip(source - low, 0, 1)
    offsets = np.arange(-1, 3, dtype=np.float32)
    index = np.clip(low[:, None].astype(np.int32) + offsets.astype(np.int32), 0, size - 1)
    return _Taps(index, _cubic(part[:, None] - offsets, -0.75))


def _filter_taps(kernel: Callable[[np.ndarray], np.ndarray], width: int) -> Callable[..., _Taps]:
    """Make the taps of antialiased resizing by a kernel of `width` inputs.

    When shrinking, the kernel is stretched over all inputs of an output.
    """

    def taps(size: int, out: int, align_corners: bool, scale: float | None) -> _Taps:
        ratio = _ratio(size, out, align_corners, scale)
        stretch = np.maximum(ratio, np.float32(1))
        support = np.float32(width / 2) * stretch
        centre = ratio * (np.arange(out, dtype=np.float32) + np.float32(0.5))
        first = np.maximum((centre - support + np.float32(0.5)).astype(np.int32), 0)
        last = np.minimum((centre + support + np.float32(0.5)).astype(np.int32), size)
        places = first[:, None] + np.arange(int((last - first).max(initial=1)))
        weight = kernel((places - centre[:, None] + np.float32(0.5)) / stretch)
        weight = np.where(places < last[:, None], weight, 0)
        total = weight.sum(1, keepdims=True)
        weight = (weight / np.where(total == 0, 1, total)).astype(np.float32)
        return _Taps(np.minimum(places, size - 1).astype(np.int32), weight)

    return taps


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


_linear_filter = _filter_taps(_triangle, 2)
_cubic_filter = _filter_taps(lambda x: _cubic(x, -0.5), 4)


def _resized(x: jax.Array, axis: int, taps: _Taps) -> jax.Array:
    """Compute weighted sums along one dim, in the dtype of `x`."""
    count = taps.index.shape[1]
    column = (slice(None),) + (None,) * (x.ndim - axis - 1)
    total = None
    for k in range(count):
        weight = taps.weight[:, k]
        if not weight.any():
            continue
        part = jnp.take(x, taps.index[:, k], axis, mode="clip") * weight[column]
        total = part if total is None else total + part
    return jnp.take(x, taps.index[:, 0], axis, mode="clip") if total is None else total


def _resized_bytes(x: jax.Array, axis: int, taps: _Taps) -> jax.Array:
    """Resize uint8 as ATen does: it rounds after each dim, with weights of 16 bits."""
    largest = float(taps.weight.max())
    precision = next((p for p in range(22) if int(0.5 + largest * (1 << (p + 1))) >= 1 << 15), 22)
    weight = np.trunc(taps.weight * (1 << precision) + np.where(taps.weight < 0, -0.5, 0.5)).astype(
        np.int32
    )
    column = (slice(None),) + (None,) * (x.ndim - axis - 1)
    total = jnp.int32(1 << (precision - 1))
    for k in range(taps.index.shape[1]):
        part = jnp.take(x, taps.index[:, k], axis, mode="clip").astype(jnp.int32)
        total = total + part * weight[:, k][column]
    return jnp.clip(total >> precision, 0, 255).astype(jnp.uint8)


def _resize(
    x: jax.Array,
    size: Sequence[int],
    align_corners: bool,
    scales: Sequence[float | None],
    taps: Callable[..., _Taps],
) -> jax.Array:
    """Resize the last dims of [N, C, ...] to `size`, last dim first, as ATen does."""
    rank = len(size)
    # ATen copies a dim that keeps its size, whatever the scale; the cubic kernel does not.
    always = taps is not _cubic_taps
    is_bytes = x.dtype == jnp.uint8
    y = x if is_bytes else wide(x)
    for dim in reversed(range(rank)):
        axis = x.ndim - rank + dim
        if x.shape[axis] == size[dim] and (always or align_corners or scales[dim] in (None, 1.0)):
            continue
        made = taps(x.shape[axis], size[dim], align_corners, scales[dim])
        y = _resized_bytes(y, axis, made) if is_bytes else _resized(y, axis, made)
    return y


@lowering(
    aten.upsample_linear1d.default,
    aten.upsample_bilinear2d.default,
    aten.upsample_trilinear3d.default,
    reason=_GATHERS,
)
def _upsample_linear(
    x: jax.Array, size: Sequence[int], align_corners: bool, *scales: float | None
) -> jax.Array:
    return _resize(x, size, align_corners, _all_scales(scales, size), _linear_taps)


@lowering(aten.upsample_bicubic2d.default, reason=_GATHERS)
def _upsample_bicubic(
    x: jax.Array, size: Sequence[int], align_corners: bool, *scales: float | None
) -> jax.Array:
    return _resize(x, size, align_corners, _all_scales(scales, size), _cubic_taps)


@lowering(
    aten._upsample_bilinear2d_aa.default, reason="torchax resizes with other weights near the edges"
)
def _upsample_bilinear_aa(
    x: jax.Array, size: Sequence[int], align_corners: bool, *scales: float | None
) -> jax.Array:
    return _resize(x, size, align_corners, _all_scales(scales, size), _linear_filter)


@lowering(
    aten._upsample_bicubic2d_aa.default, reason="torchax resizes with other weights near the edges"
)
def _upsample_bicubic_aa(
    x: jax.Array, size: Sequence[int], align_corners: bool, *scales: float | None
) -> jax.Array:
    return _resize(x, size, align_corners, _all_scales(scales, size), _cubic_filter)


def _all_scales(scales: Sequence[float | None], size: Sequence[int]) -> Sequence[float | None]:
    return (*scales, *[None] * (len(size) - len(scales)))


# -- nearest ---------------------------------------------------------------------------------------


def _nearest(
    x: jax.Array, size: Sequence[int], scales: Sequence[float | None], offset: float
) -> jax.Array:
    for dim, (out, scale) in enumerate(zip(size, scales, strict=True)):
        axis = x.ndim - len(size) + dim
        if not offset and len(size) == 2 and out in (x.shape[axis], 2 * x.shape[axis]):
            scale = None  # of images ATen copies or doubles such a dim, whatever the scale
        ratio = _ratio(x.shape[axis], out, False, scale)
        steps = np.arange(out, dtype=np.float32) + np.float32(offset)
        index = np.minimum((steps * ratio).astype(np.int32), x.shape[axis] - 1)
        x = _taken(x, axis, index)
    return x


def _taken(x: jax.Array, axis: int, index: np.ndarray) -> jax.Array:
    """Take `x` at `index` along a dim.

    Enlargement by an integer is a broadcast, anything else a gather.
    """
    size, out = x.shape[axis], len(index)
    if out % size == 0 and np.array_equal(index, np.arange(out) // (out // size)):
        return jnp.repeat(x, out // size, axis) if out != size else x
    return jnp.take(x, index, axis, mode="clip")


@lowering(
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten.upsample_nearest3d.default,
    reason=_GATHERS,
)
def _upsample_nearest(x: jax.Array, size: Sequence[int], *scales: float | None) -> jax.Array:
    return _nearest(x, size, _all_scales(scales, size), 0.0)


@lowering(
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
    aten._upsample_nearest_exact3d.default,
    reason=_GATHERS,
)
def _upsample_nearest_exact(x: jax.Array, size: Sequence[int], *scales: float | None) -> jax.Array:
    return _nearest(x, size, _all_scales(scales, size), 0.5)
