"""Conversion of frames to mp4 files and back."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from recipes import packages
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_file, replacing_folder

FRAMES_A_SECOND = 24
Frames = np.ndarray[Any, Any]


def write_video(
    path: str | Path,
    frames: Frames,
    *,
    fps: int = FRAMES_A_SECOND,
    quality: int = 18,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write frames as H.264 in an mp4 file that players and browsers show, atomically.

    Args:
        path: File name that ends in .mp4.
        frames: uint8 (F, H, W, 3), height and width even.
        fps: Frames per second.
        quality: x264's constant rate factor. 0 is lossless except for halved colour resolution.
        about: Metadata for the file's comment, as JSON: prompt, seed, versions.

    Raises:
        UsageError: The frames have another shape.
        CheckpointError: The disk is full.
        MissingExtraError: PyAV is not installed.
    """
    av = packages.av()
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise UsageError(f"frames: expected uint8 (F, H, W, 3), got {frames.dtype} {frames.shape}")
    if not len(frames) or frames.shape[1] % 2 or frames.shape[2] % 2:
        raise UsageError(f"frames: expected some of even sides, got {frames.shape}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as temporary:
        with _errors_of(av, path), av.open(str(temporary), "w", format="mp4") as file:
            file.metadata["comment"] = json.dumps(dict(about or {}), ensure_ascii=False)
            stream = file.add_stream("libx264", rate=fps, options={"crf": str(quality)})
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = "yuv420p"
            stream.time_base = Fraction(1, fps)
            for frame in frames:
                image = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
                file.mux(stream.encode(image))
            file.mux(stream.encode())


def read_video(path: str | Path) -> tuple[Frames, dict[str, Any]]:
    """Return the frames of a video, uint8 (F, H, W, 3), and the metadata of `write_video`.

    Raises:
        UsageError: The file is no video.
        MissingExtraError: PyAV is not installed.
    """
    av = packages.av()
    try:
        with av.open(str(path)) as file:
            frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
            said = file.metadata.get("comment", "{}")
    except (OSError, av.error.FFmpegError, IndexError) as error:
        raise UsageError(f"{path} is no video that can be read: {error}") from error
    if not frames:
        raise UsageError(f"{path} has no frames")
    try:
        about = json.loads(said)
    except ValueError:
        about = {"comment": said}
    return np.stack(frames), about if isinstance(about, dict) else {"comment": said}


def write_frames(folder: Path, frames: Frames, about: Mapping[str, Any] | None = None) -> None:
    """Write each frame as a PNG file, `00000.png` and so on, and `about.json`, atomically.

    Args:
        folder: Folder to write to. Its contents are replaced.
        frames: uint8 (F, H, W, 3).
        about: Metadata of the video: prompt, seed, versions.

    Raises:
        CheckpointError: The disk is full.
    """
    from PIL import Image

    folder.parent.mkdir(parents=True, exist_ok=True)
    with replacing_folder(folder, keep=lambda name: False) as temporary:
        for number, frame in enumerate(frames):
            Image.fromarray(frame).save(temporary / f"{number:05}.png")
        text = json.dumps(dict(about or {}), ensure_ascii=False, indent=1)
        (temporary / "about.json").write_text(text + "\n", encoding="utf-8")


def side_by_side(left: Frames, right: Frames) -> Frames:
    """Join two videos of one size side by side, as long as the shorter.

    Raises:
        UsageError: Their sizes differ.
    """
    if left.shape[1:] != right.shape[1:]:
        raise UsageError(
            f"The videos are {left.shape[2]}x{left.shape[1]} and {right.shape[2]}x{right.shape[1]}:"
            " expected one size"
        )
    length = min(len(left), len(right))
    return np.concatenate([left[:length], right[:length]], axis=2)


def psnr(left: Frames, right: Frames, peak: float = 255) -> float:
    """Return the peak signal-to-noise ratio in dB, of uint8 by default; infinite if equal."""
    error = np.mean((left.astype(np.float64) - right.astype(np.float64)) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(peak**2 / error))


def to_frames(video: Any) -> Frames:
    """Convert the decoder's floats (3, F, H, W) in [-1, 1] to uint8 (F, H, W, 3)."""
    values = np.asarray(video, np.float32).transpose(1, 2, 3, 0)
    return np.round(np.clip(values / 2 + 0.5, 0, 1) * 255).astype(np.uint8)


@contextmanager
def _errors_of(av: Any, path: Path) -> Iterator[None]:
    """Raise FFmpeg's errors as the operating system's where possible, such as a full disk."""
    try:
        yield
    except av.error.FFmpegError as error:
        if error.errno is not None and error.errno > 0:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise UsageError(f"{path} cannot be written: {error}") from error
