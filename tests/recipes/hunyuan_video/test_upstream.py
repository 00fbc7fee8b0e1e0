"""Upstream's folder by upstream's classes: what diffusers' classes give of the same weights."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import tpuport
from recipes.hunyuan_video.components import Components
from recipes.hunyuan_video.decode import decode_video, port_vae
from recipes.hunyuan_video.denoise import STEPS, denoise_step, make_noise, make_schedule
from recipes.hunyuan_video.encode import encode
from recipes.hunyuan_video.make_weights import make_weights
from recipes.hunyuan_video.options import Options, size_of
from recipes.hunyuan_video.spreading import Spread, spread_of
from recipes.hunyuan_video.upstream import UpstreamComponents, open_components
from tests.recipes.hunyuan_video.denoisers import denoiser_of
from tests.recipes.hunyuan_video.eager import relative
from tpuport.foundation.errors import UsageError

pytestmark = [
    pytest.mark.usefixtures("short"),
    pytest.mark.skipif(
        importlib.util.find_spec("hyvideo") is None,
        reason="waits for hyvideo: pip install --no-deps hyvideo-fork",
    ),
]

OPTIONS = Options(
    ('a sign that says "open"', "snow"),
    negative_prompt="blurred",
    height=48,
    width=64,
    frames=5,
    steps=3,
    precision="float32",
    version="720p_t2v",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same weights in both layouts."""
    folder = tmp_path_factory.mktemp("layouts")
    upstream = make_weights(folder / "upstream", layout="upstream")
    return upstream, make_weights(folder / "diffusers", glyph_width=1472)


def latents_of(
    components: Components, options: Options, encoded: Any, way: Spread | None = None
) -> np.ndarray:
    noise = make_noise(options, 8, size_of(options), torch.float32)
    with components.tracing():
        denoiser = denoiser_of(components, options, noise.shape, way=way, encoded=encoded)
        *_, (_, found) = denoiser.run(noise, make_schedule(components.scheduler(), options))
    return np.array(found)


@pytest.fixture(scope="module")
def found(folders: tuple[Path, Path], encoded: dict[str, Any]) -> np.ndarray:
    """Latents by upstream's class, on one device."""
    return latents_of(open_components(folders[0], "float32", OPTIONS.version), OPTIONS, encoded)


@pytest.fixture(scope="module")
def encoded(folders: tuple[Path, Path]) -> dict[str, Any]:
    """Of upstream's folder: Qwen inside a chat model's folder, byT5 in a torch file."""
    return encode(open_components(folders[0], "float32", OPTIONS.version), OPTIONS)


def test_both_layouts_encode_alike(folders: tuple[Path, Path], encoded: dict[str, Any]):
    wanted = encode(open_components(folders[1], "float32"), OPTIONS)
    assert {*encoded} == {*wanted}
    for name, value in wanted.items():
        np.testing.assert_allclose(encoded[name], value, atol=1e-5, err_msg=name)
    assert np.asarray(encoded["glyph"]).any()


def test_steps_are_those_of_eager_pytorch_and_of_diffusers(
    folders: tuple[Path, Path], encoded: dict[str, Any], found: np.ndarray
):
    components = open_components(folders[0], "float32", OPTIONS.version)
    assert isinstance(components, UpstreamComponents)
    noise = make_noise(OPTIONS, 8, size_of(OPTIONS), torch.float32)
    latents = torch.from_numpy(np.array(noise))
    with components.tracing(), torch.no_grad():
        denoiser = denoiser_of(components, OPTIONS, noise.shape, encoded=encoded)
        conditions = {n: torch.from_numpy(np.array(v)) for n, v in denoiser.conditions.items()}
        eager: Any = components.module("transformer").to_empty(device="cpu")
        weights = tpuport.load_checkpoint(components.place("transformer"))
        eager.set_attn_mode("flash")
        eager.load_state_dict({n: torch.from_numpy(np.array(v)) for n, v in weights.items()})
        for times in make_schedule(components.scheduler(), OPTIONS):
            given = latents, torch.from_numpy(times), conditions
            latents = denoise_step(eager, *given, guidance=6.0)
    assert relative(found, latents.cpu()) < 1e-4

    options = dataclasses.replace(OPTIONS, version="")
    by_diffusers = latents_of(open_components(folders[1], "float32"), options, encoded)
    assert relative(found, torch.from_numpy(by_diffusers)) < 1e-4


def test_image_to_video_is_that_of_diffusers(folders: tuple[Path, Path], picture: Path):
    options = dataclasses.replace(
        OPTIONS, prompts=("snow",), task="i2v", image=str(picture), steps=2, guidance=1.0
    )
    upstream = open_components(folders[0], "float32", "720p_i2v")
    with upstream.tracing():
        given = encode(upstream, options)
    wanted = encode(open_components(folders[1], "float32"), options)
    np.testing.assert_allclose(given["first_frame"], wanted["first_frame"], atol=1e-5)
    components = open_components(folders[1], "float32")
    schedule = make_schedule(upstream.scheduler(), options)
    assert schedule[1, 0] == pytest.approx(875)  # a shift of 7, not of 9
    options = dataclasses.replace(options, shift=9.0)
    found = latents_of(upstream, options, given)
    assert relative(found, torch.from_numpy(latents_of(components, options, wanted))) < 1e-4


def test_bfloat16_stays_near(
    folders: tuple[Path, Path], encoded: dict[str, Any], found: np.ndarray
):
    """As upstream's pipeline has it: weights and products in bfloat16, the rest by autocast."""
    half = {
        name: value.astype(jnp.bfloat16) if value.dtype == jnp.float32 else value
        for name, value in encoded.items()
    }
    options = dataclasses.replace(OPTIONS, precision="bf16")
    rounded = latents_of(open_components(folders[0], "bf16", OPTIONS.version), options, half)
    # 8 bits, rounded some ten times in a row in each of three blocks: a few times 4e-3.
    assert 1e-4 < relative(rounded, torch.from_numpy(found)) < 3e-2


# "mixed" has the rules of "tensor" and the tokens of "sequence"; test_spreading.py has "guidance".
@pytest.mark.parametrize("name", [pytest.param("guidance", marks=pytest.mark.slow), "mixed"])
def test_eight_devices_give_what_one_gives(
    folders: tuple[Path, Path], encoded: dict[str, Any], found: np.ndarray, name: str
):
    components = open_components(folders[0], "float32", OPTIONS.version)
    shared = latents_of(components, OPTIONS, encoded, spread_of(name))
    assert relative(shared, torch.from_numpy(found)) < 1e-5
    with components.tracing():
        ported = components.ported("transformer", STEPS, spread_of(name).shard)
    stored = "img_mod.linear" if name == "guidance" else "img_mlp.fc1"
    weight = ported.buffers[f"double_blocks.0.{stored}.weight"]
    assert weight.addressable_shards[0].data.size < weight.size


def test_videos_are_those_of_diffusers(folders: tuple[Path, Path]):
    latents = torch.randn(1, 8, 2, 3, 4, generator=torch.Generator().manual_seed(0)).numpy()
    videos = []
    for folder in folders:
        components = open_components(folder, "float32", "720p_t2v" if folder is folders[0] else "")
        with components.tracing():
            vae = port_vae(components.module("vae", torch.float32), "float32")
            components.load(vae.ported, "vae")
            videos.append(np.array(decode_video(vae, jnp.asarray(latents))))
    assert relative(videos[0], torch.from_numpy(videos[1])) < 1e-4


def test_a_version_is_chosen(folders: tuple[Path, Path]):
    with pytest.raises(
        UsageError, match=r"720p_i2v, 720p_t2v, and no version was given.*--version"
    ):
        open_components(folders[0], "float32")
    with pytest.raises(UsageError, match="version='480p_t2v' was given"):
        open_components(folders[0], "float32", "480p_t2v")
    with pytest.raises(UsageError, match="is not in upstream's layout"):
        open_components(folders[1], "float32", "720p_t2v")
    with pytest.raises(UsageError, match="task='t2v' with 720p_i2v, which is for the other one"):
        open_components(folders[0], "float32", "720p_i2v").check(OPTIONS)


def test_distilled_models_take_no_guidance(folders: tuple[Path, Path], tmp_path: Path):
    name = "480p_t2v_distilled"
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / name).symlink_to(folders[0] / "transformer" / "720p_t2v")
    components = open_components(tmp_path, "float32")
    with pytest.raises(UsageError, match=f"guidance=6.0 with {name}, which is distilled"):
        components.check(OPTIONS)
    components.check(dataclasses.replace(OPTIONS, guidance=1.0))
    assert components.scheduler().config.shift == 5.0
