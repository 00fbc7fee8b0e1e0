"""mp4 files: what is written is read, and nothing is left half written."""

import errno
from pathlib import Path

import numpy as np
import pytest

from recipes.hunyuan_video import video
from tpuport.foundation.errors import CheckpointError, UsageError


def road(frames: int = 9, height: int = 48, width: int = 64) -> np.ndarray:
    """A square that moves, uint8 (F, H, W, 3)."""
    made = np.full((frames, height, width, 3), 90, np.uint8)
    for number in range(frames):
        made[number, 8:24, 4 * number : 4 * number + 16] = (200, 60, 40)
    return made


def test_frames_come_back(tmp_path: Path):
    path, frames = tmp_path / "deep" / "road.mp4", road()
    video.write_video(path, frames, quality=4, about={"prompt": 'ein "Wort" ö snow', "seed": 3})
    found, about = video.read_video(path)
    assert found.shape == frames.shape
    assert about == {"prompt": 'ein "Wort" ö snow', "seed": 3}
    assert video.psnr(found, frames) > 30
    # Frames are in their order: each is nearest to itself.
    errors = np.abs(found[:, None].astype(int) - frames[None].astype(int)).mean(axis=(2, 3, 4))
    np.testing.assert_array_equal(errors.argmin(axis=1), np.arange(9))


def test_a_player_is_told_the_rate(tmp_path: Path):
    av = pytest.importorskip("av")
    video.write_video(tmp_path / "a.mp4", road(), fps=24)
    with av.open(str(tmp_path / "a.mp4")) as file:
        stream = file.streams.video[0]
        assert (stream.codec_context.name, stream.average_rate, stream.frames) == ("h264", 24, 9)
        assert stream.pix_fmt == "yuv420p"


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (np.zeros((2, 16, 16, 3)), "expected uint8"),
        (np.zeros((2, 16, 16), np.uint8), "expected uint8"),
        (np.zeros((0, 16, 16, 3), np.uint8), "expected some of even sides"),
        (np.zeros((2, 15, 16, 3), np.uint8), "expected some of even sides"),
    ],
)
def test_other_shapes_are_refused(tmp_path: Path, frames: np.ndarray, message: str):
    with pytest.raises(UsageError, match=message):
        video.write_video(tmp_path / "a.mp4", frames)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    av = pytest.importorskip("av")
    path = tmp_path / "a.mp4"
    video.write_video(path, road())
    old = path.read_bytes()

    def full(*args: object, **options: object) -> None:
        raise av.error.FFmpegError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(av, "open", full)
    with pytest.raises(CheckpointError, match=r"the disk is full.*the old one is as it was"):
        video.write_video(path, road(5))
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["a.mp4"]


def test_what_is_no_video_is_refused(tmp_path: Path):
    path = tmp_path / "a.mp4"
    path.write_bytes(b"not a video" * 50)
    with pytest.raises(UsageError, match=r"a\.mp4 is no video that can be read"):
        video.read_video(path)
    with pytest.raises(UsageError, match=r"missing\.mp4 is no video"):
        video.read_video(tmp_path / "missing.mp4")


def test_two_are_shown_beside_each_other():
    left, right = road(9), road(5)[:, :, ::-1]
    both = video.side_by_side(left, right)
    assert both.shape == (5, 48, 128, 3)
    np.testing.assert_array_equal(both[:, :, :64], left[:5])
    np.testing.assert_array_equal(both[:, :, 64:], right)
    with pytest.raises(UsageError, match="64x48 and 32x48: expected one size"):
        video.side_by_side(left, road(9, 48, 32))


def test_how_far_two_are_from_each_other():
    one = road()
    assert video.psnr(one, one) == float("inf")
    # An error of 1 everywhere.
    assert video.psnr(one, one + 1) == pytest.approx(20 * np.log10(255))


def test_floats_become_bytes():
    values = np.array([-2, -1, 0, 0.5, 1, 3], np.float32)
    found = video.to_frames(np.broadcast_to(values, (3, 1, 2, 6)))
    assert found.shape == (1, 2, 6, 3)
    np.testing.assert_array_equal(found[0, 0, :, 0], [0, 0, 128, 191, 255, 255])
