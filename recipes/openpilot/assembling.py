"""One segment's frames: decoded once in order, paired, warped and packed, with their signals."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax
import numpy as np

from recipes.openpilot import geometry
from recipes.openpilot.constants import DEVICE_CAMERAS, FRAME_SHAPE, Camera, DeviceCameras
from recipes.openpilot.frames import Bytes, prepare_frames
from recipes.openpilot.geometry import Sampling
from recipes.openpilot.joining import FrameTable, frame_table, match_packets, runs, together
from recipes.openpilot.logs import Log
from recipes.openpilot.segments import QUICK, ROAD, WIDE, Segment
from recipes.openpilot.shards import FRAME_ARRAYS, Arrays
from recipes.openpilot.signals import Signals, signals_at
from recipes.openpilot.video import Decoded, VideoReader, read_ahead

_AHEAD = 8  # decoded frames that are buffered


@dataclass
class Assembled:
    """The arrays assembled from a segment.

    Attributes:
        arrays: Arrays as in `shards.FRAME_ARRAYS`, all of one length, which may be 0.
        camera: Device, sensor and video files.
        skipped: Number of frames that were left out, by reason.
        notes: Assumptions that were made.
    """

    arrays: Arrays
    camera: str = ""
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


@dataclass
class _Source:
    """A video of a segment, its camera, and what the log says of its frames.

    While the video is decoded, rows of its intact frames are added to `seen`; `last` is the last
    place in the file.
    """

    reader: VideoReader
    camera: Camera
    table: FrameTable
    seen: set[int] = field(default_factory=set)
    last: int = -1


def assemble(
    segment: Segment, log: Log, sampling: Sampling, batch_size: int | None = None
) -> Assembled:
    """Assemble the frames of a segment with the other inputs of the model.

    Args:
        segment: Files of the segment.
        log: Log of the segment. Problems are added to it.
        sampling: How camera images are sampled.
        batch_size: Number of frames that are warped at a time; None for 1 on a CPU, where more does
            not help, and 16 elsewhere.
    """
    if batch_size is None:
        batch_size = 1 if jax.default_backend() == "cpu" else 16
    made = Assembled(_nothing())
    cameras = DEVICE_CAMERAS.get((log.device, log.sensor))
    if cameras is None:
        log.problems[f"no camera is known of device {log.device} with sensor {log.sensor}"] += 1
        return made
    sources = _sources(segment, log, cameras, made)
    if not sources:
        log.problems["no video"] += 1
        return made
    made.camera = " ".join(
        [log.device, log.sensor, "+".join(s.reader.path.name.split(".")[0] for s in sources)]
    )
    signals = signals_at(log, sources[0].table)
    made.notes += signals.notes
    _fill(made, sources, signals, log, sampling, batch_size)
    for source in sources:
        _report(source, made, log)
    return made


def _nothing() -> Arrays:
    return {name: np.zeros((0, *shape), dtype) for name, (dtype, shape) in FRAME_ARRAYS.items()}


def _sources(segment: Segment, log: Log, cameras: DeviceCameras, made: Assembled) -> list[_Source]:
    """Return the video of `img`, and that of `big_img` if it differs, chosen as in modeld.py."""

    def source(name: str, index: str, camera: Camera) -> _Source:
        return _Source(VideoReader(segment.files[name]), camera, frame_table(log, index))

    files, wide = segment.files, cameras.wide
    if ROAD in files:
        found = [source(ROAD, "road", cameras.road)]
        if wide is not None and WIDE in files:
            return [*found, source(WIDE, "wideRoad", wide)]
        if wide is not None:
            made.notes.append(f"no {WIDE}: big_img is of the road camera")
        return found
    if wide is not None and WIDE in files:
        made.notes.append(f"no {ROAD}: img is of the wide camera")
        return [source(WIDE, "wideRoad", wide)]
    if QUICK in files:
        made.notes.append(f"only {QUICK}: small pictures, and big_img is of the road camera")
        return [source(QUICK, "qRoad", cameras.road)]
    return []


def _fill(
    made: Assembled,
    sources: list[_Source],
    signals: Signals,
    log: Log,
    sampling: Sampling,
    batch_size: int,
) -> None:
    """Fill in the arrays of all frames for which every input exists."""
    table = sources[0].table
    kept: list[int] = []
    images = {n: np.empty((len(table), *FRAME_SHAPE), np.uint8) for n in ("img", "big_img")}
    batch: list[tuple[int, list[Bytes]]] = []

    def flush() -> None:
        if batch:
            for name, packed in _warped(batch, sources, signals, sampling, batch_size).items():
                images[name][len(kept) : len(kept) + len(batch)] = packed
            kept.extend(row for row, _ in batch)
            batch.clear()

    for row, pictures in _pictures(sources, log, made.skipped):
        reason = next((why for why, missing in signals.missing.items() if missing[row]), None)
        if reason is not None:
            made.skipped[reason] += 1
            continue
        batch.append((row, pictures))
        if len(batch) == batch_size:
            flush()
    flush()
    rows = np.array(kept, np.int64)
    made.arrays |= {name: array[rows] for name, array in signals.arrays.items()}
    made.arrays |= {"frame_id": table.frame_id[rows], "mono_time": table.eof[rows]}
    made.arrays["run"] = runs(made.arrays["frame_id"])
    made.arrays |= {name: packed[: len(kept)] for name, packed in images.items()}


def _pictures(
    sources: list[_Source], log: Log, skipped: Counter[str]
) -> Iterator[tuple[int, list[Bytes]]]:
    """Yield rows of the first source's table with the pictures of that time from each source."""
    main = sources[0]
    if len(sources) == 1:
        for row, frame in _known(main, log, skipped):
            yield row, [frame.image]
        return
    other = sources[1]
    partners = together(main.table, other.table)
    others = _known(other, log, skipped)
    place, picture = -1, None
    for row, frame in _known(main, log, skipped):
        partner = partners[row]
        while place < partner:
            place, found = next(others, (len(other.table), None))
            picture = found.image if found is not None else None
        if partner < 0 or place != partner or picture is None:
            skipped["without a picture of the wide camera"] += 1
            continue
        yield row, [frame.image, picture]
    for _ in others:  # read to the end, so that problems there are reported
        pass


def _known(source: _Source, log: Log, skipped: Counter[str]) -> Iterator[tuple[int, Decoded]]:
    """Yield the frames of a video that the log knows, with their rows in the table.

    Each video is decoded in a thread, in parallel with other videos and with warping.
    """
    return read_ahead(_decoded(source, log, skipped), _AHEAD)


def _decoded(source: _Source, log: Log, skipped: Counter[str]) -> Iterator[tuple[int, Decoded]]:
    reader, rows = source.reader, source.table.rows()
    sizes, keys = reader.scan()
    # Only a raw stream can merge or split packets; a container keeps them apart.
    raw = reader.path.suffix == ".hevc"
    places = match_packets(sizes, keys, source.table) if raw else np.arange(len(sizes))
    if places is None:
        log.problems[f"sizes in the log are not those of {reader.path.name}"] += 1
        places = np.arange(len(sizes))
    source.last = int(places.max(initial=-1))
    # Frames after a lost packet cannot be decoded correctly.
    follows = np.diff(places, prepend=-1) == 1
    for frame in reader.frames(np.flatnonzero((places < 0) | ~follows).tolist()):
        row = rows.get(int(places[frame.place]))
        if row is None:
            skipped[f"{reader.path.name}: not in the log"] += 1
        else:
            source.seen.add(row)
            yield row, frame


def _warped(
    batch: list[tuple[int, list[Bytes]]],
    sources: list[_Source],
    signals: Signals,
    sampling: Sampling,
    batch_size: int,
) -> dict[str, Bytes]:
    """Warp a batch to `img` and `big_img`.

    The last batch is padded, so that there is one program.
    """
    count = len(batch)
    filled = batch + [batch[-1]] * (batch_size - count)
    rpy = signals.arrays["rpy_calib"][[row for row, _ in filled]]
    made = {}
    for name, source in (("img", sources[0]), ("big_img", sources[-1])):
        pictures = np.stack([pictures[-1 if name == "big_img" else 0] for _, pictures in filled])
        size = (source.reader.width, source.reader.height)
        full = (source.camera.width, source.camera.height)
        intrinsics = geometry.scaled_intrinsics(source.camera.intrinsics, full, size)
        matrices = geometry.warp_matrix(rpy, intrinsics, big=name == "big_img")
        packed = prepare_frames(pictures, matrices, size, sampling=sampling)
        made[name] = np.asarray(packed)[:count]
    return made


def _report(source: _Source, made: Assembled, log: Log) -> None:
    """Record the problems of a video after it was read to its end."""
    reader, name = source.reader, source.reader.path.name
    if reader.problem:
        log.problems[reader.problem] += 1
    if not len(source.table):
        log.problems[f"the log has no index of {name}"] += 1
    lost = np.setdiff1d(np.arange(len(source.table)), list(source.seen))
    behind = int((source.table.place[lost] > source.last).sum())
    for reason, count in (("breaks off before them", behind), ("damaged", len(lost) - behind)):
        if count:
            made.skipped[f"{name}: {reason}"] += count
    full = (source.camera.width, source.camera.height)
    size = (reader.width, reader.height)
    if size not in ((0, 0), full):
        made.notes.append(
            f"{name} is {size[0]}x{size[1]}, its camera {full[0]}x{full[1]}: taken as resized"
        )
