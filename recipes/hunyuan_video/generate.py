"""The stages of a run in order. A stage whose result exists is not computed again."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import tpuport
from recipes.hunyuan_video.caching import Kept
from recipes.hunyuan_video.components import release
from recipes.hunyuan_video.conditions import rows_of
from recipes.hunyuan_video.decode import decode_video, load_vae
from recipes.hunyuan_video.denoise import STEPS, Denoiser, make_noise, make_schedule
from recipes.hunyuan_video.encode import encode
from recipes.hunyuan_video.options import Options
from recipes.hunyuan_video.runs import Run
from recipes.hunyuan_video.spreading import Spread, choose_spread, spread_of
from recipes.hunyuan_video.video import to_frames, write_frames, write_video
from tpuport.aot.cache.compile_cache import CacheReport
from tpuport.foundation.errors import UsageError
from tpuport.sharding import make_mesh

OUTPUTS = ("mp4", "png", "latents")
Say = Callable[[str], None]


@dataclass(frozen=True)
class How:
    """Settings for how a run is computed. They do not affect its result.

    Attributes:
        save_every: Number of denoising steps after which the latents are saved.
        calls: Calls of the network per step. With guidance, two take less memory than one.
        spread: How the denoiser is spread over all devices: a name of `spreading.SPREADS` or
            "auto". The text model and the tiles of the video then use all devices, too. None for
            the first device alone.
        output: "mp4", "png" for a picture per frame, or "latents" to decode nothing.
        say: Called with each line of progress.
        on_step: Called after each step with the number of steps done and the total.
    """

    save_every: int = 10
    calls: int = 1
    spread: str | None = None
    output: str = "mp4"
    say: Say = print
    on_step: Callable[[int, int], None] | None = field(default=None)

    def __post_init__(self) -> None:
        if self.save_every < 1:
            raise UsageError(f"save_every={self.save_every}: expected at least 1")
        if self.calls not in (1, 2):
            raise UsageError(f"calls={self.calls}: expected 1 or 2")
        if self.output not in OUTPUTS:
            raise UsageError(f"output={self.output!r}: expected one of {', '.join(OUTPUTS)}")
        if self.spread not in (None, "auto"):
            spread_of(self.spread)


def run_encode(run: Run, how: How) -> None:
    """Encode the prompts and write `conditions.safetensors`.

    Raises:
        UsageError: A prompt is too long, or a component is missing.
        CheckpointError: Weights are damaged, or the disk is full.
    """
    if run.conditions.is_file():
        how.say(f"encode: {run.conditions} is there")
        return
    start = time.monotonic()
    mesh = None if how.spread is None else make_mesh({"fsdp": -1})
    run.write(run.conditions, encode(run.components, run.options, mesh))
    how.say(f"encode: {len(run.options.prompts)} prompts, {time.monotonic() - start:.1f} s")


def run_denoise(run: Run, how: How) -> None:
    """Denoise and write `latents.safetensors`, resuming from saved steps if there are any.

    Raises:
        UsageError: `encode` has not ended.
        CheckpointError: Weights or files are damaged, or the disk is full.
    """
    if run.latents.is_file():
        how.say(f"denoise: {run.latents} is there")
        return
    start, options = time.monotonic(), run.options
    encoded = run.read(run.conditions, "upscale" if options.low_resolution else "encode")
    schedule = make_schedule(run.components.scheduler(), options)
    kept = None if options.step_cache is None else Kept(options.step_cache)
    first, latents = _begun(run, kept)
    if first:
        how.say(f"denoise: resumes after step {first}")
    way = _way(how, options)
    shard = None if way is None else way.shard
    ported = run.components.ported("transformer", STEPS, shard)
    conditions = rows_of(
        encoded,
        latents.shape,
        guidance=options.guidance,
        picture_width=run.components.picture_width,
    )
    denoiser = Denoiser(ported, conditions, options.guidance, how.calls, way, options.step_cache)
    due = first + how.save_every
    for done, now in denoiser.run(latents, schedule, first, kept):
        if how.on_step is not None:
            jax.block_until_ready(now)
            how.on_step(done, options.steps)
        latents = now
        # What steps reuse of the last full one is not saved: a resumed run begins with a full step.
        if due <= done < options.steps and denoiser.is_full(done):
            reused = {} if kept is None else kept.saved()
            run.write(run.partial, {"latents": now, "steps": np.array(done, np.int32), **reused})
            due = done + how.save_every
    release(ported)
    _check_finite(latents)
    run.write(run.latents, {"latents": latents})
    run.partial.unlink(missing_ok=True)
    count = options.steps - first
    how.say(f"denoise: {count} steps, {time.monotonic() - start:.1f} s")


def run_decode(run: Run, how: How) -> None:
    """Decode the latents and write the videos.

    Raises:
        UsageError: `denoise` has not ended.
        CheckpointError: Weights or files are damaged, or the disk is full.
    """
    if how.output == "latents":
        return
    videos = run.videos(how.output)
    missing = [path for path in videos if not path.exists()]
    if not missing:
        how.say(f"decode: {', '.join(map(str, videos))} there")
        return
    start = time.monotonic()
    latents = run.read(run.latents, "denoise")["latents"]
    mesh = None if how.spread is None else make_mesh({"data": -1})
    vae = load_vae(run.components, "decoder", mesh)
    for number, path in enumerate(videos):
        if path in missing:
            video = decode_video(vae, latents[number : number + 1])
            about = {**run.about(), "prompt": run.options.prompts[number]}
            write = write_frames if how.output == "png" else write_video
            write(path, to_frames(np.asarray(video[0], np.float32)), about=about)
    release(vae.ported)
    how.say(f"decode: {', '.join(map(str, missing))}, {time.monotonic() - start:.1f} s")


Stage = Callable[[Run, How], None]
STAGES: dict[str, Stage] = {
    "encode": run_encode,
    "denoise": run_denoise,
    "decode": run_decode,
}


def run_stages(
    run: Run,
    how: How,
    stages: Iterable[str] = STAGES,
    named: Mapping[str, Stage] = STAGES,
) -> CacheReport:
    """Run some stages in order, with their programs kept in the compile cache.

    Args:
        run: The run.
        how: How it is computed.
        stages: Names of the stages.
        named: Functions of the stages by name.

    Returns:
        The programs that were loaded and those that were compiled.

    Raises:
        UsageError: A stage raised it.
        CheckpointError: A stage raised it.
    """
    with tpuport.compile_cache(min_compile_seconds=0) as cache, run.components.tracing():
        for stage in stages:
            named[stage](run, how)
    return cache.report


def _begun(run: Run, kept: Kept | None) -> tuple[int, jax.Array]:
    """Return the number of steps that were saved, and the latents after them.

    What these steps left is given to `kept`.
    """
    options = run.options
    if run.partial.is_file():
        found = tpuport.load_checkpoint(run.partial)
        if {"latents", "steps"} <= {*found} and 0 < int(found["steps"]) < options.steps:
            if kept is not None:
                kept.restore(found)
            return int(found["steps"]), found["latents"]
        raise UsageError(f"{run.partial} is not of this run. What to do: remove it")
    channels = run.components.config("vae")["latent_channels"]
    size = run.components.size_of(options)
    noise = make_noise(options, channels, size, run.components.noise_dtype)
    return 0, noise


def _way(how: How, options: Options) -> Spread | None:
    """Return the spread of the denoiser over the available devices."""
    if how.spread is None:
        return None
    name = choose_spread(how.spread, jax.device_count(), options.guidance)
    return None if name is None else spread_of(name)


def _check_finite(latents: Any) -> None:
    """Raise an error for latents that are not finite, which would silently decode to black."""
    values = np.asarray(latents)
    if not np.isfinite(values).all():
        bad = int((~np.isfinite(values)).sum())
        raise UsageError(
            f"{bad} of {values.size} latents are not finite. What to do: try precision='float32',"
            " or look whether the weights are complete"
        )
