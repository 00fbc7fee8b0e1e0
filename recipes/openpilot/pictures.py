"""Predicted paths and lines drawn on camera images, as pictures and as videos."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.hunyuan_video.video import write_video
from recipes.openpilot.constants import MODEL_CAMERA_HEIGHT, MODEL_RUN_FREQ, X_IDXS
from recipes.openpilot.frames import check_packed, unpack
from recipes.openpilot.geometry import model_from_calib, project
from recipes.packages import av
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_file

Image = NDArray[np.uint8]
Array = NDArray[Any]
Color = tuple[int, int, int]
TRUTH, BEFORE, AFTER = (255, 255, 255), (240, 90, 60), (60, 200, 90)
_PATH, _TRUTH_PATH, _LINE = 0.9, 0.12, 0.06  # m, half of the drawn width
_NEAREST = 2.5  # m ahead, where drawing starts
_SURE = 0.3  # probability from which a line is drawn
# From full-range BT.601. Rows are R, G, B.
_RGB_FROM_YUV = np.array([[1, 0, 1.402], [1, -0.344136, -0.714136], [1, 1.772, 0]])


def to_rgb(y: Image, u: Image, v: Image) -> Image:
    """Convert planes (2 n, 2 m), (n, m) and (n, m) to RGB (2 n, 2 m, 3), for viewing."""
    full = [np.repeat(np.repeat(plane, 2, axis=0), 2, axis=1) for plane in (u, v)]
    shifted = np.stack([y.astype(float), *(plane.astype(float) - 128 for plane in full)], axis=-1)
    return np.clip(np.round(shifted @ _RGB_FROM_YUV.T), 0, 255).astype(np.uint8)


def camera_image(frame: Image, size: tuple[int, int]) -> Image:
    """Convert a frame as videos give it (`video.Decoded.image`) to RGB (height, width, 3).

    Raises:
        UsageError: The frame is not of that size.
    """
    width, height = size
    if frame.shape != (width * height * 3 // 2,):
        raise UsageError(
            f"frame: expected {width * height * 3 // 2} bytes of {width}x{height}, got"
            f" {frame.shape}"
        )
    y, u, v = np.split(frame, [width * height, width * height * 5 // 4])
    half = (height // 2, width // 2)
    return to_rgb(y.reshape(height, width), u.reshape(half), v.reshape(half))


def model_images(img: Image) -> Image:
    """Convert packed frames (T, 6, 128, 256) to RGB (T, 256, 512, 3).

    Raises:
        UsageError: They are not packed frames.
    """
    check_packed("img", img)
    return np.stack([to_rgb(*planes) for planes in zip(*unpack(img), strict=True)])


@dataclass(frozen=True)
class Overlay:
    """The path and the lines to draw on one frame.

    Attributes:
        plan: (33, 15), or None.
        lane_lines: (4, 33, 2), or None.
        lane_lines_prob: (4,), of which likely lines are drawn; None to draw all.
        road_edges: (2, 33, 2), or None.
        height: Height of the camera above the road in m, on which the path is drawn.
    """

    plan: Array | None = None
    lane_lines: Array | None = None
    lane_lines_prob: Array | None = None
    road_edges: Array | None = None
    height: float = MODEL_CAMERA_HEIGHT

    @classmethod
    def of(cls, values: Mapping[str, Array], row: int) -> "Overlay":
        """Return the overlay of one frame of labels or of `outputs.parse`; only valid labels."""

        def one(name: str) -> Array | None:
            known = name in values and (
                f"{name}_valid" not in values or values[f"{name}_valid"][row]
            )
            return values[name][row] if known else None

        likely = one("lane_lines_prob")
        if likely is not None and likely.shape[-1] == 8:
            likely = likely[1::2]
        lines = one("lane_lines")
        height = MODEL_CAMERA_HEIGHT if lines is None else float(lines[:, 0, 1].mean())
        return cls(one("plan"), lines, likely, one("road_edges"), height)


def draw(
    image: Image,
    overlay: Overlay,
    color: Color,
    *,
    camera_from_calib: Array | None = None,
    wide_path: bool = True,
) -> Image:
    """Return a copy of an image with a path and lines on it.

    Args:
        image: (H, W, 3).
        overlay: The path and the lines.
        color: Color of the path and of lines.
        camera_from_calib: (3, 3) from `geometry.camera_from_calib`; None for `img`.
        wide_path: Whether the path is as wide as a car, or a thin line.
    """
    matrix = model_from_calib() if camera_from_calib is None else camera_from_calib
    drawn = image.copy()
    if overlay.lane_lines is not None:
        likely = overlay.lane_lines_prob
        for number, line in enumerate(overlay.lane_lines):
            if likely is None or likely[number] > _SURE:
                _ribbon(drawn, matrix, _line(line), _LINE, color, 0.9)
    if overlay.road_edges is not None:
        for line in overlay.road_edges:
            _ribbon(drawn, matrix, _line(line), _LINE, color, 0.5)
    if overlay.plan is not None:
        # A plan is that of the camera, which is above the road.
        path = overlay.plan[:, :3] + np.array([0, 0, overlay.height])
        half, opacity = (_PATH, 0.45) if wide_path else (_TRUTH_PATH, 0.9)
        _ribbon(drawn, matrix, path, half, color, opacity)
    return drawn


def _line(line: Array) -> Array:
    return np.column_stack([X_IDXS, line])


def _seen(points: Array) -> Array:
    """Return the points of a line (n, 3) along a road that a camera sees, in order.

    It begins at `_NEAREST` and ends before the first point that is behind that or as high as the
    horizon. Points that are lower on the picture than a nearer one are hidden by the road before
    them.
    """
    begun = np.maximum.accumulate(points[:, 0] >= _NEAREST)
    below = (points[:, 0] >= _NEAREST) & (points[:, 2] > 0)
    part = points[begun & np.logical_and.accumulate(below | ~begun)]
    slope = part[:, 2] / part[:, 0]
    lowest = np.minimum.accumulate(slope)
    return part[np.append(True, slope[1:] < lowest[:-1])[: len(part)]]


def _ribbon(
    image: Image, matrix: Array, points: Array, half: float, color: Color, opacity: float
) -> None:
    """Draw a level band along points (n, 3), of a width in metres."""
    ahead = _seen(points)
    if len(ahead) < 2:
        return
    sides = [project(ahead + np.array([0, side, 0]), matrix) for side in (-half, half)]
    covered = np.zeros(image.shape[:2], bool)
    for left, right in zip(
        zip(sides[0][:-1], sides[0][1:], strict=True),
        zip(sides[1][:-1], sides[1][1:], strict=True),
        strict=True,
    ):
        _fill(covered, np.stack([left[0], left[1], right[1], right[0]]))
    mixed = image[covered] * (1 - opacity) + np.array(color) * opacity
    image[covered] = np.round(mixed).astype(np.uint8)


def _fill(covered: NDArray[np.bool_], corners: Array) -> None:
    """Mark the pixels inside a quadrangle with four corners (4, 2) in order."""
    if not np.isfinite(corners).all():
        return
    height, width = covered.shape
    low = np.floor(corners.min(axis=0)).astype(int)
    high = np.ceil(corners.max(axis=0)).astype(int) + 1
    (left, top), (right, bottom) = (
        np.clip(low, 0, (width, height)),
        np.clip(high, 0, (width, height)),
    )
    if left >= right or top >= bottom:
        return
    y, x = np.mgrid[top:bottom, left:right]
    sides = []
    for (x0, y0), (x1, y1) in zip(corners, np.roll(corners, -1, axis=0), strict=True):
        sides.append((x1 - x0) * (y - y0) - (y1 - y0) * (x - x0))
    stacked = np.stack(sides)
    # With half a pixel of slack, so that thin bands far away have no gaps.
    slack = 0.5 * np.linalg.norm(np.roll(corners, -1, axis=0) - corners, axis=1)[:, None, None]
    inside = (stacked >= -slack).all(axis=0) | (stacked <= slack).all(axis=0)
    covered[top:bottom, left:right] |= inside


def before_and_after(
    images: Sequence[Image] | Image,
    truth: Mapping[str, Array],
    before: Mapping[str, Array],
    after: Mapping[str, Array],
    *,
    camera_from_calib: Sequence[Array] | None = None,
) -> Image:
    """Draw two models' predictions on frames side by side, with the truth in white on both.

    Args:
        images: T of (H, W, 3): `model_images`, or those of the camera.
        truth: Labels, each (T, ...).
        before: Parsed outputs of one model, on the left.
        after: Parsed outputs of the other model, on the right.
        camera_from_calib: T of (3, 3) for images of the camera; None for `img`.

    Returns:
        (T, H, 2 W, 3).
    """
    made = []
    for row, image in enumerate(images):
        matrix = None if camera_from_calib is None else camera_from_calib[row]
        halves = []
        for values, color in ((before, BEFORE), (after, AFTER)):
            true = Overlay.of(truth, row)
            said = replace(Overlay.of(values, row), height=true.height)
            half = draw(image, said, color, camera_from_calib=matrix)
            path = Overlay(plan=true.plan, height=true.height)
            halves.append(draw(half, path, TRUTH, camera_from_calib=matrix, wide_path=False))
        made.append(np.concatenate(halves, axis=1))
    return np.stack(made)


def save(path: str | Path, frames: Image, *, about: Mapping[str, Any] | None = None) -> None:
    """Write frames as a video, or the first one as a picture.

    Args:
        path: File name that ends in .mp4, or in .png for a picture of the first frame.
        frames: (T, H, W, 3), with even sides.
        about: Metadata for the video's comment.

    Raises:
        UsageError: The name has another ending, or the frames another shape.
        CheckpointError: The disk is full.
        MissingExtraError: PyAV is not installed.
    """
    path = Path(path)
    if path.suffix == ".mp4":
        write_video(path, frames, fps=MODEL_RUN_FREQ, about=about)
    elif path.suffix == ".png":
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as temporary:
            _write_png(temporary, frames[0])
    else:
        raise UsageError(f"{path}: expected a name that ends in .mp4 or .png")


def _write_png(path: Path, image: Image) -> None:
    coder = av().CodecContext.create("png", "w")
    coder.height, coder.width = image.shape[:2]
    coder.pix_fmt, coder.time_base = "rgb24", Fraction(1, MODEL_RUN_FREQ)
    picture = av().VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
    packets = [*coder.encode(picture), *coder.encode()]
    path.write_bytes(b"".join(bytes(packet) for packet in packets))
