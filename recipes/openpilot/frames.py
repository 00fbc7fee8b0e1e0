"""Warping of camera frames to model images on the accelerator, and packing into six planes.

There is no RGB and no normalisation: models take the bytes of Y, U and V.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from recipes.openpilot.constants import FRAME_SHAPE, MODEL_HEIGHT, MODEL_WIDTH
from recipes.openpilot.geometry import Sampling, chroma_matrix
from tpuport.foundation.errors import UsageError

Bytes = NDArray[np.uint8]
_SUB_PIXELS = 32  # fractions of a pixel in the device's kernel
_WEIGHT_BITS = 15
_FAR = 2.0**24  # an integer in float32 and int32


def prepare_frames(
    frames: ArrayLike,
    matrices: ArrayLike,
    size: tuple[int, int],
    *,
    sampling: Sampling = "bilinear",
) -> jax.Array:
    """Warp and pack camera frames, each with its own matrix.

    One program is compiled for each number of frames and camera size.

    Args:
        frames: uint8 (N, height * width * 3 / 2), each Y, then U, then V (yuv420p).
        matrices: (N, 3, 3), from pixels of the model to pixels of the camera
            (`geometry.warp_matrix`).
        size: Width and height of the camera.
        sampling: "bilinear" as on devices up to 2025, or "nearest" as since 2026.

    Returns:
        uint8 (N, 6, 128, 256).

    Raises:
        UsageError: Shapes or dtypes do not fit, or there is no such sampling.
    """
    width, height = size
    chroma = chroma_matrix(matrices, sampling)
    if width % 2 or height % 2 or min(size) < 2:
        raise UsageError(f"size: expected even width and height, got {width}x{height}")
    if not isinstance(frames, jax.Array):
        frames = np.asarray(frames)
    expected = (len(chroma), height * width * 3 // 2)
    if frames.dtype != np.uint8 or frames.shape != expected:
        raise UsageError(
            f"frames: expected uint8 {expected} for {width}x{height} and as many as matrices, got"
            f" {frames.dtype} {frames.shape}"
        )
    luma = np.asarray(matrices, np.float32)
    return prepare_traced(frames, luma, chroma.astype(np.float32), size=size, sampling=sampling)


@partial(jax.jit, static_argnames=("size", "sampling"))
def prepare_traced(
    frames: jax.Array,
    luma: jax.Array,
    chroma: jax.Array,
    *,
    size: tuple[int, int],
    sampling: Sampling,
) -> jax.Array:
    """Compute `prepare_frames` as a jitted program, without checks. See `warp` for arguments."""

    def one(frame: jax.Array, for_luma: jax.Array, for_chroma: jax.Array) -> jax.Array:
        return pack(*warp(frame, for_luma, for_chroma, size=size, sampling=sampling))

    return jax.vmap(one)(frames, luma, chroma)


def warp(
    frame: jax.Array,
    luma: jax.Array,
    chroma: jax.Array,
    *,
    size: tuple[int, int],
    sampling: Sampling,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Warp the planes of a camera frame to those of a model's image.

    Args:
        frame: uint8 (height * width * 3 / 2,).
        luma: float32 (3, 3), from pixels of the model to pixels of the camera.
        chroma: float32 (3, 3), the same for the planes of half the size.
        size: Width and height of the camera.
        sampling: "bilinear" or "nearest".

    Returns:
        Y (256, 512), U and V (128, 256), uint8.
    """
    width, height = size
    sample = _bilinear if sampling == "bilinear" else _nearest
    area = width * height
    half, model_half = (width // 2, height // 2), (MODEL_WIDTH // 2, MODEL_HEIGHT // 2)
    return (
        sample(frame[:area], luma, size, (MODEL_WIDTH, MODEL_HEIGHT)),
        sample(frame[area : area + area // 4], chroma, half, model_half),
        sample(frame[area + area // 4 :], chroma, half, model_half),
    )


def pack(y: jax.Array, u: jax.Array, v: jax.Array) -> jax.Array:
    """Pack Y, U and V into six planes of one size: Y's four parities, U, V.

    The parities of the rows and columns of Y are: even and even, odd and even, even and odd, odd
    and odd, as in openpilot's loadyuv.cl and compile_modeld.py. models/README.md has the second and
    the third swapped.

    Args:
        y: (2 n, 2 m).
        u: (n, m).
        v: (n, m).

    Returns:
        (6, n, m).
    """
    rows, columns = u.shape
    parities = y.reshape(rows, 2, columns, 2).transpose(3, 1, 0, 2).reshape(4, rows, columns)
    return jnp.concatenate([parities, u[None], v[None]])


def unpack(planes: Bytes) -> tuple[Bytes, Bytes, Bytes]:
    """Return Y, U and V of six planes (..., 6, n, m), for viewing."""
    *batch, _, rows, columns = planes.shape
    parities = planes[..., :4, :, :].reshape(*batch, 2, 2, rows, columns)
    y = np.moveaxis(parities, (-4, -3), (-1, -3)).reshape(*batch, 2 * rows, 2 * columns)
    return y, planes[..., 4, :, :], planes[..., 5, :, :]


def _places(matrix: jax.Array, model: tuple[int, int]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return homogeneous camera pixels of a model's pixels, computed in the device's order."""
    x = jnp.arange(model[0], dtype=jnp.float32)[None, :]
    y = jnp.arange(model[1], dtype=jnp.float32)[:, None]
    first, second, third = (row[0] * x + row[1] * y + row[2] for row in matrix)
    return first, second, third


def _bilinear(
    plane: jax.Array, matrix: jax.Array, size: tuple[int, int], model: tuple[int, int]
) -> jax.Array:
    """Sample as openpilot's transforms/transform.cl, with 15-bit weights at 1/32 of a pixel."""
    width, height = size
    x, y, scale = _places(matrix, model)
    scale = jnp.where(scale != 0, _SUB_PIXELS / jnp.where(scale != 0, scale, 1), 0)
    x, y = (jnp.round(jnp.clip(c * scale, -_FAR, _FAR)).astype(jnp.int32) for c in (x, y))
    columns = [jnp.clip((x >> 5) + one, 0, width - 1) for one in (0, 1)]
    rows = [jnp.clip((y >> 5) + one, 0, height - 1) * width for one in (0, 1)]
    right, below = x & (_SUB_PIXELS - 1), y & (_SUB_PIXELS - 1)
    # The product of two weights in 1/32 is exact in 15 bits.
    per_step = (1 << _WEIGHT_BITS) // _SUB_PIXELS**2
    total = jnp.int32(1 << (_WEIGHT_BITS - 1))
    for row, vertical in zip(rows, (_SUB_PIXELS - below, below), strict=True):
        for column, horizontal in zip(columns, (_SUB_PIXELS - right, right), strict=True):
            value = plane[row + column].astype(jnp.int32)
            total = total + value * (vertical * horizontal * per_step)
    return (total >> _WEIGHT_BITS).astype(jnp.uint8)


def _nearest(
    plane: jax.Array, matrix: jax.Array, size: tuple[int, int], model: tuple[int, int]
) -> jax.Array:
    """Sample as openpilot's compile_modeld.py."""
    width, height = size
    x, y, scale = _places(matrix, model)
    column, row = (
        jnp.clip(jnp.round(c / scale), 0, last - 1).astype(jnp.int32)
        for c, last in ((x, width), (y, height))
    )
    return plane[row * width + column]


def check_packed(name: str, frames: NDArray[np.generic]) -> None:
    """Raise an error for anything but packed frames (T, 6, 128, 256).

    Raises:
        UsageError: The dtype or shape differs.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[1:] != FRAME_SHAPE:
        raise UsageError(
            f"{name}: expected uint8 (T, {', '.join(map(str, FRAME_SHAPE))}), got {frames.dtype}"
            f" {frames.shape}"
        )
