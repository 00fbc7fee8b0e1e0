"""Upstream's super-resolution pipeline in eager PyTorch on the CPU, from a tiny model's folder."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tpuport
from recipes.hunyuan_video.components import Components
from recipes.quiet import quietly


def larger_pipeline(components: Components, resolution: str, encoded: Any) -> Any:
    """The pipeline with upstream's transformer, upsampler, scheduler and VAE.

    Text comes from `encoded`, since its encoders are those of the small video.

    Args:
        components: a folder in upstream's layout, with the version for the resolution.
        resolution: what the video becomes.
        encoded: what `encode` gave for the small video.
    """
    sr = upstream_module()
    commons: Any = importlib.import_module("hyvideo.commons")
    config = components.config("transformer")

    class Pipeline(sr.HunyuanVideo_1_5_SR_Pipeline):
        """With the tiny model's channels, which the published pipeline has as a number."""

        def prepare_latents(self, batch_size: int, _: int, *args: Any, **named: Any) -> Any:
            """As many channels as the VAE has, drawn in bfloat16 as where upstream runs."""
            args = (*args[:3], torch.bfloat16, *args[4:])
            return (
                super()
                .prepare_latents(batch_size, self.vae.config.latent_channels, *args, **named)
                .float()
            )

    with quietly():
        made = Pipeline(
            vae=_eager(components, "vae"),
            text_encoder=_Texts(encoded),
            transformer=_eager(components, "transformer"),
            scheduler=None,
            upsampler=_eager(components, "upsampler"),
            byt5_model=None,
            byt5_tokenizer=None,
            vision_states_dim=config["vision_states_dim"],
            execution_device="cpu",
            vision_encoder=_Vision(components),
            **commons.SR_PIPELINE_CONFIGS[f"{resolution}_sr_distilled"],
        )
    made._prepare_byt5_embeddings = lambda prompts, device: {
        "byt5_text_states": _torch(encoded["glyph"]),
        "byt5_text_mask": _torch(encoded["glyph_mask"]),
    }
    made.target_dtype = made.vae_dtype = torch.float32
    made.set_progress_bar_config(disable=True)
    return made


def latents_of_steps(pipeline: Any, seed: int, **given: Any) -> tuple[list[torch.Tensor], Any]:
    """The latents after each step, and the video.

    Args:
        pipeline: what `larger_pipeline` made.
        seed: of the noise that denoising begins with, and of that of the small video.
        **given: arguments of the pipeline's call.
    """
    found: list[torch.Tensor] = []
    make = pipeline._create_scheduler

    def watched(shift: float) -> Any:
        scheduler = make(shift)
        step = scheduler.step

        def kept(*args: Any, generator: Any = None, **named: Any) -> Any:
            made = step(*args, generator=generator, **named)
            found.append(made[0].detach().clone())
            return made

        scheduler.step = kept
        return scheduler

    def drawing(latents: torch.Tensor, strength: float = 0.7) -> torch.Tensor:
        """Noise from the global generator, from which other noise of that shape is drawn before."""
        torch.manual_seed(seed)
        _, noise = (torch.randn_like(latents, dtype=torch.bfloat16).float() for _ in range(2))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn_like", lambda _: noise)
            return add(latents, strength)

    add = pipeline.add_noise_to_lq
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.setattr(pipeline, "_create_scheduler", watched)
        patch.setattr(pipeline, "add_noise_to_lq", drawing)
        video = pipeline(seed=seed, **given).videos
    return found, video


class _Texts:
    """A text model whose states are known."""

    def __init__(self, encoded: Any) -> None:
        self.states, self.mask = _torch(encoded["text"]), _torch(encoded["text_mask"])
        self.max_length, self.dtype = self.states.shape[1], torch.float32

    def text2tokens(self, prompt: Any, **_: Any) -> Any:
        return prompt

    def encode(self, prompt: Any, **_: Any) -> Any:
        return SimpleNamespace(hidden_state=self.states, attention_mask=self.mask)


class _Vision:
    """SigLIP in eager PyTorch, called as upstream's encoder is."""

    def __init__(self, components: Components) -> None:
        from transformers import SiglipVisionModel

        self.processor = components.image_processor()
        with quietly():
            self.model = SiglipVisionModel.from_pretrained(components.place("image_encoder"))

    def encode_images(self, images: np.ndarray) -> Any:
        return self.model(**self.processor.preprocess(images=images, return_tensors="pt"))


def _eager(components: Components, name: str) -> Any:
    """A component on the CPU, its weights read by PyTorch."""
    model: Any = components.module(name, torch.float32).to_empty(device="cpu")
    weights = tpuport.load_checkpoint(components.place(name))
    model.load_state_dict({n: torch.from_numpy(np.array(v)) for n, v in weights.items()})
    if name == "transformer":
        model.set_attn_mode("flash")
    return model


def _torch(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def upstream_module() -> Any:
    """Upstream's module, which imports what an installation for TPU lacks.

    Of torchvision it uses four transforms of an image, which are here by what its documentation
    says of them.
    """
    # transformers and diffusers look for torchvision when they are imported.
    for name in _BEFORE:
        importlib.import_module(name)
    transforms = types.ModuleType("torchvision.transforms")
    vars(transforms).update(
        Compose=_compose,
        Resize=_resize,
        CenterCrop=_center_crop,
        ToTensor=_to_tensor,
        Normalize=_normalize,
        InterpolationMode=SimpleNamespace(LANCZOS=Image.Resampling.LANCZOS),
    )
    vision = types.ModuleType("torchvision")
    vars(vision)["transforms"] = transforms
    missing = {"psutil": {"psutil": types.ModuleType("psutil")}}
    missing["torchvision"] = {"torchvision": vision, "torchvision.transforms": transforms}
    with pytest.MonkeyPatch.context() as patch:
        for name, modules in missing.items():
            if importlib.util.find_spec(name) is None:
                for path, module in modules.items():
                    patch.setitem(sys.modules, path, module)
        return importlib.import_module("hyvideo.pipelines.hunyuan_video_sr_pipeline")


_BEFORE = (
    "diffusers.models.autoencoders.autoencoder_kl",
    "diffusers.pipelines.pipeline_utils",
    "hyvideo.models.text_encoders.byT5",
    "hyvideo.models.vision_encoder",
)
Transform = Callable[[Any], Any]


def _compose(steps: list[Transform]) -> Transform:
    def call(image: Any) -> Any:
        for step in steps:
            image = step(image)
        return image

    return call


def _resize(size: tuple[int, int], interpolation: Any) -> Transform:
    return lambda image: image.resize(size[::-1], interpolation)


def _center_crop(size: tuple[int, int]) -> Transform:
    def call(image: Any) -> Any:
        top, left = (round((a - b) / 2) for a, b in zip(image.size[::-1], size, strict=True))
        return image.crop((left, top, left + size[1], top + size[0]))

    return call


def _to_tensor() -> Transform:
    return lambda image: torch.from_numpy(np.asarray(image, np.float32) / 255).permute(2, 0, 1)


def _normalize(mean: list[float], std: list[float]) -> Transform:
    return lambda pixels: (pixels - mean[0]) / std[0]
