"""Frames of a segment's video, decoded once in order, each with its place in the file.

A raw HEVC file has no times, and a decoder drops a broken frame silently. So every packet is
numbered before it is decoded, and frames carry the number of their packet. Damage that still makes
a valid stream shows only in the picture: HEVC of devices has no checksums.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from recipes.packages import av

Bytes = NDArray[np.uint8]
Item = TypeVar("Item")
# They differ in the range of brightness only, and only the bytes are used.
_FORMATS = ("yuv420p", "yuvj420p")


@dataclass(frozen=True)
class Decoded:
    """One decoded frame.

    Attributes:
        place: Position in the file, from 0, in the order in which frames are shown.
        image: (height * width * 3 / 2,): Y, then U, then V, unchanged from the camera.
        packet_size: Size in the file in bytes.
    """

    place: int
    image: Bytes
    packet_size: int


@dataclass
class VideoReader:
    """A video file that is read from its start.

    Attributes:
        path: The file.
        width: Width in pixels, 0 until a frame is read.
        height: Height in pixels, 0 until a frame is read.
        packets: Number of frames in the file, as far as it was read.
        damaged: Places of frames that are left out: broken, or predicted from a broken one.
        problem: The reason why the file ended early, or "".
    """

    path: Path
    width: int = 0
    height: int = 0
    packets: int = 0
    damaged: set[int] = field(default_factory=set)
    problem: str = ""

    def scan(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the size of each packet and whether it is a key frame, (n,), without decoding.

        Raises:
            MissingExtraError: PyAV is not installed.
        """
        found = [(packet.size, packet.is_keyframe) for _, packet in self._packets() if packet.size]
        self.packets = len(found)
        sizes, keys = zip(*found, strict=True) if found else ((), ())
        return np.array(sizes, np.int64), np.array(keys, bool)

    def frames(self, broken: Iterable[int] = ()) -> Iterator[Decoded]:
        """Yield all intact frames, in order.

        Args:
            broken: Packets that are known to be incomplete, or to follow on a lost one.

        Raises:
            MissingExtraError: PyAV is not installed.
        """
        try:
            yield from self._decode(list(broken))
        except ValueError as error:
            self.problem = f"{self.path.name} cannot be used further: {error}"

    def _packets(self) -> Iterator[tuple[Any, Any]]:
        """Yield streams and packets, as far as the file can be read."""
        try:
            with av().open(str(self.path), format=_container(self.path)) as file:
                if not file.streams.video:
                    self.problem = f"{self.path.name} has no video"
                    return
                stream = file.streams.video[0]
                # With one thread, an error is raised for the packet that was given last.
                stream.codec_context.thread_count = 1
                # Otherwise some damage is decoded silently.
                stream.codec_context.options = {"err_detect": "explode"}
                for packet in file.demux(stream):
                    yield stream, packet
        except (OSError, av().error.FFmpegError) as error:
            said = getattr(error, "strerror", None) or error
            self.problem = f"{self.path.name} cannot be read further: {said}"

    def _decode(self, broken: list[int]) -> Iterator[Decoded]:
        sizes: list[int] = []
        keys: list[int] = []
        for _, packet in self._packets():
            place = len(sizes)
            if packet.size:
                if packet.is_keyframe:
                    keys.append(place)
                sizes.append(packet.size)
                self.packets = len(sizes)
                packet.pts = packet.dts = place
            try:
                shown = packet.decode()
            except av().error.FFmpegError:
                broken.append(place)
                self.damaged.add(place)
                continue
            for frame in shown:
                if frame.is_corrupt:
                    broken.append(frame.pts)
                if self._is_whole(frame, keys, broken):
                    yield Decoded(frame.pts, self._image(frame), sizes[frame.pts])
                else:
                    self.damaged.add(frame.pts)

    def _is_whole(self, frame: Any, keys: list[int], broken: list[int]) -> bool:
        """Return whether no packet from the last key frame to this frame is broken."""
        start = max((key for key in keys if key <= frame.pts), default=None)
        return start is not None and not any(start <= place <= frame.pts for place in broken)

    def _image(self, frame: Any) -> Bytes:
        if frame.format.name not in _FORMATS:
            raise ValueError(f"its pixels are {frame.format.name}, expected {_FORMATS[0]}")
        if not self.width:
            self.width, self.height = frame.width, frame.height
        if (frame.width, frame.height) != (self.width, self.height):
            raise ValueError("the size of its frames changes")
        image = np.empty(self.width * self.height * 3 // 2, np.uint8)
        start = 0
        for plane in frame.planes:
            rows = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)
            end = start + plane.height * plane.width
            part = image[start:end].reshape(plane.height, plane.width)
            part[:] = rows[: plane.height, : plane.width]
            start = end
        return image


def read_ahead(items: Iterator[Item], count: int) -> Iterator[Item]:
    """Yield the same items, up to `count` of which a thread has made ahead of time."""
    end: Any = object()
    with ThreadPoolExecutor(1) as pool:
        waiting = deque(pool.submit(next, items, end) for _ in range(count))
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, items, end))
            yield item


def _container(path: Path) -> str | None:
    """Return the format of raw HEVC, which has no header to recognise it by."""
    return "hevc" if path.suffix == ".hevc" else None
