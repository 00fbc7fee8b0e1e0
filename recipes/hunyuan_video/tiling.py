"""A function of images run tile by tile, with its results blended, as the VAE's classes do.

Several tiles are computed at a time, one on each chip. Source: `tiled_decode`,
`tiled_encode`, `blend_v` and `blend_h` of diffusers' AutoencoderKLHunyuanVideo15, and
`spatial_tiled_decode` of upstream's AutoencoderKLConv3D, which agree.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.foundation.errors import UsageError
from tpuport.sharding import MeshAxis

HEIGHT, WIDTH = -2, -1
# The mesh axes along which tiles are sharded. Chips along other axes repeat the same work.
AXES = (MeshAxis.DATA.value, MeshAxis.FSDP.value)


@dataclass(frozen=True)
class Tiling:
    """The sizes with which images are cut and blended, each a pair for height and width.

    Attributes:
        tile: Size of a tile, in elements of the input.
        step: Distance between the starts of adjacent tiles, in elements of the input.
        blend: Width of the blended overlap, in elements of the result.
        keep: Size of the part of a result that is kept.
    """

    tile: tuple[int, int]
    step: tuple[int, int]
    blend: tuple[int, int]
    keep: tuple[int, int]

    def __post_init__(self) -> None:
        if min(*self.tile, *self.step, *self.keep) < 1 or min(self.blend) < 0:
            raise UsageError(
                f"{self}: expected tiles, steps and what is kept of at least one element. What to"
                " do: choose larger tiles, or an overlap of less than 1"
            )

    def starts(self, height: int, width: int) -> tuple[range, range]:
        """Return the positions at which tiles begin."""
        return range(0, height, self.step[0]), range(0, width, self.step[1])

    def cuts(self, height: int, width: int) -> bool:
        """Return whether an image is larger than one tile. If not, it is not cut."""
        return height > self.tile[0] or width > self.tile[1]


def tiling_of(model: Any, of: Literal["decode", "encode"] = "decode") -> Tiling:
    """Return the tiles that a VAE is set to (by default 256 pixels that overlap by a quarter).

    Args:
        model: diffusers' AutoencoderKLHunyuanVideo15 or upstream's AutoencoderKLConv3D.
        of: Direction: "decode" cuts latents, "encode" cuts pixels.
    """
    if hasattr(model, "tile_latent_min_size"):
        latent = (model.tile_latent_min_size,) * 2
        sample = (model.tile_sample_min_size,) * 2
    else:
        latent = (model.tile_latent_min_height, model.tile_latent_min_width)
        sample = (model.tile_sample_min_height, model.tile_sample_min_width)
    overlap = model.tile_overlap_factor
    cut, made = (latent, sample) if of == "decode" else (sample, latent)
    blend = _each(lambda size: int(size * overlap), made)
    return Tiling(
        tile=cut,
        step=_each(lambda size: int(size * (1 - overlap)), cut),
        blend=blend,
        keep=(made[0] - blend[0], made[1] - blend[1]),
    )


def _each(change: Callable[[int], int], pair: tuple[int, int]) -> tuple[int, int]:
    return change(pair[0]), change(pair[1])


def map_tiles(
    function: Callable[..., jax.Array],
    x: jax.Array,
    tiling: Tiling,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Apply `function` to the tiles of x and blend them; to x itself if it fits in one tile.

    All tiles go through one loop, as many at a time as there are chips along the mesh's data axes.
    If the count does not divide, the remaining chips compute the first tiles again. Smaller tiles
    at the edges are filled up, since each shape of them is a program that compiles for minutes,
    and since on several chips they would leave some of them without work.

    Args:
        function: Maps (N, C, T, h, w), one tile each, example by example. If tiles are filled up,
            it gets (N, 2) as well, the heights and widths of what has data.
        x: (B, C, T, H, W).
        tiling: Tiling of the last two dims.
        mesh: None for one device.

    Returns:
        (B, C', T', H', W'), replicated on every chip.
    """
    batch, _, _, height, width = x.shape
    if not tiling.cuts(height, width):
        return function(x)
    rows, columns = tiling.starts(height, width)
    size = min(tiling.tile[0], height), min(tiling.tile[1], width)
    extents = [(min(size[0], height - i), min(size[1], width - j)) for i in rows for j in columns]
    tiles = []
    for (i, j), (h, w) in zip(itertools.product(rows, columns), extents, strict=True):
        missing = [(0, 0)] * 3 + [(0, size[0] - h), (0, size[1] - w)]
        tiles.append(jnp.pad(x[..., i : i + h, j : j + w], missing, mode="edge"))
    given = [jnp.concatenate(tiles)]
    if set(extents) != {size}:
        given.append(jnp.repeat(jnp.asarray(extents, jnp.int32), batch, axis=0))
    results = jnp.split(_in_rounds(function, given, mesh), len(tiles))
    done = [
        result[..., : h * result.shape[-2] // size[0], : w * result.shape[-1] // size[1]]
        for result, (h, w) in zip(results, extents, strict=True)
    ]
    return blended([done[k : k + len(columns)] for k in range(0, len(done), len(columns))], tiling)


def _in_rounds(
    function: Callable[..., jax.Array], given: list[jax.Array], mesh: Mesh | None
) -> jax.Array:
    """Apply `function` to arrays (N, ...) in a loop that takes one row per chip at a time."""
    axes = () if mesh is None else tuple(axis for axis in AXES if axis in mesh.shape)
    chips = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)
    count = given[0].shape[0]
    num_rounds = math.ceil(count / chips)
    taken = np.arange(num_rounds * chips) % count

    def place(array: jax.Array, *spec: Any) -> jax.Array:
        if mesh is None:
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, P(*spec)))

    def one_round(given: list[jax.Array]) -> jax.Array:
        return place(function(*(place(array, axes) for array in given)), axes)

    rounds = [
        place(array[taken].reshape(num_rounds, chips, *array.shape[1:]), None, axes)
        for array in given
    ]
    # Replicate before rounds and chips become one dim, which the partitioner could not shard.
    results = place(jax.lax.map(one_round, rounds))
    return results.reshape(num_rounds * chips, *results.shape[2:])[:count]


def blended(rows: list[list[jax.Array]], tiling: Tiling) -> jax.Array:
    """Blend the tiles' results into one image.

    Each tile is blended with the one above and the one before it, which are blended already but not
    yet cropped.
    """
    lines: list[jax.Array] = []
    above: list[jax.Array] = []
    for row in rows:
        line: list[jax.Array] = []
        for j, tile in enumerate(row):
            now = _run_into(above[j], tile, tiling.blend[0], HEIGHT) if above else tile
            line.append(_run_into(line[-1], now, tiling.blend[1], WIDTH) if line else now)
        above = line
        height, width = tiling.keep
        lines.append(jnp.concatenate([tile[..., :height, :width] for tile in line], WIDTH))
    return jnp.concatenate(lines, HEIGHT)


def _run_into(before: jax.Array, tile: jax.Array, extent: int, axis: int) -> jax.Array:
    """Return the tile with its first rows or columns faded in from the last of the one before."""
    extent = min(before.shape[axis], tile.shape[axis], extent)
    if not extent:
        return tile
    shape = [1] * tile.ndim
    shape[axis] = extent
    ramp = (np.arange(extent) / extent).reshape(shape)
    last = jax.lax.slice_in_dim(before, before.shape[axis] - extent, None, axis=axis)
    first, rest = jnp.split(tile, [extent], axis)
    return jnp.concatenate([_times(last, 1 - ramp) + _times(first, ramp), rest], axis)


def _times(x: jax.Array, factors: np.ndarray) -> jax.Array:
    """Multiply x by numbers of Python, which PyTorch rounds to x's dtype only in the product."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(wide) * factors.astype(wide)).astype(x.dtype)
