"""Sampling of images at places given by a grid (`grid_sample`) in 2 and 3 dims."""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from tpuport.tracing.core.lowering_registry import lowering
from tpuport.tracing.lowerings._numeric import wide

aten = torch.ops.aten
_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


@lowering(
    aten.grid_sampler_2d.default,
    aten.grid_sampler_3d.default,
    reason="torch's decomposition places bfloat16 grids in bfloat16 and knows no 3-d images",
)
def _grid_sampler(
    image: jax.Array, grid: jax.Array, interpolation: int, padding: int, align_corners: bool
) -> jax.Array:
    """Sample `image` [N, C, (D,) H, W] at `grid` [N, ..., 2 or 3] of (x, y(, z)) in [-1, 1].

    Returns:
        [N, C, ...]; outside the image zeros, the border or the mirrored image, by `padding` (0, 1,
        2).
    """
    values, places = wide(image), wide(grid)
    sizes = image.shape[:1:-1]
    coordinates = [_unnormalized(places[..., d], n, align_corners) for d, n in enumerate(sizes)]
    if interpolation == _BICUBIC:
        return _bicubic(values, coordinates, sizes, padding, align_corners)
    coordinates = [
        _padded(c, n, padding, align_corners) for c, n in zip(coordinates, sizes, strict=True)
    ]
    if interpolation == _NEAREST:
        return _read(values, [jnp.round(c) for c in coordinates], sizes)
    total = jnp.zeros((), values.dtype)
    low = [jnp.floor(c) for c in coordinates]
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        weight = jnp.ones((), values.dtype)
        for c, f, up in zip(coordinates, low, corner, strict=True):
            weight = weight * (c - f if up else f + 1 - c)
        at = [f + up for f, up in zip(low, corner, strict=True)]
        total = total + _read(values, at, sizes) * weight[:, None]
    return total


def _unnormalized(x: jax.Array, size: int, align_corners: bool) -> jax.Array:
    return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2


def _padded(x: jax.Array, size: int, padding: int, align_corners: bool) -> jax.Array:
    if padding == _REFLECTION:
        low, high = (0, 2 * (size - 1)) if align_corners else (-1, 2 * size - 1)
        x = _reflected(x, low, high)
    if padding != _ZEROS:
        # torch's clamp has zero gradient outside and at a bound.
        x = jnp.where(x > 0, jnp.where(x < size - 1, x, float(size - 1)), 0.0)
    return x


def _reflected(x: jax.Array, twice_low: int, twice_high: int) -> jax.Array:
    """Mirror at low and high (given doubled, so that they are integers) until inside."""
    if twice_low == twice_high:
        return jnp.zeros_like(x)
    low, span = twice_low / 2, (twice_high - twice_low) / 2
    distance = jnp.abs(x - low)
    extra = jnp.fmod(distance, span)
    flips = jnp.floor(distance / span)
    return jnp.where(flips % 2 == 0, extra + low, span - extra + low)


def _read(image: jax.Array, at: Sequence[jax.Array], sizes: Sequence[int]) -> jax.Array:
    """Return [N, C, ...] read at integer (x, y(, z)) places, zero outside."""
    inside = jnp.ones(at[0].shape, bool)
    flat = jnp.zeros(at[0].shape, jnp.int32)
    for place, size in reversed(list(zip(at, sizes, strict=True))):
        inside = inside & (place >= 0) & (place <= size - 1)
        flat = flat * size + jnp.clip(place, 0, size - 1).astype(jnp.int32)
    batch, channels = image.shape[:2]
    pixels = image.reshape(batch, channels, -1)
    read = jnp.take_along_axis(pixels, flat.reshape(batch, 1, -1), 2, mode="clip")
    read = read.reshape(batch, channels, *flat.shape[1:])
    return jnp.where(inside[:, None], read, 0)


def _bicubic(
    image: jax.Array,
    coordinates: Sequence[jax.Array],
    sizes: Sequence[int],
    padding: int,
    align_corners: bool,
) -> jax.Array:
    (x, y), (width, height) = coordinates, sizes
    left, top = jnp.floor(x), jnp.floor(y)
    total = jnp.zeros((), image.dtype)
    for j in range(-1, 3):
        row = jnp.zeros((), image.dtype)
        for i in range(-1, 3):
            at = [
                _padded(left + i, width, padding, align_corners),
                _padded(top + j, height, padding, align_corners),
            ]
            row = row + _read(image, at, sizes) * _cubic(x - left - i)[:, None]
        total = total + row * _cubic(y - top - j)[:, None]
    return total


def _cubic(x: jax.Array) -> jax.Array:
    """Evaluate Keys' kernel with a = -0.75, torch's choice."""
    a = -0.75
    x = jnp.abs(x)
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return jnp.where(x <= 1, near, far)
