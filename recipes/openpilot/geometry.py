"""Projections of points on the road to camera images and to models' images.

Frames of reference are openpilot's (common/transformations/README.md). The device and the
calibrated frame have x forward, y right, z down. The calibrated frame is the device's, rotated so
that the car drives along x on a level road. The view frame of a camera has x right, y down, z
forward. Pixel centres have integer coordinates: the first is at (0, 0).
"""

from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recipes.openpilot.constants import BIG_MODEL_INTRINSICS, MODEL_INTRINSICS
from tpuport.foundation.errors import UsageError

# How cameras are sampled: as by the kernel of devices up to 2025, or as since 2026.
Sampling = Literal["bilinear", "nearest"]
SAMPLINGS: tuple[Sampling, ...] = get_args(Sampling)

Array = NDArray[np.float64]
VIEW_FROM_DEVICE: Array = np.array([[0.0, 1, 0], [0, 0, 1], [1, 0, 0]])
VIEW_FROM_DEVICE.setflags(write=False)


def rotation_from_euler(angles: ArrayLike) -> Array:
    """Return the matrices of roll, pitch and yaw, applied in this order.

    Args:
        angles: (..., 3) in rad.

    Returns:
        (..., 3, 3).
    """
    angles = np.asarray(angles, np.float64)
    (cr, cp, cy), (sr, sp, sy) = (np.moveaxis(f(angles), -1, 0) for f in (np.cos, np.sin))
    rows = [
        [cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr],
        [sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr],
        [-sp, cp * sr, cp * cr],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)


def euler_from_rotation(matrices: ArrayLike) -> Array:
    """Return roll, pitch and yaw of matrices (..., 3, 3), with pitch between -90 and 90 degrees."""
    m = np.asarray(matrices, np.float64)
    roll = np.arctan2(m[..., 2, 1], m[..., 2, 2])
    pitch = -np.arcsin(np.clip(m[..., 2, 0], -1, 1))
    return np.stack([roll, pitch, np.arctan2(m[..., 1, 0], m[..., 0, 0])], axis=-1)


def warp_matrix(rpy_calib: ArrayLike, camera: ArrayLike, *, big: bool = False) -> Array:
    """Return the matrix from pixels of the model's image to pixels of the camera.

    This is get_warp_matrix of openpilot's common/transformations/model.py. Both images are seen
    from the same place, so only directions matter.

    Args:
        rpy_calib: (..., 3) rad, the calibrated frame in the device's: liveCalibration.rpyCalib.
        camera: (3, 3) intrinsics.
        big: Whether the model's image is `big_img`.

    Returns:
        (..., 3, 3).
    """
    model = BIG_MODEL_INTRINSICS if big else MODEL_INTRINSICS
    calib_from_model = np.linalg.inv(model @ VIEW_FROM_DEVICE)
    return camera_from_calib(rpy_calib, camera) @ calib_from_model


def camera_from_calib(rpy_calib: ArrayLike, camera: ArrayLike) -> Array:
    """Return (..., 3, 3), from points of the calibrated frame to homogeneous camera pixels."""
    return np.asarray(camera, np.float64) @ VIEW_FROM_DEVICE @ rotation_from_euler(rpy_calib)


def chroma_matrix(matrices: ArrayLike, sampling: Sampling) -> Array:
    """Return the equivalent of `warp_matrix` for the U and V planes, which have half the size.

    The kernel of devices up to 2025 keeps pixel centres in place (transform_scale_buffer in
    openpilot's common/mat.h). Since 2026 image corners are kept (make_frame_prepare in
    selfdrive/modeld/compile_modeld.py). The difference is at most a quarter of a pixel of these
    planes.

    Args:
        matrices: (..., 3, 3).
        sampling: One of `SAMPLINGS`.

    Raises:
        UsageError: There is no such sampling.
    """
    if sampling not in SAMPLINGS:
        raise UsageError(f"sampling: expected one of {', '.join(SAMPLINGS)}, got {sampling!r}")
    shift = 0.5 if sampling == "bilinear" else 0.0
    full_from_half = np.array([[2.0, 0, shift], [0, 2.0, shift], [0, 0, 1]])
    return np.linalg.inv(full_from_half) @ np.asarray(matrices, np.float64) @ full_from_half


def scaled_intrinsics(camera: ArrayLike, size: tuple[int, int], new_size: tuple[int, int]) -> Array:
    """Return the intrinsics of a camera whose images were resized, as those of qcamera are.

    Args:
        camera: (3, 3).
        size: Width and height that the intrinsics are for.
        new_size: Width and height of the images.
    """
    x, y = (new / old for new, old in zip(new_size, size, strict=True))
    # Resizing keeps the corners of an image, which are half a pixel from the pixel centres.
    scale = np.array([[x, 0, (x - 1) / 2], [0, y, (y - 1) / 2], [0, 0, 1]])
    return scale @ np.asarray(camera, np.float64)


def project(points: ArrayLike, camera_from_points: ArrayLike) -> Array:
    """Project points to pixels.

    Args:
        points: (..., 3).
        camera_from_points: (3, 3), such as `camera_from_calib` returns.

    Returns:
        (..., 2), NaN where a point is not in front of the camera.
    """
    seen = np.asarray(points, np.float64) @ np.asarray(camera_from_points, np.float64).T
    depth = seen[..., 2:]
    in_front = depth > 1e-6
    return np.where(in_front, seen[..., :2] / np.where(in_front, depth, 1), np.nan)


def model_from_calib(*, big: bool = False) -> Array:
    """Return (3, 3), from points of the calibrated frame to homogeneous pixels of a model."""
    return (BIG_MODEL_INTRINSICS if big else MODEL_INTRINSICS) @ VIEW_FROM_DEVICE
