"""Images cut into square tiles, as many as their shape asks for, up to a static bound."""

import io
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tpuport.foundation.errors import UsageError

# Mean and standard deviation of red, green and blue with which vision towers were trained.
NORMS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.4814546, 0.4578275, 0.40821073), (0.2686295, 0.2613025, 0.2757711)),
    "siglip": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
# Errors of Pillow on bytes that are no complete image, besides OSError.
_DAMAGED = (SyntaxError, ValueError, IndexError, struct.error, Image.DecompressionBombError)
# Qualities of the JPEG compression that is used as augmentation, all equally likely.
_QUALITIES = range(75, 101)


@dataclass(frozen=True)
class Tiling:
    """The way images are cut into tiles, with the names of upstream's flags.

    Attributes:
        force_image_size: Width and height of a tile, in pixels.
        min_dynamic_patch: Minimum number of tiles of an image, without the thumbnail.
        max_dynamic_patch: Maximum number of tiles of an image, without the thumbnail.
        dynamic_image_size: False makes one tile of every image.
        use_thumbnail: Whether the image, resized, is one more tile if there are several.
        normalize_type: "imagenet", "clip" or "siglip".
        pad2square: Whether tiles that are not square are padded instead of stretched.
    """

    force_image_size: int = 448
    min_dynamic_patch: int = 1
    max_dynamic_patch: int = 12
    dynamic_image_size: bool = True
    use_thumbnail: bool = True
    normalize_type: str = "imagenet"
    pad2square: bool = False

    def __post_init__(self) -> None:
        if self.normalize_type not in NORMS:
            known = ", ".join(NORMS)
            raise UsageError(f"normalize_type={self.normalize_type!r}: expected one of {known}")
        if not 1 <= self.min_dynamic_patch <= self.max_dynamic_patch:
            raise UsageError(
                f"min_dynamic_patch={self.min_dynamic_patch} and max_dynamic_patch="
                f"{self.max_dynamic_patch}: expected 1 <= min <= max"
            )

    @property
    def bound(self) -> int:
        """Return the maximum number of tiles of one image, with the thumbnail."""
        if not self.dynamic_image_size:
            return 1
        return self.max_dynamic_patch + (self.use_thumbnail and self.max_dynamic_patch > 1)

    def most_of(self, num_images: int) -> int:
        """Return the maximum number of tiles per image of a sample with this many images."""
        return max(1, self.max_dynamic_patch // num_images)


def read_image(path: str | Path) -> Image.Image:
    """Read an image in RGB, fully decoded.

    Raises:
        FileNotFoundError: It is missing.
        OSError: It is no image, is truncated or is damaged.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except _DAMAGED as error:
        raise OSError(f"{path}: {error}") from error


def grid_of(size: tuple[int, int], tiling: Tiling, num_images: int = 1) -> tuple[int, int]:
    """Return columns and rows of tiles for an image: the shape closest to its own.

    Of two equally close shapes the larger one is used if the image has more than half its pixels.

    Args:
        size: Width and height of the image, in pixels.
        tiling: The way images are cut.
        num_images: Number of images of the sample.
    """
    if not tiling.dynamic_image_size:
        return 1, 1
    width, height = size
    best, smallest = (1, 1), float("inf")
    for columns, rows in _grids(tiling.min_dynamic_patch, tiling.most_of(num_images)):
        difference = abs(width / height - columns / rows)
        enough = width * height > 0.5 * tiling.force_image_size**2 * columns * rows
        if difference < smallest or (difference == smallest and enough):
            best, smallest = (columns, rows), difference
    return best


@cache
def _grids(fewest: int, most: int) -> list[tuple[int, int]]:
    """Return all grids within these numbers of tiles.

    Grids of one size keep the order of a Python set of them, which decides ties in upstream.
    """
    found = set()
    for count in range(fewest, most + 1):
        for columns in range(1, count + 1):
            for rows in range(1, count + 1):
                if fewest <= columns * rows <= most:
                    found.add((columns, rows))
    return sorted(found, key=lambda grid: grid[0] * grid[1])


def num_tiles(size: tuple[int, int], tiling: Tiling, num_images: int = 1) -> int:
    """Return the number of tiles for an image of a width and height, without decoding it."""
    columns, rows = grid_of(size, tiling, num_images)
    count = columns * rows
    return count + (tiling.dynamic_image_size and tiling.use_thumbnail and count > 1)


def cut(image: Image.Image, tiling: Tiling, num_images: int = 1) -> list[Image.Image]:
    """Cut an image into tiles, row by row, then the thumbnail, each `force_image_size` square.

    Without `dynamic_image_size` the image itself is returned.
    """
    if not tiling.dynamic_image_size:
        return [image]
    side = tiling.force_image_size
    columns, rows = grid_of(image.size, tiling, num_images)
    whole = image.resize((columns * side, rows * side), Image.Resampling.BICUBIC)
    corners = [(x * side, y * side) for y in range(rows) for x in range(columns)]
    tiles = [whole.crop((x, y, x + side, y + side)) for x, y in corners]
    if tiling.use_thumbnail and len(tiles) > 1:
        tiles.append(image.resize((side, side), Image.Resampling.BICUBIC))
    return tiles


def pixels(
    tiles: Iterable[Image.Image], tiling: Tiling, augment: np.random.Generator | None = None
) -> np.ndarray:
    """Return the normalised values of tiles.

    Args:
        tiles: Result of `cut`.
        tiling: The tiling that they were cut with.
        augment: Draws the quality of a JPEG compression of each tile; None for no augmentation.

    Returns:
        float32 (tiles, 3, force_image_size, force_image_size).
    """
    mean, std = (np.asarray(n, np.float32)[:, None, None] for n in NORMS[tiling.normalize_type])
    side = (tiling.force_image_size, tiling.force_image_size)
    made = []
    for given in tiles:
        tile = given.convert("RGB")
        if augment is not None:
            tile = _compressed(tile, int(augment.choice(_QUALITIES)))
        if tiling.pad2square and augment is None:
            tile = _padded(tile, NORMS[tiling.normalize_type][0])
        if tile.size != side:
            tile = tile.resize(side, Image.Resampling.BICUBIC)
        values = np.asarray(tile, np.float32).transpose(2, 0, 1) / np.float32(255)
        made.append((values - mean) / std)
    return np.stack(made)


def _compressed(tile: Image.Image, quality: int) -> Image.Image:
    with io.BytesIO() as file:
        tile.save(file, format="JPEG", quality=quality)
        file.seek(0)
        return Image.open(file).convert("RGB")


def _padded(tile: Image.Image, mean: Sequence[float]) -> Image.Image:
    """Put an image in the middle of a square of the mean colour."""
    side = max(tile.size)
    square = Image.new("RGB", (side, side), tuple(int(part * 255) for part in mean))
    square.paste(tile, ((side - tile.width) // 2, (side - tile.height) // 2))
    return square


def pad_tiles(values: np.ndarray, bound: int, what: str = "the sample") -> dict[str, Any]:
    """Pad tiles to a static number with tiles of zeros that do not count.

    Args:
        values: (tiles, 3, side, side).
        bound: Number of tiles to return.
        what: Owner of the tiles, for messages.

    Returns:
        `pixel_values` float32 (bound, 3, side, side) and `image_flags` int32 (bound,), 1 for a tile
        that counts.

    Raises:
        UsageError: There are more tiles than the bound.
    """
    if len(values) > bound:
        raise UsageError(
            f"{what} has {len(values)} tiles and the bound is {bound}. What to do: raise the bound"
            " of tiles, or lower --max_dynamic_patch"
        )
    filled = np.zeros((bound, *values.shape[1:]), np.float32)
    filled[: len(values)] = values
    flags = (np.arange(bound) < len(values)).astype(np.int32)
    return {"pixel_values": filled, "image_flags": flags}
