"""Decoding and encoding by the recipe give what the VAE's own class gives in eager PyTorch."""

import copy
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

import tpuport
from recipes.hunyuan_video.decode import VideoVae, decode_video, encode_image, port_vae
from recipes.hunyuan_video.tiling import tiling_of
from recipes.hunyuan_video.upstream_weights import upstream_vae
from recipes.hunyuan_video.vae_patches import patched_vae
from tests.recipes.hunyuan_video.vae_models import FACTOR, TILE, difference, normal, small_vae
from tpuport.foundation.errors import UsageError
from tpuport.sharding import make_mesh

RTOL = 1e-4
# bfloat16 has 8 bits, and some thirty layers round one after the other.
RTOL_BF16 = 5e-2
# 8 x 7 latents: tiles of 4 x 4, 4 x 1, 2 x 4 and 2 x 1.
FOUR_SHAPES = (1, 4, 2, 8, 7)
Vae = Any


@pytest.fixture(scope="module")
def model() -> Vae:
    return small_vae()


@pytest.fixture(scope="module")
def ported(model: Vae) -> VideoVae:
    return port_vae(model, "float32")


@pytest.fixture(scope="module")
def tiled(ported: VideoVae) -> jax.Array:
    """The program of all four shapes takes longest."""
    return decode_video(ported, normal(*FOUR_SHAPES).numpy())


def by_eager(model: Vae, latents: torch.Tensor) -> torch.Tensor:
    """As the pipeline decodes. With several videos diffusers' mask has a dim too few."""
    one_by_one = latents.to(model.dtype).split(1)
    with torch.no_grad():
        decoded = [model.decode(z / model.config.scaling_factor).sample for z in one_by_one]
    return torch.cat(decoded)


def test_tiles_of_four_shapes(model: Vae, tiled: jax.Array):
    want = by_eager(model, normal(*FOUR_SHAPES))
    assert want.shape == (1, 3, 3, 32, 28)
    assert want.std() > 0.1
    assert tiled.dtype == jnp.float32
    assert difference(tiled, want) < RTOL
    model.disable_tiling()
    assert difference(tiled, by_eager(model, normal(*FOUR_SHAPES))) > 0.01, "tiles are as the whole"
    model.enable_tiling()


def test_tiles_of_four_shapes_share_one_program(model: Vae, ported: VideoVae):
    """Each shape would be compiled for minutes."""

    def convolutions(*shape: int) -> int:
        with patched_vae(model):
            given = (ported.ported.params, ported.ported.buffers, None, jnp.ones(shape))
            return str(jax.make_jaxpr(vars(ported)["decode"])(*given)).count(
                "conv_general_dilated["
            )

    assert convolutions(*FOUR_SHAPES) == convolutions(1, 4, 2, TILE, TILE) > 0


def test_one_tile_is_decoded_as_a_whole(model: Vae, ported: VideoVae):
    """Of two examples; test_pipeline.py has one."""
    latents = normal(2, 4, 3, TILE, TILE - 1)
    got = decode_video(ported, latents.numpy())
    assert got.shape == (2, 3, 5, 16, 12)
    assert difference(got, by_eager(model, latents)) < RTOL


def test_a_batch_in_tiles_of_the_callers(model: Vae, ported: VideoVae):
    """Half of a tile overlaps: two examples, and two tiles each."""
    other = copy.deepcopy(model)
    other.enable_tiling(8, 8, 2, 2, 0.5)
    latents = normal(2, 4, 1, 1, 3)
    got = decode_video(ported, latents.numpy(), tiling_of(other))
    assert difference(got, by_eager(other, latents)) < RTOL


def test_frames_do_not_see_later_ones(ported: VideoVae):
    latents = normal(2, 4, 3, TILE, TILE - 1).numpy()
    later = latents.copy()
    later[:, :, 2] += 1
    first, second = decode_video(ported, latents), decode_video(ported, later)
    assert (first[:, :, :3] == second[:, :, :3]).all()
    assert (first[:, :, 3:] != second[:, :, 3:]).any(axis=(0, 1, 3, 4)).all()


def test_bfloat16(model: Vae):
    latents = normal(1, 4, 2, TILE, TILE - 1)
    vae = port_vae(model, "bf16")
    got = decode_video(vae, latents.numpy())
    assert got.dtype == jnp.bfloat16
    want = by_eager(model, latents)
    assert difference(got, want) < RTOL_BF16
    eager = by_eager(copy.deepcopy(model).to(torch.bfloat16), latents)
    assert eager.dtype == torch.bfloat16
    # As far from float32 as eager's, and not further.
    far = float((eager.float() - want).abs().max() / want.abs().max())
    assert difference(got, want) < 2 * far


def test_products_are_of_bfloat16_and_norms_in_float32(model: Vae):
    vae = port_vae(model, "bf16")
    given = (vae.ported.params, vae.ported.buffers, None, normal(1, 4, 1, 1, 1).numpy())
    with patched_vae(model):
        audit = tpuport.precision_audit(vae.decode, *given, model=vae.ported)
    assert audit.flags == ()
    products = {one.dtypes for one in audit.places if one.kind == "product"}
    assert products == {("bfloat16", "bfloat16")}
    raised = {one.module for one in audit.places if one.dtypes == ("bfloat16", "float32")}
    assert {"decoder.norm_out", "decoder.up_blocks.*.resnets.*.norm1"} <= raised


def test_chips_share_the_tiles(model: Vae, ported: VideoVae):
    """Ten tiles of one shape are two rounds of eight chips, and five of the other are one."""
    latents = normal(5, 4, 1, 7, 3)
    spread = port_vae(model, "float32", make_mesh({"data": 4, "fsdp": 2}, "cpu"))
    got = decode_video(spread, latents.numpy())
    assert got.sharding.is_fully_replicated
    assert len(got.sharding.device_set) == 8
    by_one = torch.tensor(jax.device_get(decode_video(ported, latents.numpy())))
    assert difference(got, by_one) < 1e-6
    assert difference(got, by_eager(model, latents)) < RTOL


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_an_image_is_encoded(model: Vae, precision: str):
    image = normal(1, 3, 16, 20).clamp(-1, 1)
    model.disable_tiling()
    with torch.no_grad():
        mode = model.encode(image[:, :, None]).latent_dist.mode()
    model.enable_tiling()
    got = encode_image(port_vae(model, precision), image.numpy())
    assert got.shape == (1, 4, 1, 4, 5)
    bound = {"float32": RTOL, "bf16": RTOL_BF16}[precision]
    assert difference(got, mode * model.config.scaling_factor) < bound


def test_an_image_is_encoded_in_tiles(model: Vae, ported: VideoVae):
    image = normal(1, 3, 12, 20).clamp(-1, 1)
    with torch.no_grad():
        mode = model.encode(image[:, :, None]).latent_dist.mode()
    got = encode_image(ported, image.numpy(), tiling_of(model, "encode"))
    assert difference(got, mode * model.config.scaling_factor) < RTOL


# -- wrong calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 32, 2, 4, 4), r"latents: expected 4 channels, those of the VAE, got 32 in shape"),
        ((4, 2, 4, 4), r"latents: expected an array of 5 dims \(batch, .* of shape \(4, 2, 4, 4\)"),
        ((1, 4, 0, 4, 4), r"latents: expected an array of 5 dims .* none of them of size 0"),
    ],
)
def test_latents_of_another_shape(ported: VideoVae, shape: tuple[int, ...], message: str):
    with pytest.raises(UsageError, match=message):
        decode_video(ported, normal(*shape).numpy())


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 1, 32, 32), r"image: expected an array of 4 dims \(batch, channels, height,"),
        ((1, 3, 30, 32), r"image: expected 3 channels, .* multiples of 4, got shape \(1, 3, 30"),
        ((1, 4, 32, 32), r"image: expected 3 channels.*What to do: resize and crop it"),
    ],
)
def test_images_of_another_shape(ported: VideoVae, shape: tuple[int, ...], message: str):
    with pytest.raises(UsageError, match=message):
        encode_image(ported, normal(*shape).numpy())


def test_other_wrong_calls(model: Vae):
    with pytest.raises(UsageError, match=r"precision='fp8': expected one of bf16, float32"):
        port_vae(model, "fp8")
    with pytest.raises(UsageError, match=r"model=Linear: expected a VAE of HunyuanVideo-1.5"):
        port_vae(torch.nn.Linear(1, 1))


# -- upstream's own class --------------------------------------------------------------------------


@pytest.fixture
def upstream() -> Iterator[ModuleType]:
    """The module of upstream's VAE, imported untouched."""
    if importlib.util.find_spec("hyvideo") is None:
        pytest.skip("waits for hyvideo: pip install --no-deps hyvideo-fork")
    before = set(sys.modules)
    with tpuport.porting("hyvideo", absent=["loguru"], port_modules=False):
        yield importlib.import_module("hyvideo.models.autoencoders.hunyuanvideo_15_vae")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "hyvideo":
            del sys.modules[name]


def test_upstreams_class_agrees(model: Vae, upstream: ModuleType):
    config = model.config
    theirs = upstream.AutoencoderKLConv3D(
        in_channels=3, out_channels=3, latent_channels=config.latent_channels,
        block_out_channels=config.block_out_channels, layers_per_block=config.layers_per_block,
        ffactor_spatial=config.spatial_compression_ratio,
        ffactor_temporal=config.temporal_compression_ratio,
        sample_size=FACTOR * TILE, sample_tsize=64, scaling_factor=config.scaling_factor,
    )  # fmt: skip
    assert tiling_of(theirs) == tiling_of(model)
    theirs.load_state_dict(upstream_vae(model.state_dict()))
    latents = normal(1, 4, 2, TILE + 1, TILE - 1)
    want = by_eager(model, latents)
    vae = port_vae(theirs, "float32")
    assert difference(decode_video(vae, latents.numpy()), want) < RTOL
