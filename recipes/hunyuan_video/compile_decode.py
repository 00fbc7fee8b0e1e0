"""Compilation of a video's decoding from shapes alone, without a TPU."""

from typing import Any

import jax
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import (
    AutoencoderKLHunyuanVideo15,
)

import tpuport
from recipes.hunyuan_video.decode import decode_latents, factors, port_vae
from recipes.hunyuan_video.vae_patches import patched_vae
from tpuport.aot.report import CompileReport
from tpuport.foundation.errors import UsageError


def compile_decode(
    topology: str = "v6e-8",
    frames: int = 121,
    height: int = 720,
    width: int = 1280,
    **how: Any,
) -> CompileReport:
    """Compile the decoding of one video in bfloat16, its tiles spread over the chips.

    Args:
        topology: TPU slice, such as "v6e-8".
        frames: Frames of the video: one more than a multiple of 4.
        height: Height of the video in pixels: a multiple of 16.
        width: Width of the video in pixels: a multiple of 16.
        **how: `model`, a VAE to compile instead of the published one; and further arguments of
            `tpuport.compile_for`.

    Raises:
        UsageError: There is no video of that size.
        MissingExtraError: libtpu is not installed.
    """
    model: Any = how.pop("model", None) or published_vae()
    ratio, factor = factors(model)
    if frames < 1 or (frames - 1) % ratio or height % factor or width % factor:
        raise UsageError(
            f"frames={frames}, height={height}, width={width}: expected frames to be one more than"
            f" a multiple of {ratio}, height and width multiples of {factor}"
        )
    sizes = ((frames - 1) // ratio + 1, height // factor, width // factor)
    latents = jax.ShapeDtypeStruct((1, model.config.latent_channels, *sizes), "float32")
    with patched_vae(model):
        return tpuport.compile_for(
            port_vae(model).ported,
            topology,
            inputs=(latents,),
            method=decode_latents,
            rules="replicated",
            mesh={"data": -1},
            **how,
        )


def published_vae() -> AutoencoderKLHunyuanVideo15:
    """Return a VAE of the published configuration on the meta device."""
    with torch.device("meta"):
        return AutoencoderKLHunyuanVideo15()
