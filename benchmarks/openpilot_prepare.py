"""Frames per second prepared for openpilot's models: decoded, warped and packed.

`python -m benchmarks.openpilot_prepare` draws a short segment of a device's real size, and prints
medians of rounds that take turns, on files in the page cache, for the recipe and for a plain loop
of PyAV and numpy over the same videos. Both must give the same bytes.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np

from benchmarks import machine, timing
from recipes.openpilot import geometry, make_data
from recipes.openpilot.assembling import assemble
from recipes.openpilot.constants import MODEL_HEIGHT, MODEL_WIDTH, Camera
from recipes.openpilot.logs import Log, read_log
from recipes.openpilot.segments import ROAD, WIDE, Segment, find_segments

# A few pixels are on the border between two steps of 1/32 of a pixel, and are rounded either way.
SAME = 0.999
PLAIN, THREADED = "PyAV and numpy, a loop", "PyAV with threads and numpy, a loop"
RECIPE = "recipes.openpilot"


def plain_loop(
    segment: Segment, cameras: tuple[Camera, Camera], rpy: list[float], *, threads: bool
) -> list[Any]:
    """Return `img` and `big_img` (T, 6, 128, 256) of a segment without gaps, by plain code.

    Args:
        segment: Files of the segment.
        cameras: The road camera and the wide camera.
        rpy: Mounting angles of the device.
        threads: Whether FFmpeg decodes several frames at a time.
    """
    made = []
    for name, camera in zip((ROAD, WIDE), cameras, strict=True):
        matrix = geometry.warp_matrix(rpy, camera.intrinsics, big=name == WIDE)
        chroma = geometry.chroma_matrix(matrix, "bilinear")
        packed = []
        with av.open(str(segment.files[name]), format="hevc") as file:
            if threads:
                file.streams.video[0].thread_type = "AUTO"
            for frame in file.decode(video=0):
                planes = frame.to_ndarray(format="yuv420p").ravel()
                packed.append(_packed(planes, camera, matrix, chroma))
        made.append(np.stack(packed))
    return made


def _packed(frame: np.ndarray, camera: Camera, matrix: np.ndarray, chroma: np.ndarray):
    area, width, height = camera.width * camera.height, camera.width, camera.height
    y = _warped(frame[:area].reshape(height, width), matrix, MODEL_WIDTH, MODEL_HEIGHT)
    halves = frame[area:].reshape(2, height // 2, width // 2)
    u, v = (_warped(one, chroma, MODEL_WIDTH // 2, MODEL_HEIGHT // 2) for one in halves)
    return np.stack([y[0::2, 0::2], y[1::2, 0::2], y[0::2, 1::2], y[1::2, 1::2], u, v])


def _warped(plane: np.ndarray, matrix: np.ndarray, width: int, height: int) -> Any:
    m = matrix.astype(np.float32)
    x, y = np.arange(width, dtype=np.float32)[None], np.arange(height, dtype=np.float32)[:, None]
    scale = np.float32(32) / (m[2, 0] * x + m[2, 1] * y + m[2, 2])
    across = np.rint((m[0, 0] * x + m[0, 1] * y + m[0, 2]) * scale).astype(np.int32)
    down = np.rint((m[1, 0] * x + m[1, 1] * y + m[1, 2]) * scale).astype(np.int32)
    columns = [np.clip((across >> 5) + one, 0, plane.shape[1] - 1) for one in (0, 1)]
    rows = [np.clip((down >> 5) + one, 0, plane.shape[0] - 1) for one in (0, 1)]
    right, below = across & 31, down & 31
    total = np.int32(1 << 14)
    for row, vertical in zip(rows, (32 - below, below), strict=True):
        for column, horizontal in zip(columns, (32 - right, right), strict=True):
            total = total + plane[row, column].astype(np.int32) * (vertical * horizontal * 32)
    return (total >> 15).astype(np.uint8)


def contestants(
    segment: Segment, log: Log, options: make_data.RouteOptions, batch_size: int | None
) -> dict[str, Callable[[], list[Any]]]:
    """Return functions by name that prepare the segment."""
    wide = options.cameras.wide
    assert wide is not None

    def recipe() -> list[Any]:
        arrays = assemble(segment, log, "bilinear", batch_size).arrays
        return [arrays["img"], arrays["big_img"]]

    def plain(threads: bool) -> list[Any]:
        cameras = (options.cameras.road, wide)
        return plain_loop(segment, cameras, list(options.rpy_calib), threads=threads)

    return {PLAIN: lambda: plain(False), THREADED: lambda: plain(True), RECIPE: recipe}


def check_same(made: dict[str, list[Any]]) -> None:
    """Raise an error if the bytes of the contestants differ.

    Raises:
        RuntimeError: They differ.
    """
    for name, arrays in made.items():
        for one, other in zip(made[PLAIN], arrays, strict=True):
            share = float((one == other).mean()) if one.shape == other.shape else 0.0
            if share < SAME:
                raise RuntimeError(
                    f"{name}: {share:.4f} of the bytes are the same, expected {SAME}"
                )


def frame_rates(times: Mapping[str, timing.Series], frames: int) -> list[str]:
    """Return lines with the rate of each contestant, whose calls take `frames` frames each."""
    lines = []
    for name, series in times.items():
        rate = frames / statistics.median(series.wall)
        cpu = 1e3 * statistics.median(series.cpu) / frames
        lines.append(f"{name:36} {rate:7.1f} frames/s  {cpu:6.1f} ms of CPU a frame")
    return lines


def main() -> None:
    """Draw a segment, check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="tici ar0231", help="device and sensor")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    device, sensor = given.device.split()
    with tempfile.TemporaryDirectory() as folder:
        options = make_data.RouteOptions(
            segments=1, seconds=given.seconds, shrink=1, device=device, sensor=sensor
        )
        make_data.make_route(folder, options)
        (segment,) = find_segments(Path(folder))
        assert segment.log is not None
        ways = contestants(segment, read_log(segment.log), options, given.batch_size)
        check_same({name: way() for name, way in ways.items()})
        times = timing.interleaved(ways, rounds=given.rounds, seconds=0)
    camera = options.cameras.road
    size = f"{camera.width}x{camera.height}"
    print(f"{machine.num_cores()} cores, {device} {sensor}: two cameras of {size}")
    print(*frame_rates(times, options.frames_each), sep="\n")
    print(*timing.faster(times, RECIPE, (PLAIN, THREADED)), sep="\n")


if __name__ == "__main__":
    main()
