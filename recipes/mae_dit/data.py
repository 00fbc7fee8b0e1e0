"""Images with labels, from folders of classes, tar shards or parquet files, as batches."""

import io
import re
import struct
import tarfile
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from recipes.mae_dit import parquet
from recipes.mae_dit.config import Config
from tpuport.foundation.errors import UsageError
from tpuport.training import Batches

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
_MASK = "sample_mask"
_NAME = re.compile(r"imagenet(MAE|DiT|VAE|weak|)(\d+)x\2")
_RATIO = (3 / 4, 4 / 3)
# What Pillow raises for damaged files, by their format and the place of the damage.
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, struct.error, zlib.error),
    Image.DecompressionBombError,
)


@dataclass(frozen=True)
class Entry:
    """An image file: all of a file, or a part of a tar shard.

    Attributes:
        path: The file.
        label: Number of its class.
        start: Its first byte in the file.
        size: Its bytes, or None for all.
    """

    path: Path
    label: int
    start: int = 0
    size: int | None = None

    def read(self) -> bytes:
        """Return the bytes of the image."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(-1 if self.size is None else self.size)


def find(root: Path, split: str | None = None) -> list[Entry | parquet.TableEntry]:
    """Return the images below a folder, in order.

    They are in tar shards if it has some, else in parquet files, else in folders of classes.

    Args:
        root: The folder.
        split: Of parquet files those with this name, if they have names of splits.

    Raises:
        UsageError: There are none, or a file is damaged.
    """
    shards, tables = sorted(root.glob("*.tar")), parquet.files_of(root, split)
    found: list[Entry | parquet.TableEntry] = [one for shard in shards for one in _in_shard(shard)]
    if not shards:
        found += [one for table in tables for one in parquet.entries_of(table)]
    if not shards and not tables:
        folders = sorted(one for one in root.iterdir() if one.is_dir()) if root.is_dir() else []
        found += [
            Entry(path, label)
            for label, folder in enumerate(folders)
            for path in sorted(folder.rglob("*"))
            if path.suffix.lower() in SUFFIXES
        ]
    if not found:
        raise UsageError(
            f"{root}: there are neither tar shards, parquet files nor folders of classes with"
            " images. What to do: give the folder above the classes, or run make-data"
        )
    return found


def _in_shard(path: Path) -> list[Entry]:
    """Return the images of a shard, whose labels are in files NAME.cls beside NAME.jpg."""
    images, labels = {}, {}
    try:
        with tarfile.open(path, "r:") as shard:
            for member in shard:
                stem, dot, suffix = member.name.rpartition(".")
                if dot + suffix.lower() in SUFFIXES:
                    images[stem] = member.offset_data, member.size
                elif suffix == "cls":
                    content = shard.extractfile(member)
                    assert content is not None
                    labels[stem] = int(content.read())
    except (tarfile.TarError, OSError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}. What to do: write it again") from error
    if missing := [stem for stem in images if stem not in labels]:
        raise UsageError(f"{path}: {missing[0]}.cls is missing, the label of that image")
    return [Entry(path, labels[stem], *place) for stem, place in images.items()]


@dataclass(frozen=True)
class Crop:
    """Upstream's transform of images by its name, such as "imagenetMAE256x256".

    Attributes:
        kind: "MAE" crops and resizes at random, "VAE" and "weak" crop a larger image, "DiT" crops
            its middle, "" at random.
        size: Pixels of a side.
        train: Whether to draw; otherwise the middle is taken.
    """

    kind: str
    size: int
    train: bool

    def __call__(self, image: Image.Image) -> Image.Image:
        """Return the part of an image, by numpy's global generator."""
        if not self.train:
            return center_crop(image, self.size)
        if self.kind == "MAE":
            image = _random_resized(image, self.size)
        elif self.kind == "DiT":
            image = center_crop(image, self.size)
        else:
            larger = {"VAE": 1.5, "weak": 1.1, "": 1.0}[self.kind]
            image = _random_crop(_shorter(image, int(self.size * larger)), self.size)
        if self.kind != "VAE" and np.random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return image


def crop_of(config: Config, *, train: bool) -> Crop:
    """Return the transform of a configuration.

    Raises:
        UsageError: It is unknown.
    """
    name = config.dataset.transforms.type
    found = _NAME.fullmatch(name)
    if found is None:
        raise UsageError(
            f"dataset.transforms.type={name!r}: expected imagenet, then MAE, DiT, VAE, weak or"
            " nothing, and the size, such as imagenetMAE256x256"
        )
    return Crop(found[1], int(found[2]), train)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Return the middle square, shrunk by halves first as in ADM."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC
    )
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _shorter(image: Image.Image, size: int) -> Image.Image:
    scale = size / min(image.size)
    sides = max(size, int(image.width * scale)), max(size, int(image.height * scale))
    return image.resize(sides, Image.Resampling.BICUBIC)


def _random_crop(image: Image.Image, size: int) -> Image.Image:
    left = np.random.randint(image.width - size + 1)
    top = np.random.randint(image.height - size + 1)
    return image.crop((left, top, left + size, top + size))


def _random_resized(image: Image.Image, size: int) -> Image.Image:
    """Return a part of 20 to 100 % of the area with a ratio of 3:4 to 4:3, as torchvision does."""
    for _ in range(10):
        area = image.width * image.height * np.random.uniform(0.2, 1.0)
        ratio = np.exp(np.random.uniform(*np.log(_RATIO)))
        width, height = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < width <= image.width and 0 < height <= image.height:
            left = np.random.randint(image.width - width + 1)
            top = np.random.randint(image.height - height + 1)
            box = (left, top, left + width, top + height)
            return image.resize((size, size), Image.Resampling.BICUBIC, box)
    return center_crop(image, size)


class Pictures(torch.utils.data.Dataset[dict[str, Any]]):
    """The images of a folder as samples.

    A file that cannot be decoded is named in a warning. In training the next one takes its place,
    and "skipped" counts such files; otherwise the row is zeros, and "valid" is False.
    """

    def __init__(self, entries: list[Entry | parquet.TableEntry], crop: Crop) -> None:
        self.entries, self.crop = entries, crop

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample.

        Raises:
            UsageError: No file at all can be decoded.
            IndexError: There is no such file.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        size = self.crop.size
        for skipped in range(len(self.entries)):
            entry = self.entries[(index + skipped) % len(self.entries)]
            try:
                with Image.open(io.BytesIO(entry.read())) as file:
                    image = self.crop(file.convert("RGB"))
            except _DAMAGED as error:
                warnings.warn(f"{entry.path} at {entry.start}: {error}", stacklevel=2)
                if self.crop.train:
                    continue
                return _row(np.zeros((3, size, size), np.float32), entry.label, False, 1)
            pixels = np.asarray(image, np.float32).transpose(2, 0, 1) / np.float32(255)
            return _row(pixels, entry.label, True, skipped)
        raise UsageError(f"none of {len(self.entries)} images can be decoded")


def _row(pixels: Any, label: int, valid: bool, skipped: int) -> dict[str, Any]:
    return {
        "image": torch.from_numpy(np.ascontiguousarray(pixels)),
        "label": torch.tensor(label, dtype=torch.int32),
        "valid": torch.tensor(valid),
        "skipped": torch.tensor(skipped, dtype=torch.int32),
    }


def pictures(config: Config, root: str | Path | None, split: str, *, train: bool) -> Pictures:
    """Return the images of a split: those in ROOT/SPLIT, or in ROOT if that is no folder."""
    if root is None and config.dataset.root is None:
        raise UsageError("dataset.root is missing. What to do: give --data, the folder of images")
    folder = Path(root if root is not None else str(config.dataset.root))
    folder = folder / split if (folder / split).is_dir() else folder
    return Pictures(find(folder, split), crop_of(config, train=train))


def training_batches(
    config: Config, root: str | Path | None = None, *, workers: int = 0
) -> Batches:
    """Return the batches of updates, each of all accumulated parts."""
    found, size = pictures(config, root, "train", train=True), update_size(config)
    if len(found) < size:
        raise UsageError(
            f"{len(found)} images are less than one batch of {size}. What to do: --set"
            f" experiment.actual_batch_size={len(found)}"
        )
    return Batches(found, batch_size=size, shuffle=True, seed=config.seed, workers=workers)


def update_size(config: Config) -> int:
    """Return the images of an update, over all devices and accumulated parts."""
    given = config.experiment
    return given.actual_batch_size or given.batch_size * given.accu_step


def batches(
    config: Config,
    root: str | Path | None = None,
    *,
    split: str = "val",
    batch_size: int | None = None,
    workers: int = 0,
) -> Iterator[dict[str, torch.Tensor]]:
    """Return every image once, in order, in batches of one size.

    Each has "image" (B, 3, H, W), "label" (B,), and "valid" (B,), which is False for rows that fill
    the last batch and for files that cannot be decoded.
    """
    found = pictures(config, root, split, train=False)
    return batches_of(found, batch_size or config.experiment.batch_size, workers=workers)


def batches_of(found: Pictures, size: int, *, workers: int = 0) -> Iterator[dict[str, Any]]:
    """Yield every image once as `batches` does."""
    with Batches(found, batch_size=size, shuffle=False, last="pad", workers=workers) as given:
        for batch in given.epoch():
            valid = batch["valid"] & batch.get(_MASK, torch.ones_like(batch["valid"]))
            yield {"image": batch["image"], "label": batch["label"], "valid": valid}
