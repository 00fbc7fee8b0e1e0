"""Cutting and blending is that of the VAE's class, with a decoder that is cheap to run."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from recipes.hunyuan_video.tiling import Tiling, map_tiles, tiling_of
from tests.recipes.hunyuan_video.vae_models import FACTOR, difference, normal, small_vae
from tpuport.foundation.errors import UsageError
from tpuport.sharding import make_mesh


class Enlarge(torch.nn.Module):
    """Each latent becomes a square that is brighter the further it is from the tile's corner, so
    that no two tiles agree where they overlap.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        large = x.repeat_interleave(FACTOR, -1).repeat_interleave(FACTOR, -2)
        height, width = torch.arange(large.shape[-2]), torch.arange(large.shape[-1])
        return large + (height[:, None] * 3 + width).to(x.dtype) / 8


def enlarged(x: jax.Array, extents: jax.Array | None = None) -> jax.Array:
    """The same function on jax arrays, which does not ask where a tile ends."""
    large = jnp.repeat(jnp.repeat(x, FACTOR, -1), FACTOR, -2)
    height, width = jnp.arange(large.shape[-2]), jnp.arange(large.shape[-1])
    return large + (height[:, None] * 3 + width).astype(x.dtype) / 8


def cheap_vae(*tiles: Any) -> Any:
    model: Any = small_vae()
    model.decoder = Enlarge()
    model.enable_tiling(*tiles)
    return model


def sizes(height: int, width: int, overlap: float) -> tuple[Any, ...]:
    return (height * FACTOR, width * FACTOR, height, width, overlap)


@pytest.mark.parametrize(
    ("height", "width", "tiles", "dtype"),
    [
        # 720 x 1280 of the published VAE.
        (45, 80, sizes(16, 16, 0.25), "float32"),
        (45, 80, sizes(16, 16, 0.25), "bfloat16"),
        # Along one dim there is one tile.
        (16, 17, sizes(16, 16, 0.25), "float32"),
        # Halves of tiles overlap, and edge tiles have less than that.
        (9, 6, sizes(4, 3, 0.5), "float32"),
        # Nothing overlaps.
        (5, 7, sizes(2, 4, 0.01), "float32"),
        # Four tiles at a place.
        (5, 7, sizes(4, 4, 0.75), "float32"),
        # Within one tile.
        (3, 4, sizes(4, 4, 0.25), "float32"),
    ],
)
def test_tiles_are_cut_and_blended_as_the_class_does(
    height: int, width: int, tiles: tuple[Any, ...], dtype: str
):
    model = cheap_vae(*tiles)
    latents = normal(2, 2, 1, height, width).to(getattr(torch, dtype))
    want = model.decode(latents).sample
    x = jnp.asarray(latents.float().numpy()).astype(dtype)
    got = jax.jit(lambda x: map_tiles(enlarged, x, tiling_of(model)))(x)
    assert got.dtype == dtype
    # Bits of bfloat16 are eager's, since each product and each sum is rounded as there.
    assert difference(got, want) <= (1e-6 if dtype == "float32" else 0)


@pytest.mark.parametrize("shape", [(1, 2, 1, 10, 7), (3, 2, 1, 7, 7)])
def test_on_a_mesh_it_is_the_same(shape: tuple[int, ...]):
    tiling = tiling_of(cheap_vae(*sizes(4, 4, 0.25)))
    x = normal(*shape).numpy()
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, "cpu")
    spread = jax.jit(lambda x: map_tiles(enlarged, x, tiling, mesh))(x)
    by_one = jax.jit(lambda x: map_tiles(enlarged, x, tiling))(x)
    assert len(spread.sharding.device_set) == 8
    assert difference(spread, torch.tensor(jax.device_get(by_one))) < 1e-6


def test_encoding_is_cut_in_pixels():
    model = small_vae()
    model.enable_tiling(64, 32, 16, 8, 0.25)
    assert tiling_of(model) == Tiling((16, 8), (12, 6), (16, 8), (48, 24))
    assert tiling_of(model, "encode") == Tiling((64, 32), (48, 24), (4, 2), (12, 6))


def test_tiles_that_do_not_go_on_are_refused():
    with pytest.raises(UsageError, match=r"expected tiles, steps and what is kept of at least one"):
        tiling_of(cheap_vae(*sizes(4, 4, 1.0)))
