"""Pictures of a `scene.Drive` as seen by a camera of known calibration."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.openpilot import geometry
from recipes.openpilot.constants import MODEL_CAMERA_HEIGHT
from recipes.openpilot.scene import Drive

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
MARKERS = 33  # positions that `Painter.paint` can mark
MARKER_STEP = 0.0125  # between two of them, to the right for each metre forward
_FAR, _BIN = 240.0, 0.25  # m ahead
_LINE = 0.15  # m
_DASH, _PERIOD = 5.0, 10.0  # m
_CAR = (1.8, 1.5)  # m, width and height
_SKY, _GRASS, _ROAD, _WHITE, _BODY = 190, 120, 85, 225, 30
_GRASS_CHROMA = (112, 114)


class Painter:
    """A painter of what one camera sees, directly in Y, U and V.

    Args:
        intrinsics: Camera matrix, (3, 3).
        size: Width and height, even.
        rpy_calib: Mounting angles of the device, in rad.
        dashed: Whether the lines of the car's own lane are dashed.
        height: Height of the camera above the road in m.
    """

    def __init__(
        self,
        intrinsics: NDArray[np.float64],
        size: tuple[int, int],
        rpy_calib: tuple[float, float, float],
        *,
        dashed: bool = True,
        height: float = MODEL_CAMERA_HEIGHT,
    ) -> None:
        self.size, self._dashed, self._height = size, dashed, height
        self._camera_from_calib = geometry.camera_from_calib(rpy_calib, intrinsics)
        rows, columns = np.indices(size[::-1], np.float32).reshape(2, -1)
        rays = np.linalg.inv(self._camera_from_calib).astype(np.float32)
        x, y, z = (r[0] * columns + r[1] * rows + r[2] for r in rays)
        seen = (z > 0) & (x > 0) & (height * x < _FAR * z)
        reach = np.float32(height) / z[seen]
        self._ground = np.flatnonzero(seen)
        forward = reach * x[seen]
        self._right: Floats = reach * y[seen]
        place = forward / np.float32(_BIN)
        self._bin = place.astype(np.intp)
        self._between: Floats = place - self._bin
        self._pixel: Floats = forward / np.float32(intrinsics[0, 0])  # m
        self._behind = np.where(z > 0, _GRASS, _SKY).astype(np.uint8)
        self._grid = np.arange(0, _FAR + 2 * _BIN, _BIN)

    def paint(self, drive: Drive, time: float, marker: int | None = None) -> Bytes:
        """Paint one frame.

        Args:
            drive: The drive to paint.
            time: Time in s.
            marker: Which of `MARKERS` positions in the sky has a white bar, if any.

        Returns:
            The picture (height * width * 3 / 2,): Y, then U, then V.
        """
        middle = drive.lines(time, self._grid, (0.0,))[0]
        slope = np.gradient(middle, _BIN)
        way = drive.way_along(time, self._grid)
        aside = self._right - self._along(middle)
        aside *= np.take((1 / np.hypot(1, slope)).astype(np.float32), self._bin, mode="clip")
        aside = np.abs(aside, out=aside)
        marks = self._line(aside, 0.5 * drive.options.lane)
        if self._dashed:
            marks *= np.take((way % _PERIOD < _DASH).astype(np.float32), self._bin, mode="clip")
        np.maximum(marks, self._line(aside, 1.5 * drive.options.lane), out=marks)
        on_road = aside < drive.options.road_edges[1]
        stripes = np.take((_GRASS + 12 * (way % 8 < 4)).astype(np.float32), self._bin, mode="clip")
        y = self._behind.copy()
        road = _ROAD + marks * (_WHITE - _ROAD)
        y[self._ground] = np.where(on_road, road, stripes).astype(np.uint8)
        grass = self._behind == _GRASS
        grass[self._ground] = ~on_road
        width, height = self.size
        image = y.reshape(height, width)
        if drive.has_lead:
            for plane, value in ((image, _BODY), (grass.reshape(height, width), False)):
                self._draw_car(plane, drive.lead(time, [time])[0], value)
        if marker is not None:
            self._draw_marker(image, marker)
        quarter = grass.reshape(height, width)[::2, ::2].ravel()
        chroma = [np.where(quarter, value, 128).astype(np.uint8) for value in _GRASS_CHROMA]
        return np.concatenate([y, *chroma])

    def _along(self, table: NDArray[np.float64]) -> Floats:
        """Interpolate a function of the distance ahead at every pixel of the ground."""
        start = np.take(table[:-1].astype(np.float32), self._bin, mode="clip")
        return start + self._between * np.take(
            np.diff(table).astype(np.float32), self._bin, mode="clip"
        )

    def _line(self, aside: Floats, place: float) -> Floats:
        """Return how much of each pixel the lines on both sides cover."""
        covered = np.float32(_LINE / 2) - np.abs(aside - np.float32(place))
        covered /= self._pixel
        covered += 0.5
        return np.clip(covered, 0, 1, out=covered)

    def _draw_car(self, image: NDArray[Any], lead: NDArray[Any], value: int) -> None:
        x, y = lead[:2]
        half, tall = _CAR[0] / 2, _CAR[1]
        self._fill(
            image,
            [(x, y - half, self._height - tall), (x, y + half, self._height)],
            value,
        )

    def _draw_marker(self, image: Bytes, marker: int) -> None:
        middle = (marker % MARKERS - MARKERS // 2) * MARKER_STEP
        half = MARKER_STEP * 0.35
        self._fill(image, [(1, middle - half, -0.045), (1, middle + half, -0.015)], 255)

    def _fill(
        self, image: NDArray[Any], corners: list[tuple[float, float, float]], value: int
    ) -> None:
        """Fill a rectangle that faces the camera, given by two of its corners."""
        (left, top), (right, bottom) = np.round(
            geometry.project(corners, self._camera_from_calib)
        ).tolist()
        rows = slice(max(0, int(top)), max(0, int(bottom) + 1))
        image[rows, max(0, int(left)) : max(0, int(right) + 1)] = value


def read_marker(y: Bytes) -> int:
    """Return the number of the marker that a model's `img` shows.

    Args:
        y: Plane (256, 512) from `frames.unpack`.

    Returns:
        The number, or -1 if there is none.
    """
    strip = y[12:30].astype(np.float32).mean(0)
    bright = strip > 225
    if not bright.any():
        return -1
    place = np.flatnonzero(bright).mean()
    return round(float(place - 256) / (910 * MARKER_STEP)) + MARKERS // 2
