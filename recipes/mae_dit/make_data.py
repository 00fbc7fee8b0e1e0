"""Small data in real formats: JPEGs of shapes whose class is the kind of shape."""

import io
import tarfile
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw

from recipes.mae_dit import parquet
from recipes.records import check_record
from tpuport.foundation.files import replacing_file

SHAPES = ("circle", "square", "triangle", "cross")
Layout = Literal["folder", "tar", "parquet"]
_PER_FILE = 64


def draw(rng: np.random.Generator, label: int, size: int) -> Image.Image:
    """Draw a shape somewhere on a smooth background."""
    noise = rng.integers(0, 256, (3, 3, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((size, size), Image.Resampling.BICUBIC)
    pen, radius = ImageDraw.Draw(image), size * rng.uniform(0.18, 0.32)
    x, y = rng.uniform(radius, size - radius, 2)
    color = tuple(int(v) for v in rng.integers(0, 256, 3))
    box = (x - radius, y - radius, x + radius, y + radius)
    match SHAPES[label]:
        case "circle":
            pen.ellipse(box, fill=color)
        case "square":
            pen.rectangle(box, fill=color)
        case "triangle":
            pen.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=color)
        case _:
            thin = radius / 3
            pen.rectangle((box[0], y - thin, box[2], y + thin), fill=color)
            pen.rectangle((x - thin, box[1], x + thin, box[3]), fill=color)
    return image


def make_data(
    out: Path, *, count: int, size: int, layout: Layout = "folder", seed: int = 0
) -> dict[str, int]:
    """Write images for training and a quarter as many for validation.

    Args:
        out: Folder; it gets "train" and "val".
        count: Images for training.
        size: Pixels of a side.
        layout: Folders of classes, or tar shards or parquet files of 64 images.
        seed: Random seed.

    Returns:
        The number of images by split.

    Raises:
        UsageError: The folder has other images.
        CheckpointError: The disk is full.
    """
    record = {"count": count, "size": size, "layout": layout, "seed": seed}
    begun = any((out / split).is_dir() for split in ("train", "val"))
    what = "give the command that it was begun with, or another folder"
    check_record(out / "record.json", record, begun=begun, what_to_do=what, replace_unused=True)
    rng, made = np.random.default_rng(seed), {}
    for split, number in (("train", count), ("val", max(count // 4, 1))):
        files = []
        for index in range(number):
            content, label = io.BytesIO(), index % len(SHAPES)
            draw(rng, label, size).save(content, "JPEG", quality=92)
            files.append((f"{split}_{index:06d}", label, content.getvalue()))
        folder = out / split
        folder.mkdir(parents=True, exist_ok=True)
        write = {"folder": _write_folder, "tar": _write_shards, "parquet": _write_tables}[layout]
        write(folder, files)
        made[split] = number
    return made


def _write_folder(folder: Path, files: list[tuple[str, int, bytes]]) -> None:
    for name, label, content in files:
        path = folder / f"{label}_{SHAPES[label]}" / f"{name}.JPEG"
        path.parent.mkdir(exist_ok=True)
        with replacing_file(path) as temporary:
            temporary.write_bytes(content)


def _write_shards(folder: Path, files: list[tuple[str, int, bytes]]) -> None:
    for start in range(0, len(files), _PER_FILE):
        path = folder / f"{start // _PER_FILE:06d}.tar"
        with replacing_file(path) as temporary, tarfile.open(temporary, "w") as shard:
            for name, label, content in files[start : start + _PER_FILE]:
                for suffix, part in (("jpg", content), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{name}.{suffix}")
                    member.size = len(part)
                    shard.addfile(member, io.BytesIO(part))


def _write_tables(folder: Path, files: list[tuple[str, int, bytes]]) -> None:
    count = -(-len(files) // _PER_FILE)
    for number in range(count):
        path = folder / f"{folder.name}-{number:05d}-of-{count:05d}.parquet"
        with replacing_file(path) as temporary:
            rows = files[number * _PER_FILE : (number + 1) * _PER_FILE]
            parquet.write(temporary, rows, SHAPES)
