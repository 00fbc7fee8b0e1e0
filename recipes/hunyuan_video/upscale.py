"""Super-resolution: a larger video from the latents of a run, in a folder inside the run's.

Upstream's upsampler makes the latents larger, and they get noise (upstream,
hyvideo/pipelines/hunyuan_video_sr_pipeline.py). With them as one more condition, a transformer of
its own takes a few steps from noise. So the folder is a run, whose conditions are written here.
"""

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F

from recipes.hunyuan_video.components import release
from recipes.hunyuan_video.conditions import TEXTS
from recipes.hunyuan_video.denoise import make_noise
from recipes.hunyuan_video.encode import encode_picture, read_image
from recipes.hunyuan_video.generate import How, run_decode, run_denoise, run_stages
from recipes.hunyuan_video.networks import LOW_NOISE
from recipes.hunyuan_video.options import RESOLUTIONS, STRIDE, Options, size_of
from recipes.hunyuan_video.runs import Run
from recipes.hunyuan_video.upstream import open_components
from recipes.records import digest_of
from tpuport.aot.cache.compile_cache import CacheReport
from tpuport.foundation.errors import UsageError

# Of each resolution, the one that it is made from, and the steps (upstream, hyvideo/commons,
# SR_PIPELINE_CONFIGS).
SOURCES = {"720p": ("480p", 6), "1080p": ("720p", 8)}


@dataclass(frozen=True)
class Larger:
    """The video that super-resolution makes.

    Attributes:
        resolution: "720p" or "1080p". "" for what upstream makes of the run's version.
        steps: Denoising steps; None for as many as upstream takes.
        height: Height in pixels, with which a video of any size is made larger. None for the shape
            in the resolution's bucket that is nearest to the video's.
        width: Width in pixels, given together with the height.
    """

    resolution: str = ""
    steps: int | None = None
    height: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        if self.resolution not in ("", *SOURCES):
            raise UsageError(
                f"super_resolution={self.resolution!r}: expected one of {', '.join(SOURCES)}"
            )


def enlarge(upsampler: Any, latents: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Make latents (B, C, T, h, w) larger, (B, C, T, *size), by upstream's class."""
    batch, _, frames = latents.shape[:3]
    pictures = latents.transpose(1, 2).flatten(0, 1)
    pictures = F.interpolate(pictures, size=size, mode="bilinear", align_corners=False)
    return upsampler(pictures.unflatten(0, (batch, frames)).transpose(1, 2))


def larger_options(options: Options, wanted: Larger, size: tuple[int, int]) -> Options:
    """Return the options of the run that makes a run's video larger.

    Args:
        options: Options of the run with the small video.
        wanted: What to make of it.
        size: Height and width of the small video.

    Raises:
        UsageError: There is no such size for the video.
    """
    resolution = wanted.resolution or _default_resolution(options)
    _, steps = SOURCES[resolution]
    height, width = wanted.height, wanted.width
    if height is None and width is None:
        height, width = larger_size(resolution, *size)
    return replace(
        options,
        resolution=resolution,
        height=height,
        width=width,
        steps=steps if wanted.steps is None else wanted.steps,
        guidance=1.0,
        shift=None,
        cache=None,
        version=f"{resolution}_sr_distilled",
    )


def larger_size(resolution: str, height: int, width: int) -> tuple[int, int]:
    """Return the shape in a resolution's bucket that is nearest to that of a small video.

    Args:
        resolution: A name of `SOURCES`.
        height: Height of the small video, which has a shape of the lower resolution's bucket.
        width: Width of the small video.

    Raises:
        UsageError: The small video has another shape.
    """
    source, _ = SOURCES[resolution]
    if (width, height) not in _bucket(source):
        raise UsageError(
            f"A video of {width}x{height} has no shape of {source}, of which {resolution} is made."
            f" What to do: denoise with --resolution {source}, or `upscale` with --height and"
            " --width of the larger video"
        )
    shapes = _bucket(resolution)
    nearest = np.abs(np.array([w / h for w, h in shapes]) - width / height).argmin()
    return shapes[nearest][1], shapes[nearest][0]


def begin_upscaling(low: Run, wanted: Larger) -> Run:
    """Begin the run in which a run's video is made larger, or return the one that was begun.

    Args:
        low: A run of which `denoise` has ended.
        wanted: What to make of it.

    Raises:
        UsageError: There is no such size for the video, or the model has no super-resolution, or
            the larger run was begun with other latents.
    """
    low.expect(low.latents, "denoise")
    options = replace(_larger_options(low, wanted), low_resolution=digest_of([low.latents]))
    return Run.begin(low.components.folder, low.folder / options.resolution, options)


def _larger_options(low: Run, wanted: Larger) -> Options:
    return larger_options(low.options, wanted, low.components.size_of(low.options))


def check_upscaling(low: Run, wanted: Larger) -> None:
    """Raise an error unless a run's video can be made larger. It need not be denoised yet.

    Raises:
        UsageError: There is no such size for the video, or the model has no super-resolution.
    """
    options = _larger_options(low, wanted)
    components = open_components(low.components.folder, options.precision, options.version)
    for name in ("transformer", "upsampler"):
        components.config(name)


def upscale(low: Run, run: Run, how: How) -> CacheReport:
    """Make a run's video larger: write the conditions, denoise and decode.

    Args:
        low: The run with the small video.
        run: Result of `begin_upscaling`.
        how: See `generate.How`.

    Raises:
        UsageError: A stage of the small video has not ended.
        CheckpointError: Weights or files are damaged, or the disk is full.
    """
    stages = {"upscale": partial(_prepare, low), "denoise": run_denoise, "decode": run_decode}
    return run_stages(run, how, stages, stages)


def _prepare(low: Run, run: Run, how: How) -> None:
    """Write the conditions of the larger run: the small video's texts, and its latents."""
    if run.conditions.is_file():
        how.say(f"upscale: {run.conditions} is there")
        return
    start, options = time.monotonic(), run.options
    given = low.read(low.conditions, "encode")
    latents = low.read(low.latents, "denoise")["latents"]
    found = {name: given[name] for name in TEXTS} | {"low": _noisy(run, latents)}
    if options.task == "i2v":
        image, components = read_image(options), run.components
        # SigLIP sees the picture in its own shape, whatever the small video's was.
        own = components.size_of(replace(options, height=None, width=None))
        sizes = own, size_of(options)
        found |= encode_picture(components, *(components.fitted(image, size) for size in sizes))
    run.write(run.conditions, found)
    height, width = size_of(options)
    how.say(f"upscale: {width}x{height}, {time.monotonic() - start:.1f} s")


def _noisy(run: Run, latents: jax.Array) -> jax.Array:
    """Return small latents made larger, with noise, float32 (P, C, T, h, w)."""
    options = run.options
    height, width = size_of(options)
    size = height // STRIDE, width // STRIDE
    # In float32 whatever the transformer computes in, as upstream has it.
    ported = run.components.ported("upsampler", (enlarge,), dtype=torch.float32)
    # Upstream draws it from the GPU's own generator, which its seed does not set.
    dtype = run.components.noise_dtype
    noise = make_noise(options, latents.shape[1], (height, width), dtype, earlier=1)
    share = np.float32(LOW_NOISE)

    def call(params: Any, buffers: Any, given: jax.Array, noise: jax.Array) -> jax.Array:
        larger, _ = ported.apply(params, buffers, None, given, size, method=enlarge.__name__)
        rounded = larger.astype(run.components.dtype).astype(jnp.float32)
        return (1 - share) * rounded + share * noise

    state = ported.params, ported.buffers
    found = jax.jit(call)(*state, jnp.asarray(latents, jnp.float32), noise)
    release(ported)
    return found


def _default_resolution(options: Options) -> str:
    """Return the resolution that upstream makes of a version's videos."""
    for resolution, (source, _) in SOURCES.items():
        if options.version.startswith(f"{source}_"):
            return resolution
    raise UsageError(
        f"version={options.version!r}: upstream makes nothing larger of it. What to do: give"
        f" --super-resolution, one of {', '.join(SOURCES)}"
    )


def _bucket(resolution: str) -> list[tuple[int, int]]:
    """Return the shapes of a resolution, in upstream's order."""
    from diffusers.pipelines.hunyuan_video1_5.image_processor import generate_crop_size_list

    return generate_crop_size_list(RESOLUTIONS[resolution], STRIDE)
