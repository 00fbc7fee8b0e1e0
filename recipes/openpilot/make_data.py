"""Small routes in the real formats, of roads whose geometry is known.

Logs are Cap'n Proto by openpilot's schema, videos HEVC by a real encoder. A future path can be read
from the picture alone: the road winds, and the car follows it.
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
    MODEL_RUN_FREQ,
    QCAMERA_SIZE,
    DeviceCameras,
)
from recipes.openpilot.drawing import Bytes, Painter
from recipes.openpilot.events import Encoded, Recording, make_events
from recipes.openpilot.geometry import scaled_intrinsics
from recipes.openpilot.scene import Drive, DriveOptions
from recipes.openpilot.schema import zstandard
from recipes.packages import av
from tpuport.checkpoints.atomic import replacing_file
from tpuport.errors import UsageError

LogFormat = Literal["zst", "bz2", "raw"]
_FIRST_FRAME_ID = 37  # cameras run before the first frame is encoded
_MARKED_CAMERAS = ("road", "wideRoad")


@dataclass(frozen=True)
class RouteOptions:
    """How a route is driven and recorded.

    Attributes:
        name: of the route, as a device names it.
        segments: how many.
        seconds: of each segment; 60 on a device.
        device: "tici", "tizi", "mici" or "neo".
        sensor: of its cameras.
        seed: of the road.
        speeds: m/s, between which the mean speed is drawn.
        curvature: 1/m, the sharpest bend.
        lead: how likely there is a car ahead.
        lane_change: change lanes halfway.
        rpy_calib: rad, how the device is mounted.
        log_format: of rlog.
        full_video: write fcamera.hevc, and ecamera.hevc where there is a wide camera.
        wide: as for a device with a wide camera, where the device has one.
        qcamera: write qcamera.ts.
        dropped: frames of the drive that were taken but not encoded.
        dropped_wide: further ones that the wide camera's encoder dropped.
        markers: draw the number of each frame into the sky.
        dashed: draw the own lane's lines as dashes.
        shrink: each side of fcamera and ecamera is divided by it; 2 takes a quarter of the time.
        quality: x265's constant rate factor.
        right_hand_drive: whether cars drive on the left there.
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
        """Those of the device.

        Raises:
            UsageError: there is no such device with such a sensor.
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
        """Frames of a segment."""
        return round(self.seconds * MODEL_RUN_FREQ)

    def drive(self) -> Drive:
        """What happens on it."""
        return Drive(
            DriveOptions(
                seconds=self.segments * self.seconds,
                seed=self.seed,
                speeds=self.speeds,
                curvature=self.curvature,
                lead=self.lead,
                lane_change=self.lane_change,
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
    """Write routes to learn from and others to evaluate with, of different roads.

    Args:
        root: a folder; routes go to `train` and `held_out` in it.
        train: how many routes.
        held_out: how many.
        options: how they are recorded; names, seeds and how devices are mounted differ.
        seed: of everything.
        num_processes: that draw and encode.
        on_segment: called with each segment that is written.

    Returns:
        By "train" and "held_out", the segments' folders.

    Raises:
        UsageError: the options do not fit.
        CheckpointError: the disk is full.
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
    # Not forked: a fork of a process with threads, as jax's has, may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context) as pool:
        yield from pool.map(make_segment, *zip(*given, strict=True))


def make_route(root: str | Path, options: RouteOptions) -> list[Path]:
    """Write one route, segment by segment, in this process. As `make_data`.

    Returns:
        The segments' folders.
    """
    return [make_segment(Path(root), options, n) for n in range(options.segments)]


def make_segment(root: Path, options: RouteOptions, number: int) -> Path:
    """Write one segment of a route; returns its folder. As `make_data`."""
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
    """Write rlog, whole or not at all.

    Args:
        folder: the segment's.
        events: serialised.
        log_format: "zst" as devices write it now, "bz2" as before, "raw" as at first.

    Raises:
        UsageError: there is no such format.
        CheckpointError: the disk is full.
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
    painter = Painter(intrinsics, size, options.rpy_calib, dashed=options.dashed)
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
    """Write a video as devices do: raw HEVC, or H.264 in a transport stream; no B frames.

    Args:
        path: the file.
        images: each Y, U, V, (height * width * 3 / 2,).
        size: width and height.
        h264: of qcamera.
        quality: constant rate factor; 0 loses little.

    Returns:
        Bytes of each frame.

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
