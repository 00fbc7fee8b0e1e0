"""The match of a video's frames with the log's, by the encoder's index, never by position.

roadEncodeIdx has the place in the file and the id of each frame that was written. Everything else
in a log is matched by that id or by time. An encoder may have dropped frames, a file may begin late
or break off, and a log may begin with events of the minute before.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recipes.openpilot.logs import Log, Table

Ints = NDArray[np.int64]
# A parser may split the stream at another byte of the start code than the encoder, and the first
# frame includes the header of the file.
_CUT, _HEAD = 4, 1024  # bytes
_FURTHEST = 600  # frames that may be lost in one place
# The cameras of a device take pictures within a few milliseconds of each other.
_TOGETHER = 25_000_000  # ns, half of the time between two frames


@dataclass(frozen=True)
class FrameTable:
    """The frames of one video file that the log has.

    Attributes:
        place: (n,) positions in the file, increasing.
        frame_id: (n,) ids of the camera, increasing.
        sof: (n,) ns, when the frame begins.
        eof: (n,) ns, when it ends.
        size: (n,) bytes in the file, 0 where the log does not say.
    """

    place: Ints
    frame_id: Ints
    sof: Ints
    eof: Ints
    size: Ints

    def __len__(self) -> int:
        return len(self.place)

    def rows(self) -> dict[int, int]:
        """Return rows by their place in the file."""
        return {int(place): row for row, place in enumerate(self.place)}


def frame_table(log: Log, camera: str) -> FrameTable:
    """Return the table of a camera's file from a log.

    Args:
        log: Log of the segment. Problems are added to it.
        camera: "road", "wideRoad" or "qRoad".
    """
    index = _of_one_segment(log.tables[f"{camera}EncodeIdx"], log.problems, camera)
    index = _unique(index, log.problems, camera)
    states = log.tables["wideRoadCameraState" if camera == "wideRoad" else "roadCameraState"]
    sof, eof = (_times(index, states, name) for name in ("sof", "eof"))
    known = eof > 0
    if not known.all():
        log.problems[f"frames of {camera} without a time"] += int((~known).sum())
    # Logs from before encoders recorded the start of frames lack it in the camera's events, too.
    sof = np.where(sof > 0, sof, eof)
    order = np.flatnonzero(known)
    growing = np.diff(index["frame_id"][order], prepend=-1) > 0
    if not growing.all():
        log.problems[f"frames of {camera} whose ids do not grow"] += int((~growing).sum())
        order = order[growing]
    columns = (index["place"], index["frame_id"], sof, eof, index["size"])
    return FrameTable(*(column[order].astype(np.int64) for column in columns))


def _of_one_segment(index: Table, problems: Counter[str], camera: str) -> Table:
    """Return the index without entries of the minute before or after."""
    if not len(index):
        return index
    numbers, counts = np.unique(index["segment"], return_counts=True)
    own = index["segment"] == numbers[counts.argmax()]
    if not own.all():
        problems[f"frames of {camera} of another segment"] += int((~own).sum())
    return index[own]


def _unique(index: Table, problems: Counter[str], camera: str) -> Table:
    """Return the index sorted by place, without places for which it names different frames."""
    index = index[np.lexsort((index["frame_id"], index["place"]))]
    pairs = np.stack([index["place"], index["frame_id"]], axis=1)
    _, first = np.unique(pairs, axis=0, return_index=True)
    index = index[np.sort(first)]
    places, counts = np.unique(index["place"], return_counts=True)
    doubtful = np.isin(index["place"], places[counts > 1])
    if doubtful.any():
        problems[f"places of {camera} with several frames"] += int(doubtful.sum())
    return index[~doubtful]


def _times(index: Table, states: Table, name: str) -> Ints:
    """Return times from the index, or from the camera's own events where the index has none."""
    found = index[name].astype(np.int64)
    if not len(states) or (found > 0).all():
        return found
    by_id = {int(row["frame_id"]): int(row[name]) for row in states}
    stated = np.array([by_id.get(int(one), 0) for one in index["frame_id"]], np.int64)
    return np.where(found > 0, found, stated)


def match_packets(sizes: Ints, keys: NDArray[np.bool_], table: FrameTable) -> Ints | None:
    """Return the place in the log of each packet of a file, matched by size in bytes.

    A file that lost the start of a frame has one packet less, so that counting packets would shift
    all later ones.

    Args:
        sizes: (n,) bytes of the packets.
        keys: (n,) whether they are key frames.
        table: Table of the file from the log.

    Returns:
        (n,) places, -1 for a packet that is no frame of the encoder; None if the sizes in the log
        are of something else. Packets are counted where the log has no size.
    """
    known = {int(p): int(s) for p, s in zip(table.place, table.size, strict=True) if s > 0}

    def fits(packet: int, place: int) -> bool:
        more = int(sizes[packet]) - known.get(place, int(sizes[packet]))
        return abs(more) <= _CUT or (bool(keys[packet]) and 0 <= more <= _HEAD)

    places = np.full(len(sizes), -1)
    place, matched = 0, 0
    for packet in range(len(sizes)):
        if not fits(packet, place):
            place = _next_place(fits, packet, place, len(sizes), known)
        if place < 0:
            # A fragment of a frame. The next packet is the first that may be complete.
            place = ~place
            continue
        places[packet] = place
        matched += place in known
        place += 1
    return places if 2 * matched >= min(len(known), len(sizes)) else None


def _next_place(
    fits: Callable[[int, int], bool], packet: int, place: int, count: int, known: dict[int, int]
) -> int:
    """Return the first later place that fits a packet and the next one.

    Return the complement of the place to resume from if there is none.
    """
    for other in range(place + 1, place + _FURTHEST):
        if other not in known:
            continue
        after = packet + 1 >= count or other + 1 not in known or fits(packet + 1, other + 1)
        if fits(packet, other) and after:
            return other
    return ~place


def together(frames: FrameTable, others: FrameTable) -> Ints:
    """Return, for each frame, the row of the other camera's frame taken with it, or -1.

    Args:
        frames: (n,) frames.
        others: Frames of the other camera.

    Returns:
        (n,).
    """
    if not len(others):
        return np.full(len(frames), -1)
    right = np.clip(np.searchsorted(others.sof, frames.sof), 1, max(1, len(others) - 1))
    pair = np.stack([right - 1, np.minimum(right, len(others) - 1)])
    away = np.abs(others.sof[pair] - frames.sof)
    nearest = np.take_along_axis(pair, away.argmin(axis=0)[None], axis=0)[0]
    return np.where(away.min(axis=0) < _TOGETHER, nearest, -1)


def runs(frame_ids: Ints) -> NDArray[np.int32]:
    """Return (T,) the number of the unbroken run that each frame is in."""
    if not len(frame_ids):
        return np.zeros(0, np.int32)
    return np.cumsum(np.diff(frame_ids, prepend=frame_ids[0]) > 1).astype(np.int32)


def latest(table: Table, times: Ints) -> Ints:
    """Return, for each time, the last row that is not after it, or -1."""
    return np.searchsorted(table["time"], times, "right").astype(np.int64) - 1
