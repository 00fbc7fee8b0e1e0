"""Stage 2: from noise to latents, a compiled step at a time."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from recipes.hunyuan_video.caching import StepCache, keeping, reusing
from recipes.hunyuan_video.networks import flow_of
from recipes.hunyuan_video.options import STRIDE, Options
from recipes.hunyuan_video.spreading import Spread
from tpuport.model.ported import PortedModel

Kept = list[tuple[torch.Tensor, ...]]


def denoise_step(
    transformer: Any,
    latents: torch.Tensor,
    times: torch.Tensor,
    conditions: Mapping[str, torch.Tensor],
    guidance: float,
    calls: int = 1,
) -> torch.Tensor:
    """One Euler step of the flow (diffusers, FlowMatchEulerDiscreteScheduler.step).

    Latents stay in float32 however the network computes. With guidance, all conditions have the
    rows of the negative prompt first.

    Args:
        transformer: of a class in `networks.NETWORKS`.
        latents: float32 (P, C, ...).
        times: float32 (4,): timestep and sigma, and those of the next step.
        conditions: by name, of 2P rows each with guidance, else P; the floating ones tell what the
            network computes in.
        guidance: 1 for none.
        calls: of the network; two with guidance take less memory than one.
    """
    timestep, sigma, next_timestep, next_sigma = times.unbind(0)
    dtype = next(v.dtype for v in conditions.values() if v.dtype.is_floating_point)
    hidden = torch.cat([latents.to(dtype)] * (2 if guidance > 1 else 1))
    timesteps = torch.stack([timestep, next_timestep])
    flow = flow_of(transformer, hidden, timesteps, conditions, calls)
    if guidance > 1:
        without, with_prompt = flow.chunk(2)
        flow = without + guidance * (with_prompt - without)
    return latents + (next_sigma - sigma) * flow.float()


def keeping_step(
    transformer: Any,
    latents: torch.Tensor,
    times: torch.Tensor,
    conditions: Mapping[str, torch.Tensor],
    guidance: float,
    calls: int,
    kind: str,
) -> tuple[torch.Tensor, Kept]:
    """`denoise_step`, and what a later step may reuse of it, call by call.

    Args:
        transformer: see `denoise_step`, as for the others.
        latents: likewise.
        times: likewise.
        conditions: likewise.
        guidance: likewise.
        calls: likewise.
        kind: of `caching.StepCache`.
    """
    with keeping(transformer, kind) as kept:
        return denoise_step(transformer, latents, times, conditions, guidance, calls), kept


def reusing_step(
    transformer: Any,
    latents: torch.Tensor,
    times: torch.Tensor,
    conditions: Mapping[str, torch.Tensor],
    kept: Kept,
    guidance: float,
    calls: int,
    kind: str,
) -> torch.Tensor:
    """`denoise_step`, with what `keeping_step` gave in place of the blocks."""
    with reusing(transformer, kind, kept):
        return denoise_step(transformer, latents, times, conditions, guidance, calls)


STEPS = (denoise_step, keeping_step, reusing_step)


@dataclass(frozen=True)
class Denoiser:
    """The step of a ported transformer, compiled once for all steps of a run.

    Args:
        ported: a transformer with the methods `STEPS`.
        conditions: see `denoise_step`.
        guidance: 1 for none.
        calls: see `denoise_step`.
        way: how the transformer was spread over a mesh; None if it was not.
        cache: which steps reuse what of others; None to compute all.
    """

    ported: PortedModel
    conditions: Mapping[str, jax.Array]
    guidance: float = 1.0
    calls: int = 1
    way: Spread | None = None
    cache: StepCache | None = None

    def run(
        self, latents: jax.Array, schedule: np.ndarray[Any, Any], first: int = 0
    ) -> Iterator[tuple[int, jax.Array]]:
        """Number of steps done and the latents, after each step from the first on.

        The memory of the latents that were given, and of those of each step, goes to the next.

        Args:
            latents: float32 (P, C, ...).
            schedule: of `make_schedule`.
            first: the step to begin with, a full one.
        """
        conditions, latents = self._placed(dict(self.conditions)), self._placed(latents)
        full, reuse = self._programs()
        state, kept = (self.ported.params, self.ported.buffers), None
        for number in range(first, len(schedule)):
            times = self._placed(jnp.asarray(schedule[number]))
            with nullcontext() if self.way is None else self.way.attention():
                if self.is_full(number):
                    kept = None  # its memory is needed for what comes
                    latents, kept = full(*state, latents, times, conditions)
                else:
                    latents = reuse(*state, latents, times, conditions, kept)
            yield number + 1, latents

    def is_full(self, step: int) -> bool:
        """Whether a step, counted from 0, is computed by all blocks."""
        return self.cache is None or self.cache.is_full(step)

    def _programs(self) -> tuple[Any, Any]:
        """A full step with what it keeps, and one that reuses that."""
        guidance, calls, cache = self.guidance, self.calls, self.cache

        def call(method: Any, params: Any, buffers: Any, *args: Any) -> Any:
            return self.ported.apply(params, buffers, None, *args, method=method.__name__)[0]

        def step(params: Any, buffers: Any, latents: Any, times: Any, given: Any) -> Any:
            if cache is None:
                return call(
                    denoise_step, params, buffers, latents, times, given, guidance, calls
                ), ()
            options = guidance, calls, cache.kind
            return call(keeping_step, params, buffers, latents, times, given, *options)

        def cached_step(
            params: Any, buffers: Any, latents: Any, times: Any, given: Any, kept: Any
        ) -> Any:
            options = guidance, calls, cache.kind if cache else None
            return call(reusing_step, params, buffers, latents, times, given, kept, *options)

        return jax.jit(step, donate_argnums=2), jax.jit(cached_step, donate_argnums=2)

    def _placed(self, values: Any) -> Any:
        """On all devices of the mesh; which part of them a device needs, the program knows."""
        mesh = self.ported.mesh
        return values if mesh is None else jax.device_put(values, NamedSharding(mesh, P()))


def make_schedule(scheduler: Any, options: Options) -> np.ndarray[Any, Any]:
    """Timestep and sigma of each step, and those of the next: float32 (steps, 4).

    Args:
        scheduler: `FlowMatchEulerDiscreteScheduler` of the folder.
        options: of the run; its shift, if it has one, is taken instead of the scheduler's.
    """
    if options.shift is not None:
        scheduler.set_shift(options.shift)
    # As diffusers' pipelines of this model give them.
    return schedule_of(scheduler, sigmas=np.linspace(1.0, 0.0, options.steps + 1)[:-1])


def schedule_of(scheduler: Any, **wanted: Any) -> np.ndarray[Any, Any]:
    """Timestep and sigma of each step, and those of the next: float32 (steps, 4).

    Args:
        scheduler: a flow-matching one of diffusers.
        **wanted: for its `set_timesteps`.
    """
    scheduler.set_timesteps(**wanted)
    sigmas: Any = np.asarray(scheduler.sigmas)
    timesteps: Any = np.asarray(scheduler.timesteps)
    after = np.append(timesteps[1:], 0)
    return np.stack([timesteps, sigmas[:-1], after, sigmas[1:]], axis=1).astype(np.float32)


def make_noise(
    options: Options, channels: int, size: tuple[int, int], dtype: torch.dtype
) -> jax.Array:
    """The latents that a run begins with, float32 (P, C, T, h, w).

    The numbers are PyTorch's on the CPU, so that a seed means the same as there, in the dtype that
    the network computes in.
    """
    height, width = (side // STRIDE for side in size)
    shape = (len(options.prompts), channels, options.latent_frames, height, width)
    generator = torch.Generator().manual_seed(options.seed)
    noise = torch.randn(shape, generator=generator, dtype=dtype)
    return jnp.asarray(noise.float().numpy())
