"""Images become tiles, as many as their shape asks for."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from recipes.recogdrive.tiles import (
    NORMS,
    Tiling,
    cut,
    grid_of,
    num_tiles,
    pad_tiles,
    pixels,
    read_image,
)
from tpuport.foundation.errors import UsageError


def picture(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((100, 100), (1, 1)),  # small: the larger square is as close, and too large
        ((1000, 1000), (3, 3)),
        ((1920, 1080), (4, 2)),  # as close as 2:1, with more pixels
        ((1080, 1920), (2, 4)),
        ((5000, 100), (12, 1)),
        ((10, 4000), (1, 12)),
    ],
)
def test_the_grid_is_of_the_closest_shape(size: tuple[int, int], grid: tuple[int, int]):
    tiling = Tiling(448)
    found = grid_of(size, tiling)
    assert found == grid
    closest = abs(size[0] / size[1] - found[0] / found[1])
    shapes = [(c, r) for c in range(1, 13) for r in range(1, 13) if c * r <= 12]
    assert closest == min(abs(size[0] / size[1] - c / r) for c, r in shapes)


def test_tiles_cover_the_image_row_by_row():
    image = picture(64, 32)
    tiling = Tiling(16, max_dynamic_patch=12)
    columns, rows = grid_of(image.size, tiling)
    tiles = cut(image, tiling)
    assert len(tiles) == columns * rows + 1 == num_tiles(image.size, tiling)
    whole = np.asarray(image.resize((columns * 16, rows * 16), Image.Resampling.BICUBIC))
    joined = [np.concatenate(tiles[r * columns : (r + 1) * columns], 1) for r in range(rows)]
    np.testing.assert_array_equal(np.concatenate(joined, 0), whole)
    np.testing.assert_array_equal(tiles[-1], image.resize((16, 16), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "WEBP"])
def test_a_damaged_image_is_an_oserror(tmp_path: Path, kind: str):
    """Whatever Pillow makes of it, and however much of it is left."""
    image, path = picture(40, 24), tmp_path / "image"
    image.save(path, format=kind, lossless=True)
    np.testing.assert_array_equal(read_image(path).size, image.size)
    content = path.read_bytes()
    for length in (0, 3, 20, 40, len(content) // 2, len(content) - 60):
        path.write_bytes(content[:length])
        with pytest.raises(OSError, match=r"\w"):
            read_image(path)
    if kind == "PNG":  # a chunk whose sum is wrong
        place = len(content) - 30
        path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        with pytest.raises(OSError, match=r"\w"):
            read_image(path)


def test_one_tile_has_no_thumbnail():
    assert len(cut(picture(20, 20), Tiling(16, max_dynamic_patch=1))) == 1
    assert Tiling(16, max_dynamic_patch=1).bound == 1
    assert Tiling(16, max_dynamic_patch=12).bound == 13
    assert Tiling(16, dynamic_image_size=False).bound == 1
    assert pixels(cut(picture(40, 20), Tiling(16, dynamic_image_size=False)), Tiling(16)).shape == (
        1, 3, 16, 16,
    )  # fmt: skip


def test_images_of_one_sample_share_the_bound():
    tiling = Tiling(16, max_dynamic_patch=12, use_thumbnail=False)
    assert num_tiles((1000, 1000), tiling, num_images=3) == 4
    assert num_tiles((1000, 1000), tiling, num_images=20) == 1


@pytest.mark.parametrize("name", NORMS)
def test_values_are_normalised(name: str):
    tile = picture(16, 16)
    made = pixels([tile], Tiling(16, normalize_type=name))
    mean, std = NORMS[name]
    expected = (np.asarray(tile) / 255 - mean) / std
    assert made.dtype == np.float32
    np.testing.assert_allclose(made[0], expected.transpose(2, 0, 1), rtol=1e-5, atol=1e-6)


def test_augmentation_is_a_jpeg_of_a_drawn_quality():
    tile, tiling = picture(16, 16), Tiling(16)
    once = pixels([tile], tiling, np.random.default_rng(1))
    assert np.array_equal(once, pixels([tile], tiling, np.random.default_rng(1)))
    made = []
    for quality in range(75, 101):
        file = io.BytesIO()
        tile.save(file, format="JPEG", quality=quality)
        made.append(pixels([Image.open(file)], tiling))
    assert sum(np.array_equal(once, one) for one in made) >= 1
    assert not np.array_equal(once, pixels([tile], tiling))


def test_a_square_is_filled_up():
    made = pixels([picture(16, 8)], Tiling(16, pad2square=True))
    # The mean colour is nearly zero once it is normalised.
    assert np.abs(made[0, :, :3]).max() < 0.02
    assert np.abs(made[0, :, 4:12]).max() > 1


def test_padding_tiles_do_not_count():
    values = np.ones((2, 3, 4, 4), np.float32)
    made = pad_tiles(values, 5)
    assert made["image_flags"].tolist() == [1, 1, 0, 0, 0]
    assert made["pixel_values"].shape == (5, 3, 4, 4)
    assert not made["pixel_values"][2:].any()
    with pytest.raises(UsageError, match="has 2 tiles and the bound is 1"):
        pad_tiles(values, 1)


def test_wrong_settings_are_refused():
    with pytest.raises(UsageError, match=r"normalize_type='x': expected one of imagenet"):
        Tiling(normalize_type="x")
    with pytest.raises(UsageError, match="expected 1 <= min <= max"):
        Tiling(min_dynamic_patch=5, max_dynamic_patch=4)
