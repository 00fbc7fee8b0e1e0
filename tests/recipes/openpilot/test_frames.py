"""Warping and packing, against loops that follow openpilot's kernels by the letter."""

import math

import numpy as np
import pytest

from recipes.openpilot import constants, frames, geometry
from tpuport.foundation.errors import UsageError

F = np.float32
SIZE = (64, 48)  # width, height of a small camera


def planes_of(frame: np.ndarray, size: tuple[int, int]) -> list[np.ndarray]:
    """Y, U, V of a flat frame."""
    width, height = size
    y, u, v = np.split(frame, [width * height, width * height * 5 // 4])
    return [y.reshape(height, width), *(p.reshape(height // 2, width // 2) for p in (u, v))]


def kernel_bilinear(plane: np.ndarray, matrix: np.ndarray, x: np.ndarray, y: np.ndarray):
    """Pixels as warpPerspective of transform.cl computes them, in float32 and whole numbers."""
    m = matrix.astype(F).reshape(9)
    x0 = m[0] * x + m[1] * y + m[2]
    y0 = m[3] * x + m[4] * y + m[5]
    w = m[6] * x + m[7] * y + m[8]
    w = F(32) / w
    x_fixed, y_fixed = np.rint(x0 * w).astype(int), np.rint(y0 * w).astype(int)
    row, column = y_fixed >> 5, x_fixed >> 5
    right, below = (x_fixed & 31) / 32, (y_fixed & 31) / 32
    weights = [(1 - below) * (1 - right), (1 - below) * right, below * (1 - right), below * right]
    total = 0
    for weight, (i, j) in zip(weights, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True):
        rows = np.clip(row + i, 0, plane.shape[0] - 1)
        columns = np.clip(column + j, 0, plane.shape[1] - 1)
        short = np.minimum(np.rint(weight * 32768), 32767).astype(int)
        total = total + plane[rows, columns].astype(int) * short
    return (total + (1 << 14)) >> 15


def kernel_nearest(plane: np.ndarray, matrix: np.ndarray, x: np.ndarray, y: np.ndarray):
    """Pixels as compile_modeld.py computes them."""
    m = matrix.astype(F)
    w = m[2, 0] * x + m[2, 1] * y + m[2, 2]
    column = np.rint((m[0, 0] * x + m[0, 1] * y + m[0, 2]) / w)
    row = np.rint((m[1, 0] * x + m[1, 1] * y + m[1, 2]) / w)
    rows = np.clip(row, 0, plane.shape[0] - 1).astype(int)
    return plane[rows, np.clip(column, 0, plane.shape[1] - 1).astype(int)]


def by_hand(frame: np.ndarray, matrix: np.ndarray, size: tuple[int, int], sampling: str):
    """Six planes, each pixel put where loadyuv.cl puts it."""
    kernel = {"bilinear": kernel_bilinear, "nearest": kernel_nearest}[sampling]
    chroma = geometry.chroma_matrix(matrix, sampling)  # pyright: ignore[reportArgumentType]
    planes = planes_of(frame, size)
    made = np.zeros(constants.FRAME_SHAPE, np.uint8)
    y, x = np.indices((256, 512)).astype(F)
    warped = kernel(planes[0], matrix, x, y)
    for row in range(256):
        # 0 and 2 are of even rows, 1 and 3 of odd ones; 2 and 3 of odd columns.
        made[row & 1, row // 2] = warped[row, 0::2]
        made[2 + (row & 1), row // 2] = warped[row, 1::2]
    y, x = np.indices((128, 256)).astype(F)
    for channel in (1, 2):
        made[3 + channel] = kernel(planes[channel], chroma, x, y)
    return made


def random_frames(count: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    shape = (count, size[0] * size[1] * 3 // 2)
    return np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)


def matrix_of(zoom: float, angles: tuple[float, float, float]) -> np.ndarray:
    """A camera of the small size that sees more or less than the model."""
    camera = np.array([[910 * zoom, 0, SIZE[0] / 2], [0, 910 * zoom, SIZE[1] / 2], [0, 0, 1]])
    return geometry.warp_matrix(angles, camera)


@pytest.mark.parametrize("sampling", geometry.SAMPLINGS)
def test_every_pixel_is_that_of_the_kernel(sampling: geometry.Sampling):
    """One looks past the borders, one between the pixels, each with its own matrix."""
    matrices = np.stack([matrix_of(0.3, (0.05, 0.02, -0.03)), matrix_of(0.1, (0.0, 0.04, 0.01))])
    given = random_frames(2)
    made = np.asarray(frames.prepare_frames(given, matrices, SIZE, sampling=sampling))
    assert made.shape == (2, 6, 128, 256)
    for number in range(2):
        expected = by_hand(given[number], matrices[number], SIZE, sampling)
        # A fused multiply-add may round a place to the neighbouring 1/32 of a pixel.
        share = (made[number] == expected).mean()
        assert share > 0.999, share
        assert len(np.unique(expected)) > 50
    other = {"bilinear": "nearest", "nearest": "bilinear"}[sampling]
    assert (made[0] == by_hand(given[0], matrices[0], SIZE, other)).mean() < 0.9


def test_sampled_at_whole_pixels_the_planes_are_those_of_the_frame():
    """Packing and nothing else, bit for bit: channels by rows and columns of Y, then U and V."""
    size = (512, 256)
    frame = random_frames(1, size)
    y, u, v = planes_of(frame[0], size)
    expected = [y[0::2, 0::2], y[1::2, 0::2], y[0::2, 1::2], y[1::2, 1::2], u, v]
    for sampling in geometry.SAMPLINGS:
        made = np.asarray(frames.prepare_frames(frame, np.eye(3)[None], size, sampling=sampling))
        np.testing.assert_array_equal(made[0], expected)


def test_planes_come_back():
    size = (512, 256)
    frame = random_frames(1, size)
    packed = np.asarray(frames.prepare_frames(frame, np.eye(3)[None], size))
    for found, expected in zip(frames.unpack(packed), planes_of(frame[0], size), strict=True):
        np.testing.assert_array_equal(found[0], expected)


def test_one_program_serves_all_calibrations():
    given = random_frames(1)
    frames.prepare_frames(given, matrix_of(0.2, (0, 0, 0))[None], SIZE)
    before = frames.prepare_traced._cache_size()
    frames.prepare_frames(given, matrix_of(0.2, (0.1, 0.1, 0.1))[None], SIZE)
    assert frames.prepare_traced._cache_size() == before


def test_a_direction_that_is_not_in_front_is_no_crash():
    """Matrices whose third row passes zero inside the image, as those of no camera do."""
    matrix = np.array([[1.0, 0, 0], [0, 1, 0], [0, -1 / 128, 1]])
    for sampling in geometry.SAMPLINGS:
        made = frames.prepare_frames(random_frames(1), matrix[None], SIZE, sampling=sampling)
        assert math.prod(made.shape) == 6 * 128 * 256


@pytest.mark.parametrize(
    ("given", "size", "message"),
    [
        (np.zeros((1, 4608), np.float32), SIZE, r"expected uint8 \(1, 4608\) for 64x48.*float32"),
        (np.zeros((1, 4600), np.uint8), SIZE, r"expected uint8 \(1, 4608\)"),
        (np.zeros((2, 4608), np.uint8), SIZE, r"as many as matrices, got uint8 \(2, 4608\)"),
        (np.zeros((1, 4608), np.uint8), (63, 48), "expected even width and height, got 63x48"),
    ],
)
def test_frames_that_do_not_fit_are_refused(given: np.ndarray, size: tuple[int, int], message: str):
    with pytest.raises(UsageError, match=message):
        frames.prepare_frames(given, np.eye(3)[None], size)


def test_what_is_no_packed_frame_is_refused():
    frames.check_packed("img", np.zeros((3, *constants.FRAME_SHAPE), np.uint8))
    with pytest.raises(UsageError, match=r"img: expected uint8 \(T, 6, 128, 256\), got uint8 \(3,"):
        frames.check_packed("img", np.zeros((3, 12, 128, 256), np.uint8))
