"""Upstream's folder by upstream's classes: what diffusers' classes give of the same weights."""

import dataclasses
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import tpuport
from recipes.hunyuan_video.components import Components
from recipes.hunyuan_video.conditions import rows_of
from recipes.hunyuan_video.decode import decode_video, port_vae
from recipes.hunyuan_video.denoise import STEPS, denoise_step, make_noise, make_schedule
from recipes.hunyuan_video.encode import _picture, encode
from recipes.hunyuan_video.make_weights import make_weights
from recipes.hunyuan_video.options import Options, size_of
from recipes.hunyuan_video.spreading import Spread, spread_of
from recipes.hunyuan_video.upstream import UpstreamComponents, open_components
from recipes.quiet import quietly
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
    return upstream, make_weights(folder / "diffusers", upstream_widths=True)


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


def latents_by_eager(
    components: Components, model: Any, options: Options, encoded: Any
) -> torch.Tensor:
    """The same steps in eager PyTorch."""
    noise = make_noise(options, 8, size_of(options), torch.float32)
    latents = torch.from_numpy(np.array(noise))
    width = components.picture_width
    rows = rows_of(encoded, noise.shape, guidance=options.guidance, picture_width=width)
    conditions = {n: torch.from_numpy(np.array(v)) for n, v in rows.items()}
    with components.tracing(), torch.no_grad():
        for times in make_schedule(components.scheduler(), options):
            given = latents, torch.from_numpy(times), conditions
            latents = denoise_step(model, *given, guidance=options.guidance)
    return latents.cpu()


@pytest.fixture(scope="module")
def of_diffusers(folders: tuple[Path, Path]) -> Any:
    """diffusers' transformer of the same weights; test_pipeline.py has what it compiles to."""
    diffusers: Any = importlib.import_module("diffusers")
    place = folders[1] / "transformer"
    with quietly():
        return diffusers.HunyuanVideo15Transformer3DModel.from_pretrained(place).eval()


def test_both_layouts_encode_alike(folders: tuple[Path, Path], encoded: dict[str, Any]):
    wanted = encode(open_components(folders[1], "float32"), OPTIONS)
    assert {*encoded} == {*wanted}
    for name, value in wanted.items():
        np.testing.assert_allclose(encoded[name], value, atol=1e-5, err_msg=name)
    assert np.asarray(encoded["glyph"]).any()


def test_steps_are_those_of_eager_pytorch_and_of_diffusers(
    folders: tuple[Path, Path], encoded: dict[str, Any], found: np.ndarray, of_diffusers: Any
):
    components = open_components(folders[0], "float32", OPTIONS.version)
    assert isinstance(components, UpstreamComponents)
    with components.tracing():
        eager: Any = components.module("transformer").to_empty(device="cpu")
        weights = tpuport.load_checkpoint(components.place("transformer"))
        eager.set_attn_mode("flash")
        eager.load_state_dict({n: torch.from_numpy(np.array(v)) for n, v in weights.items()})
    assert relative(found, latents_by_eager(components, eager, OPTIONS, encoded)) < 1e-4
    other = open_components(folders[1], "float32")
    assert relative(found, latents_by_eager(other, of_diffusers, OPTIONS, encoded)) < 1e-4


def sparse_version(folder: Path) -> str:
    """Write a version with sparse attention, whose kernel has heads of 128, into a folder."""
    name, like = "720p_t2v_distilled_sparse", folder / "transformer" / "720p_t2v"
    config = json.loads((like / "config.json").read_text())
    tiles = {"win_size": [[1, 1, 1]], "tile_size": [6, 8, 8], "win_type": "fixed", "win_ratio": 10}
    chosen = {"ssta_topk": 4, "ssta_threshold": 0.0, "ssta_lambda": 0.7}
    masks = {"attn_use_text_mask": 1, "attn_mask_share_within_head": 0, "attn_pad_type": "zero"}
    how = {
        "ssta_sampling_type": "importance",
        "ssta_adaptive_pool": None,
        "attn_sparse_type": "ssta",
    }
    config |= {"attn_mode": "flex-block-attn", "attn_param": {**tiles, **chosen, **masks, **how}}
    config |= {"hidden_size": 256, "heads_num": 2, "rope_dim_list": [16, 56, 56]}
    place = folder / "transformer" / name
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    components, draw = open_components(folder, "float32", name), torch.Generator().manual_seed(0)
    with components.tracing():
        model = components.module("transformer").to_empty(device="cpu")
    weights = {
        n: torch.randn(w.shape, generator=draw) * (w[0].numel() ** -0.5 if w.dim() > 1 else 0.1)
        for n, w in model.state_dict().items()
    }
    save_file(weights, place / "diffusion_pytorch_model.safetensors")
    return name


# upstream/test_ssta.py has the attention by itself.
@pytest.mark.slow
def test_a_version_with_sparse_attention_has_it(tmp_path: Path, encoded: dict[str, Any]):
    """Eight tiles a video, of which a token sees its own and two more, and its part of the text."""
    folder = make_weights(tmp_path / "model", layout="upstream")
    sizes = {"height": 144, "width": 160, "frames": 25, "steps": 1, "guidance": 1.0}
    options = dataclasses.replace(
        OPTIONS, **sizes, version=sparse_version(folder), negative_prompt=""
    )
    components = open_components(folder, "float32", options.version)
    text = {name: value for name, value in encoded.items() if "negative" not in name}
    found = latents_of(components, options, text)
    for mode in ("flex-block-attn", "flash"):
        with components.tracing():
            eager: Any = components.module("transformer").to_empty(device="cpu")
            eager.load_state_dict(
                {
                    n: torch.from_numpy(np.array(v))
                    for n, v in tpuport.load_checkpoint(components.place("transformer")).items()
                }
            )
            eager.set_attn_mode(mode)
        difference = relative(found, latents_by_eager(components, eager, options, text))
        assert difference < 1e-4 if mode == "flex-block-attn" else difference > 1e-3


# Above are steps of this class, in test_pipeline.py those with a picture.
@pytest.mark.slow
def test_image_to_video_is_that_of_diffusers(
    folders: tuple[Path, Path],
    encoded: dict[str, Any],
    picture: Path,
    of_diffusers: Any,
    tmp_path: Path,
):
    # Of a shape of which both pipelines cut out the same part.
    with Image.open(picture) as image:
        picture = tmp_path / "first.png"
        image.crop((0, 0, 160, 90)).save(picture)
    options = dataclasses.replace(
        OPTIONS, prompts=("snow",), task="i2v", image=str(picture), steps=2, guidance=1.0
    )
    upstream = open_components(folders[0], "float32", "720p_i2v")
    text = {name: value[1:] for name, value in encoded.items() if "negative" not in name}
    with upstream.tracing():
        given = {**text, **_picture(upstream, options)}
    components = open_components(folders[1], "float32")
    wanted = {**text, **_picture(components, options)}
    np.testing.assert_allclose(given["first_frame"], wanted["first_frame"], atol=1e-5)
    schedule = make_schedule(upstream.scheduler(), options)
    assert schedule[1, 0] == pytest.approx(875)  # a shift of 7, not of 9
    options = dataclasses.replace(options, shift=9.0)
    found = latents_of(upstream, options, given)
    assert relative(found, latents_by_eager(components, of_diffusers, options, wanted)) < 1e-4


# upstream/test_hyvideo.py has the class in bfloat16, test_pipeline.py steps in it.
@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("name", "stored"), [("guidance", "img_mod.linear"), ("mixed", "img_mlp.fc1")]
)
def test_weights_are_spread(folders: tuple[Path, Path], name: str, stored: str):
    components = open_components(folders[0], "float32", OPTIONS.version)
    with components.tracing():
        ported = components.ported("transformer", STEPS, spread_of(name).shard)
    weight = ported.buffers[f"double_blocks.0.{stored}.weight"]
    assert weight.addressable_shards[0].data.size < weight.size


# test_spreading.py has them with diffusers' class, and the rules of this one are checked above.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["guidance", "mixed"])
def test_eight_devices_give_what_one_gives(
    folders: tuple[Path, Path], encoded: dict[str, Any], found: np.ndarray, name: str
):
    components = open_components(folders[0], "float32", OPTIONS.version)
    shared = latents_of(components, OPTIONS, encoded, spread_of(name))
    assert relative(shared, torch.from_numpy(found)) < 1e-5


def test_videos_are_those_of_diffusers(folders: tuple[Path, Path]):
    latents = torch.randn(1, 8, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    upstream = open_components(folders[0], "float32", "720p_t2v")
    with upstream.tracing():
        vae = port_vae(upstream.module("vae", torch.float32), "float32")
        upstream.load(vae.ported, "vae")
        found = np.array(decode_video(vae, latents.numpy()))
    diffusers: Any = importlib.import_module("diffusers")
    with quietly(), torch.no_grad():
        eager = diffusers.AutoencoderKLHunyuanVideo15.from_pretrained(folders[1] / "vae").eval()
        wanted = eager.decode(latents / eager.config.scaling_factor, return_dict=False)[0]
    assert relative(found, wanted) < 1e-4


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


def test_sizes_are_the_nearest_of_the_bucket(folders: tuple[Path, Path]):
    upstream, other = (
        open_components(folders[0], "bf16", "720p_t2v"),
        open_components(folders[1], "bf16"),
    )
    upright = Options(("a",), aspect="9:16")
    assert upstream.size_of(upright) == (1280, 720)
    assert other.size_of(upright) == size_of(upright) == (1264, 720)
    assert upstream.size_of(OPTIONS) == (48, 64)


def test_distilled_models_take_no_guidance(folders: tuple[Path, Path], tmp_path: Path):
    name = "480p_t2v_distilled"
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / name).symlink_to(folders[0] / "transformer" / "720p_t2v")
    components = open_components(tmp_path, "float32")
    with pytest.raises(UsageError, match=f"guidance=6.0 with {name}, which is distilled"):
        components.check(OPTIONS)
    components.check(dataclasses.replace(OPTIONS, guidance=1.0))
    assert components.scheduler().config.shift == 5.0
