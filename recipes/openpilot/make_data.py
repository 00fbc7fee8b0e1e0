"""Small routes in the real formats, of roads whose geometry is known.

Logs are Cap'n Proto in openpilot's schema, videos HEVC from a real encoder. A future path can be
predicted from the picture alone: the road winds, and the car follows it.
"""

import bz2
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from recipes.openpilot.constants import (
    DEVICE_CAMERAS,
    MODEL_CAMERA_HEIGHT,
    MODEL_RUN_FREQ,
    QCAMERA_SIZE,
    DeviceCameras,
)
from recipes.openpilot.drawing import Bytes, Painter
from recipes.openpilot.events import Encoded, Recording, make_events
from recipes.openpilot.geometry import scaled_intrinsics
from recipes.openpilot.scene import LANE, Drive, DriveOptions
from recipes.openpilot.schema import zstandard
from recipes.packages import av
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_file

LogFormat = Literal["zst", "bz2", "raw"]
_FIRST_FRAME_ID = 37  # cameras run before the first frame is encoded
_MARKED_CAMERAS = ("road", "wideRoad")


@dataclass(frozen=True)
class RouteOptions:
    """The settings with which a route is driven and recorded.

    Attributes:
        name: Name of the route in a device's form.
        segments: Number of segments.
        seconds: Length of each segment; 60 on a device.
        device: "tici", "tizi", "mici" or "neo".
        sensor: Sensor of its cameras.
        seed: Random seed of the road.
        speeds: Range from which the mean speed is drawn, in m/s.
        curvature: Curvature of the sharpest bend, in 1/m.
        lead: Probability of a car ahead.
        lane_change: Whether to change lanes halfway.
        lane: Width of a lane in m.
        height: Height of the device above the road in m.
        rpy_calib: Mounting angles of the device, in rad.
        log_format: Format of rlog.
        full_video: Whether to write fcamera.hevc, and ecamera.hevc if there is a wide camera.
        wide: Whether to record the device's wide camera, if it has one.
        qcamera: Whether to write qcamera.ts.
        dropped: Frames of the drive that were taken but not encoded.
        dropped_wide: Further frames that the wide camera's encoder dropped.
        markers: Whether to draw the number of each frame into the sky.
        dashed: Whether to draw the own lane's lines as dashes.
        shrink: Divisor of each side of fcamera and ecamera; 2 takes a quarter of the time.
        quality: x265's constant rate factor.
        right_hand_drive: Whether cars drive on the left.
    """

    name: str = "00000001--5c0f1e2d3a"
    segments: int = 2
    seconds: float = 4.0
    device: str = "mici"
    sensor: str = "os04c10"
    seed: int = 0
    speeds: tuple[float, float] = (14.0, 16.0)
    curvature: float = 0.008
    lead: float = 0.5
    lane_change: bool = False
    lane: float = LANE
    height: float = MODEL_CAMERA_HEIGHT
    rpy_calib: tuple[float, float, float] = (0.0, 0.02, -0.015)
    log_format: LogFormat = "zst"
    full_video: bool = True
    wide: bool = True
    qcamera: bool = False
    dropped: frozenset[int] = frozenset()
    dropped_wide: frozenset[int] = frozenset()
    markers: bool = False
    dashed: bool = True
    shrink: int = 2
    quality: int = 20
    right_hand_drive: bool = False

    @property
    def cameras(self) -> DeviceCameras:
        """Return the cameras of the device.

        Raises:
            UsageError: There is no such device with such a sensor.
        """
        found = DEVICE_CAMERAS.get((self.device, self.sensor))
        if found is None:
            known = ", ".join(sorted(" ".join(pair) for pair in DEVICE_CAMERAS))
            raise UsageError(
                f"device and sensor: expected one of {known}; got {self.device} {self.sensor}"
            )
        return found if self.wide else replace(found, wide=None)

    @property
    def frames_each(self) -> int:
        """Return the number of frames per segment."""
        return round(self.seconds * MODEL_RUN_FREQ)

    def drive(self) -> Drive:
        """Return the drive that happens on the route."""
        return Drive(
            DriveOptions(
                seconds=self.segments * self.seconds,
                seed=self.seed,
                speeds=self.speeds,
                curvature=self.curvature,
                lead=self.lead,
                lane_change=self.lane_change,
                lane=self.lane,
                height=self.height,
            )
        )


def make_data(
    root: str | Path,
    *,
    train: int = 3,
    held_out: int = 1,
    options: RouteOptions | None = None,
    seed: int = 0,
    num_processes: int = 2,
    on_segment: Callable[[Path], None] | None = None,
) -> dict[str, list[Path]]:
    """Write routes to train on and others to evaluate with, of different roads.

    Args:
        root: Folder; routes go to `train` and `held_out` in it.
        train: Number of routes to train on.
        held_out: Number of routes to evaluate with.
        options: Settings of the recording. Names, seeds and mounting angles differ by route.
        seed: Random seed for roads, names and mounting angles.
        num_processes: Number of processes that draw and encode.
        on_segment: Called with each segment that is written.

    Returns:
        By "train" and "held_out", the segments' folders.

    Raises:
        UsageError: The options do not fit.
        CheckpointError: The disk is full.
        MissingExtraError: openpilot-logging, zstandard or PyAV is not installed.
    """
    options = RouteOptions() if options is None else options
    generator = np.random.default_rng((20_262, seed))
    jobs: list[tuple[str, Path, RouteOptions, int]] = []
    for number in range(train + held_out):
        split = "train" if number < train else "held_out"
        mounted = generator.normal(0, (0.002, 0.006, 0.006)).round(4).tolist()
        roll, pitch, yaw = (a + b for a, b in zip(options.rpy_calib, mounted, strict=True))
        route = replace(
            options,
            name=f"{number + 1:08x}--{generator.bytes(5).hex()}",
            seed=seed * 1000 + number,
            rpy_calib=(roll, pitch, yaw),
        )
        jobs += [(split, Path(root) / split, route, n) for n in range(route.segments)]
    made: dict[str, list[Path]] = {"train": [], "held_out": []}
    for (split, *_), path in zip(jobs, _in_processes(jobs, num_processes), strict=True):
        made[split].append(path)
        if on_segment is not None:
            on_segment(path)
    return made


def _in_processes(
    jobs: list[tuple[str, Path, RouteOptions, int]], num_processes: int
) -> Iterator[Path]:
    given = [job[1:] for job in jobs]
    if num_processes <= 1:
        yield from (make_segment(*one) for one in given)
        return
    # spawn, since a fork of a process with threads, such as jax's, may deadlock.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        yield from pool.map(make_segment, *zip(*given, strict=True))


def make_route(root: str | Path, options: RouteOptions) -> list[Path]:
    """Write one route, segment by segment, in this process. See `make_data`.

    Returns:
        The segments' folders.
    """
    return [make_segment(Path(root), options, n) for n in range(options.segments)]


def make_segment(root: Path, options: RouteOptions, number: int) -> Path:
    """Write one segment of a route and return its folder. See `make_data`."""
    folder = root / f"{options.name}--{number}"
    folder.mkdir(parents=True, exist_ok=True)
    each = options.frames_each
    recording = Recording(
        options.drive(),
        options.device,
        options.sensor,
        options.rpy_calib,
        number,
        range(number * each, (number + 1) * each),
        _FIRST_FRAME_ID,
        start=100_000_000_000,
        right_hand_drive=options.right_hand_drive,
    )
    encoded = {
        camera: _write_camera(folder, recording, options, camera) for camera in _written(options)
    }
    write_log(folder, make_events(recording, encoded), options.log_format)
    return folder


def write_log(folder: Path, events: Iterable[bytes], log_format: LogFormat) -> Path:
    """Write rlog atomically.

    Args:
        folder: Folder of the segment.
        events: Serialised events.
        log_format: "zst" as devices write it now, "bz2" as before, "raw" as at first.

    Raises:
        UsageError: There is no such format.
        CheckpointError: The disk is full.
        MissingExtraError: zstandard is not installed.
    """
    compress: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
        "zst": ("rlog.zst", lambda data: zstandard().compress(data, 10)),
        "bz2": ("rlog.bz2", bz2.compress),
        "raw": ("rlog", bytes),
    }
    if log_format not in compress:
        raise UsageError(f"log_format: expected one of {', '.join(compress)}, got {log_format!r}")
    name, how = compress[log_format]
    with replacing_file(folder / name) as temporary:
        temporary.write_bytes(how(b"".join(events)))
    return folder / name


def _written(options: RouteOptions) -> list[str]:
    cameras = []
    if options.full_video:
        cameras += ["road"] + ["wideRoad"] * (options.cameras.wide is not None)
    return cameras + ["qRoad"] * options.qcamera


def _write_camera(
    folder: Path, recording: Recording, options: RouteOptions, camera: str
) -> list[Encoded]:
    road, wide = options.cameras.road, options.cameras.wide
    one = wide if camera == "wideRoad" and wide is not None else road
    size = (one.width // options.shrink, one.height // options.shrink)
    size = QCAMERA_SIZE if camera == "qRoad" else size
    intrinsics = scaled_intrinsics(one.intrinsics, (one.width, one.height), size)
    painter = Painter(
        intrinsics, size, options.rpy_calib, dashed=options.dashed, height=options.height
    )
    dropped = options.dropped | (options.dropped_wide if camera == "wideRoad" else frozenset())
    frames = [n for n in recording.frames if n not in dropped]
    images = (
        painter.paint(
            recording.drive,
            recording.seconds(recording.eof(frame)),
            frame if options.markers else None,
        )
        for frame in frames
    )
    name = {"road": "fcamera.hevc", "wideRoad": "ecamera.hevc", "qRoad": "qcamera.ts"}[camera]
    with replacing_file(folder / name) as temporary:
        sizes = encode(temporary, images, size, h264=camera == "qRoad", quality=options.quality)
    numbered = enumerate(zip(frames, sizes, strict=True))
    return [Encoded(frame, place, length) for place, (frame, length) in numbered]


def encode(
    path: Path,
    images: Iterable[Bytes],
    size: tuple[int, int],
    *,
    h264: bool = False,
    quality: int = 20,
) -> list[int]:
    """Write a video as devices do: raw HEVC, or H.264 in a transport stream, without B frames.

    Args:
        path: File to write.
        images: Pictures, each Y, U, V, (height * width * 3 / 2,).
        size: Width and height.
        h264: Whether to write H.264, as for qcamera.
        quality: Constant rate factor; 0 loses little.

    Returns:
        The size of each frame in bytes.

    Raises:
        MissingExtraError: PyAV is not installed.
    """
    codec, container = ("libx264", "mpegts") if h264 else ("libx265", "hevc")
    settings = {"preset": "ultrafast", "tune": "zerolatency", "crf": str(quality), "g": "20"}
    if not h264:
        settings["x265-params"] = "log-level=none:bframes=0"
    sizes: list[int] = []
    with av().open(str(path), "w", format=container) as file:
        stream = file.add_stream(codec, rate=MODEL_RUN_FREQ, options=settings)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for number, image in enumerate(images):
            frame = av().VideoFrame.from_ndarray(image.reshape(-1, size[0]), format="yuv420p")
            frame.pts = number
            _mux(file, stream.encode(frame), sizes)
        _mux(file, stream.encode(), sizes)
    return sizes


def _mux(file: Any, packets: list[Any], sizes: list[int]) -> None:
    for packet in packets:
        sizes.append(packet.size)
        file.mux(packet)
