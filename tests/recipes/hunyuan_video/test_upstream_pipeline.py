"""Upstream's own pipeline, untouched, and the recipe: the same latents and videos.

Latents do not need torchvision, which the pipeline uses for a first picture alone.
"""

import dataclasses
import importlib
import importlib.util
import sys
import types
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from recipes.hunyuan_video import options as recipe_options
from recipes.hunyuan_video.decode import decode_video, load_vae
from recipes.hunyuan_video.denoise import make_noise, make_schedule
from recipes.hunyuan_video.encode import encode
from recipes.hunyuan_video.make_weights import make_weights
from recipes.hunyuan_video.options import Options
from recipes.hunyuan_video.upstream import open_components
from recipes.quiet import quietly
from tests.recipes.hunyuan_video.denoisers import denoiser_of
from tests.recipes.hunyuan_video.eager import relative
from tests.recipes.hunyuan_video.short import LENGTH

pytestmark = [
    pytest.mark.usefixtures("short"),
    pytest.mark.skipif(
        importlib.util.find_spec("hyvideo") is None,
        reason="waits for hyvideo: pip install --no-deps hyvideo-fork",
    ),
    # Eager PyTorch's word for its attention without a GPU.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:Falling back from `flash`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing config attribute:FutureWarning"),
]
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None
# Sides of the bucket's square: its sizes are not those of the model, which are too large here.
SIDE = 128
TEXT = Options(
    ('a sign that says "open"',),
    # Upstream gives the quotes of a negative prompt to no encoder.
    negative_prompt='blurred, "late"',
    frames=5,
    steps=3,
    seed=7,
    precision="float32",
    version="720p_t2v",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(tmp_path_factory.mktemp("upstream") / "model", layout="upstream")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the recipe a small bucket, and upstream a logger if it has none."""
    monkeypatch.setitem(recipe_options.RESOLUTIONS, "720p", SIDE)
    if importlib.util.find_spec("loguru") is None:
        module: Any = types.ModuleType("loguru")
        module.logger = types.SimpleNamespace(warning=print, error=print)
        monkeypatch.setitem(sys.modules, "loguru", module)


class Float32(torch.autocast):
    """What the pipeline computes in float16 or bfloat16, in float32."""

    def __init__(self, device_type: str, dtype: Any = None, enabled: bool = True) -> None:
        super().__init__(device_type, dtype=dtype, enabled=False)


def by_upstream(folder: Path, options: Options, *, ports: bool) -> tuple[Any, Any]:
    """Latents and video of upstream's pipeline, in float32.

    Args:
        folder: of the model.
        options: of the run.
        ports: whether its modules become programs, or are run by eager PyTorch.
    """
    absent = [] if HAS_TORCHVISION else ["torchvision"]
    with tpuport.porting("hyvideo", absent=absent, port_modules=ports), quietly():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "autocast", Float32)
            pipeline = _pipeline(folder, options, patch)
            kept: dict[str, torch.Tensor] = {}
            decode = pipeline.vae.decode

            def decoded(latents: torch.Tensor, **how: Any) -> Any:
                kept["latents"] = latents.cpu() * pipeline.vae.config.scaling_factor
                return decode(latents, **how)

            pipeline.vae.decode = decoded
            made = pipeline(
                prompt=options.prompts[0],
                aspect_ratio=options.aspect,
                video_length=options.frames,
                prompt_rewrite=False,
                num_inference_steps=options.steps,
                enable_sr=False,
                negative_prompt=options.negative_prompt,
                seed=options.seed,
                reference_image=options.image,
            )
    return kept["latents"], made.videos


def _pipeline(folder: Path, options: Options, patch: pytest.MonkeyPatch) -> Any:
    """Upstream's pipeline with its own weights; only precisions and sizes are set."""
    for name in ("hyvideo.commons", "hyvideo.models.text_encoders"):
        patch.setitem(importlib.import_module(name).PRECISION_TO_TYPE, "fp16", torch.float32)
    vision = importlib.import_module("hyvideo.models.vision_encoder")
    # What transformers called so when upstream was written; now torchvision resizes, and rounds.
    processor = importlib.import_module("transformers").SiglipImageProcessorPil
    patch.setattr(vision, "SiglipImageProcessor", processor)
    module = importlib.import_module("hyvideo.pipelines.hunyuan_video_pipeline")
    pipeline = module.HunyuanVideo_1_5_Pipeline.create_pipeline(
        str(folder),
        options.version,
        transformer_dtype=torch.float32,
        device=torch.device("cuda"),
        vae_dtype=torch.float32,
    )
    pipeline.vae.to(torch.float32)  # a checkout does not ask for the dtype
    pipeline.text_len = LENGTH
    pipeline.target_size_config["720p"]["bucket_hw_base_size"] = SIDE
    pipeline.autocast_enabled = pipeline.vae_autocast_enabled = False
    # The dtype of a picture's tokens, and with it that of noise, which is bfloat16 for all.
    pipeline.target_dtype = torch.float32
    prepare = pipeline.prepare_latents

    def prepared(*args: Any) -> torch.Tensor:
        return prepare(*args[:5], torch.bfloat16, *args[6:])

    pipeline.prepare_latents = prepared
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def by_recipe(folder: Path, options: Options) -> tuple[Any, Any]:
    """Latents and video of the recipe."""
    components = open_components(folder, options.precision, options.version)
    size = components.size_of(options)
    noise = make_noise(options, 8, size, components.noise_dtype)
    with components.tracing():
        encoded = encode(components, options)
        denoiser = denoiser_of(components, options, noise.shape, encoded=encoded)
        *_, (_, latents) = denoiser.run(noise, make_schedule(components.scheduler(), options))
        video = decode_video(load_vae(components, "decoder"), latents)
    return latents, np.clip(np.asarray(video) / 2 + 0.5, 0, 1)


def check(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert relative(one, other) < 1e-4
    assert wanted[1].std() > 0.01


@pytest.fixture(scope="module")
def eager(folder: Path) -> Any:
    """Latents and video of upstream's pipeline in eager PyTorch."""
    return cache(partial(by_upstream, folder, ports=False))


def test_text_to_video(folder: Path, eager: Any):
    check(by_recipe(folder, TEXT), eager(TEXT))


# Its parts are compiled as they are in `test_text_to_video` and in upstream/test_hyvideo.py.
@pytest.mark.slow
def test_text_to_video_by_the_pipeline_itself(folder: Path, eager: Any):
    check(by_upstream(folder, TEXT, ports=True), eager(TEXT))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCHVISION, reason="waits for torchvision, which cuts the picture")
def test_image_to_video(folder: Path, eager: Any, picture: Path):
    options = dataclasses.replace(TEXT, task="i2v", image=str(picture), version="720p_i2v")
    wanted = eager(options)
    check(by_recipe(folder, options), wanted)
    check(by_upstream(folder, options, ports=True), wanted)
