"""Decoded frames: their bytes, their places, and what is not whole."""

from pathlib import Path

import numpy as np
import pytest

from recipes.openpilot import make_data
from recipes.openpilot.joining import FrameTable, match_packets
from recipes.openpilot.video import VideoReader, read_ahead

av = pytest.importorskip("av")
SIZE = (64, 48)


def noise(count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, 64 * 48 * 3 // 2, dtype=np.uint8) for _ in range(count)]


def lossless(path: Path, images: list[np.ndarray], **more: str) -> None:
    """As `make_data.encode`, but every byte comes back."""
    with av.open(str(path), "w", format="hevc") as file:
        parameters = "log-level=none:bframes=0:lossless=1" + "".join(
            f":{name}={value}" for name, value in more.items()
        )
        options = {"preset": "ultrafast", "tune": "zerolatency", "x265-params": parameters}
        stream = file.add_stream("libx265", rate=20, options=options)
        stream.width, stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        for number, image in enumerate(images):
            frame = av.VideoFrame.from_ndarray(image.reshape(-1, SIZE[0]), format="yuv420p")
            frame.pts = number
            file.mux(stream.encode(frame))
        file.mux(stream.encode())


@pytest.mark.parametrize("limits", ["limited", "full"])
def test_the_bytes_are_the_encoders(tmp_path: Path, limits: str):
    """Also of a stream that says it uses all of 0 to 255: nothing is stretched."""
    images = noise(4)
    lossless(tmp_path / "fcamera.hevc", images, range=limits)
    reader = VideoReader(tmp_path / "fcamera.hevc")
    found = list(reader.frames())
    assert [frame.place for frame in found] == [0, 1, 2, 3]
    for frame, image in zip(found, images, strict=True):
        np.testing.assert_array_equal(frame.image, image)
    assert (reader.width, reader.height, reader.packets) == (64, 48, 4)
    assert (reader.problem, reader.damaged) == ("", set())
    sizes, keys = VideoReader(tmp_path / "fcamera.hevc").scan()
    assert sizes.tolist() == [frame.packet_size for frame in found]
    assert keys.tolist()[0]


def test_sizes_of_frames_are_those_in_the_file(tmp_path: Path):
    path = tmp_path / "a.hevc"
    written = make_data.encode(path, noise(30), SIZE)
    sizes, keys = VideoReader(path).scan()
    assert sizes.tolist() == written
    assert np.flatnonzero(keys).tolist() == [0, 20]
    assert sum(written) == path.stat().st_size


def test_frames_that_follow_on_broken_ones_are_left_out(tmp_path: Path):
    path = tmp_path / "a.hevc"
    make_data.encode(path, noise(45), SIZE)
    reader = VideoReader(path)
    assert [f.place for f in reader.frames([7])] == [*range(7), *range(20, 45)]
    assert reader.damaged == set(range(7, 20))


def test_a_file_that_is_not_there_is_a_problem(tmp_path: Path):
    reader = VideoReader(tmp_path / "fcamera.hevc")
    assert list(reader.frames()) == []
    assert reader.problem == "fcamera.hevc cannot be read further: No such file or directory"


def test_other_pixels_are_a_problem(tmp_path: Path):
    path = tmp_path / "a.hevc"
    with av.open(str(path), "w", format="hevc") as file:
        stream = file.add_stream("libx265", rate=20, options={"x265-params": "log-level=none"})
        stream.width, stream.height, stream.pix_fmt = *SIZE, "yuv422p"
        file.mux(stream.encode(av.VideoFrame(*SIZE, "yuv422p")))
        file.mux(stream.encode())
    reader = VideoReader(path)
    assert list(reader.frames()) == []
    assert reader.problem == (
        "a.hevc cannot be used further: its pixels are yuv422p, expected yuv420p"
    )


# Which place of the log each packet has.


def table(sizes: list[int], places: list[int] | None = None) -> FrameTable:
    count = len(sizes)
    placed = np.arange(count) if places is None else np.array(places)
    return FrameTable(placed, placed, placed, placed, np.array(sizes))


def matched(sizes: list[int], logged: FrameTable, keys: tuple[int, ...] = (0,)) -> list[int] | None:
    is_key = np.isin(np.arange(len(sizes)), keys)
    found = match_packets(np.array(sizes), is_key, logged)
    return None if found is None else found.tolist()


LOGGED = [900, 310, 320, 330, 340, 350, 360]


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        (LOGGED, [0, 1, 2, 3, 4, 5, 6]),
        ([990, *LOGGED[1:]], [0, 1, 2, 3, 4, 5, 6]),  # with what heads the file
        ([900, 310, 317, 330, 343, 350, 360], [0, 1, 2, 3, 4, 5, 6]),  # start codes
        ([900, 310, 650, 340, 350, 360], [0, 1, -1, 4, 5, 6]),  # two in one
        ([900, 310, 340, 350, 360], [0, 1, 4, 5, 6]),  # two are gone
        ([900, 310, 320, 111], [0, 1, 2, -1]),  # the end is cut
        ([900, 310, 55, 320, 330, 340, 350, 360], [0, 1, -1, 2, 3, 4, 5, 6]),  # one too many
    ],
)
def test_packets_have_the_place_of_their_size(sizes: list[int], places: list[int]):
    assert matched(sizes, table(LOGGED)) == places


def test_places_that_the_log_lost_are_counted():
    logged = table([900, 310, 350, 360], [0, 1, 5, 6])
    assert matched(LOGGED, logged) == [0, 1, 2, 3, 4, 5, 6]
    assert matched(LOGGED, table([0] * 7)) == [0, 1, 2, 3, 4, 5, 6]
    assert matched(LOGGED, table([])) == [0, 1, 2, 3, 4, 5, 6]


def test_sizes_of_something_else_are_none():
    assert matched(LOGGED, table([50 * n + 5000 for n in range(7)])) is None


# Reading ahead.


def test_items_come_in_order_a_few_ahead():
    made: list[int] = []

    def numbers():
        for number in range(20):
            made.append(number)
            yield number

    taken = []
    for number in read_ahead(numbers(), 3):
        taken.append(number)
        assert len(made) <= len(taken) + 4
    assert taken == list(range(20))
    assert list(read_ahead(iter(()), 3)) == []


def test_errors_of_what_is_read_ahead_are_raised_where_it_is_used():
    def broken():
        yield 1
        raise ValueError("broken")

    found = read_ahead(broken(), 4)
    assert next(found) == 1
    with pytest.raises(ValueError, match="broken"):
        next(found)
