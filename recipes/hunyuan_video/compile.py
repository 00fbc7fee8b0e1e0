"""Compilation of the programs at full size from shapes alone, without a TPU."""

import importlib
from dataclasses import replace
from typing import Any

import jax
import torch

import tpuport
from recipes.hunyuan_video.components import default_dtype, parameters_on_meta
from recipes.hunyuan_video.denoise import denoise_step
from recipes.hunyuan_video.encode import chat_states
from recipes.hunyuan_video.options import FRAMES_A_LATENT, STRIDE, Options, size_of
from recipes.hunyuan_video.prompts import MAX_GLYPH_LENGTH, MAX_LENGTH
from recipes.hunyuan_video.spreading import choose_spread, spread_of
from recipes.hunyuan_video.upscale import SOURCES, Larger, larger_options
from tpuport.aot.report import CompileReport
from tpuport.foundation.errors import UsageError
from tpuport.sharding import make_mesh

LATENT = 32
TEXT, GLYPH, PICTURE = 3584, 1472, 1152
PICTURE_TOKENS = 729
OPENING = 108  # tokens of the system message, by the published tokenizer


def make_transformer(**sizes: Any) -> torch.nn.Module:
    """Return HunyuanVideo 1.5's transformer in bfloat16 on the meta device: 8.33 B as published.

    Args:
        **sizes: Override the published configuration, which is the class's default.
    """
    diffusers: Any = importlib.import_module("diffusers")
    with default_dtype(torch.bfloat16), torch.device("meta"):
        model = diffusers.HunyuanVideo15Transformer3DModel(**sizes)
    return model.eval().requires_grad_(False)


def step_shapes(
    frames: int,
    height: int,
    width: int,
    videos: int = 1,
    *,
    guidance: bool = True,
    i2v: bool = False,
    larger: bool = False,
) -> tuple[Any, ...]:
    """Return the arguments of `denoise_step` after the transformer, as shapes, in order.

    Args:
        frames: Frames of the video, 4n + 1.
        height: Height of the video in pixels.
        width: Width of the video in pixels.
        videos: Number of videos in the batch.
        guidance: Whether there are rows of the negative prompt.
        i2v: Whether there are tokens of a picture.
        larger: Whether there are latents of a small video, for super-resolution.
    """
    sizes = ((frames - 1) // FRAMES_A_LATENT + 1, height // STRIDE, width // STRIDE)
    rows = 2 * videos if guidance else videos
    conditions = {
        "text": ((rows, MAX_LENGTH, TEXT), "bfloat16"),
        "text_mask": ((rows, MAX_LENGTH), "int32"),
        "glyph": ((rows, MAX_GLYPH_LENGTH, GLYPH), "bfloat16"),
        "glyph_mask": ((rows, MAX_GLYPH_LENGTH), "int32"),
        "condition": ((rows, LATENT + 1, *sizes), "bfloat16"),
        "picture": ((rows, PICTURE_TOKENS if i2v else 0, PICTURE), "bfloat16"),
    }
    if larger:
        conditions["low"] = conditions["condition"]
    return (
        jax.ShapeDtypeStruct((videos, LATENT, *sizes), "float32"),
        jax.ShapeDtypeStruct((4,), "float32"),
        {name: jax.ShapeDtypeStruct(*shape) for name, shape in conditions.items()},
    )


def compile_denoise(
    spread: str = "auto",
    topology: str = "v6e-8",
    frames: int = 121,
    height: int = 720,
    width: int = 1280,
    *,
    videos: int = 1,
    guidance: float = 6.0,
    calls: int = 1,
    i2v: bool = False,
    larger: bool = False,
    model: torch.nn.Module | None = None,
    quick: bool = True,
    **how: Any,
) -> CompileReport:
    """Compile one step of denoising, Euler step and guidance included.

    Args:
        spread: A name of `spreading.SPREADS`, or "auto".
        topology: TPU slice, such as "v6e-8".
        frames: Frames of the video, 4n + 1.
        height: Height of the video in pixels.
        width: Width of the video in pixels.
        videos: Number of videos in the batch.
        guidance: Guidance scale; 1 is none and halves the work.
        calls: Calls of the network per step.
        i2v: Whether there are tokens of a picture.
        larger: Whether to compile a step of super-resolution, whose transformer has more channels.
        model: Replaces `make_transformer`'s; must have as many channels.
        quick: Passed to `tpuport.compile_for`.
        **how: Further arguments of `tpuport.compile_for`.

    Raises:
        UsageError: There is no such spread, or no such slice.
        MissingExtraError: libtpu is not installed.
    """
    chips = make_mesh({"data": -1}, topology).size
    name = choose_spread(spread, chips, guidance)
    if name is None:
        raise UsageError(f"topology={topology!r} has one chip, which holds no such model")
    way = spread_of(name)
    channels = {"in_channels": 3 * LATENT + 2} if larger else {}
    model = make_transformer(**channels) if model is None else model
    given: dict[str, bool] = {"guidance": guidance > 1, "i2v": i2v, "larger": larger}
    shapes = step_shapes(frames, height, width, videos, **given)
    with way.attention():
        return tpuport.compile_for(
            tpuport.convert(model, methods=(denoise_step,), verify=False),
            topology,
            inputs=((*shapes, guidance, calls), {}),
            method=denoise_step.__name__,
            mesh=way.mesh(chips),
            rules=way.rules(model),
            quick=quick,
            **how,
        )


def compile_upscale(
    options: Options, spread: str = "auto", topology: str = "v6e-8", **how: Any
) -> CompileReport:
    """Compile one step of super-resolution. Its upsampler, which runs once, is not included.

    Args:
        options: Resolution, aspect and frames of the larger video.
        spread: See `compile_denoise`.
        topology: See `compile_denoise`.
        **how: Further arguments of `compile_denoise`.

    Raises:
        UsageError: No super-resolution makes that resolution, or there is no such slice.
        MissingExtraError: libtpu is not installed.
    """
    wanted = Larger(options.resolution)
    small = replace(options, resolution=SOURCES[wanted.resolution][0])
    size = size_of(larger_options(small, wanted, size_of(small)))
    how = {"guidance": 1.0, "larger": True, **how}
    return compile_denoise(spread, topology, options.frames, *size, **how)


def compile_encode(
    topology: str = "v6e-8", prompts: int = 2, *, quick: bool = True, **how: Any
) -> CompileReport:
    """Compile the text model (Qwen2.5-VL 7B) over prompts, its weights sharded along fsdp.

    Args:
        topology: TPU slice, such as "v6e-8".
        prompts: Number of prompts, the negative one included.
        quick: Passed to `tpuport.compile_for`.
        **how: Further arguments of `tpuport.compile_for`.

    Raises:
        UsageError: There is no such slice.
        MissingExtraError: libtpu is not installed.
    """
    tokens = jax.ShapeDtypeStruct((prompts, OPENING + MAX_LENGTH), "int32")
    return tpuport.compile_for(
        tpuport.convert(make_text_model(), methods=(chat_states,), verify=False),
        topology,
        inputs=(tokens, tokens),
        method=chat_states.__name__,
        mesh={"fsdp": -1},
        rules="fsdp",
        quick=quick,
        **how,
    )


def make_text_model() -> torch.nn.Module:
    """Return Qwen2.5-VL 7B's text model in bfloat16, its parameters on the meta device."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

    config = Qwen2_5_VLTextConfig(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=128000,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    )
    config._attn_implementation = "sdpa"
    kind: Any = importlib.import_module("transformers.models.qwen2_5_vl").Qwen2_5_VLTextModel
    with default_dtype(torch.bfloat16), parameters_on_meta():
        return kind(config).eval().requires_grad_(False)
