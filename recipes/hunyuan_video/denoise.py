"""Stage 2: from noise to latents, with one compiled step."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from recipes.hunyuan_video.caching import Kept, StepCache, Values, keeping, reusing
from recipes.hunyuan_video.networks import flow_of, network_of
from recipes.hunyuan_video.options import STRIDE, Options
from recipes.hunyuan_video.spreading import Spread
from tpuport.model.ported_model import PortedModel


def denoise_step(
    transformer: Any,
    latents: torch.Tensor,
    times: torch.Tensor,
    conditions: Mapping[str, torch.Tensor],
    guidance: float,
    calls: int = 1,
) -> torch.Tensor:
    """Take one Euler step of the flow (diffusers, FlowMatchEulerDiscreteScheduler.step).

    Latents stay in float32 whatever the network computes in. With guidance, all conditions have the
    rows of the negative prompt first. A network that predicts a velocity takes a step of DDIM: its
    latents are (1 - sigma) of data and sigma of noise, scaled so that the squares of the two
    factors add up to 1.

    Args:
        transformer: Of a class in `networks.NETWORKS`.
        latents: float32 (P, C, ...).
        times: float32 (4,): timestep and sigma of this step, then of the next.
        conditions: Conditions by name, of 2P rows each with guidance, else P. The dtype of the
            floating ones is what the network computes in.
        guidance: Guidance scale; 1 for none.
        calls: Calls of the network. With guidance, two take less memory than one.
    """
    timestep, sigma, next_timestep, next_sigma = times.unbind(0)
    dtype = next(v.dtype for v in conditions.values() if v.dtype.is_floating_point)
    hidden = torch.cat([latents.to(dtype)] * (2 if guidance > 1 else 1))
    timesteps = torch.stack([timestep, next_timestep])
    flow = flow_of(transformer, hidden, timesteps, conditions, calls)
    if guidance > 1:
        without, with_prompt = flow.chunk(2)
        flow = without + guidance * (with_prompt - without)
    if network_of(transformer).predicts == "velocity":
        data, noise = _shares(sigma)
        clean = data * latents - noise * flow.float()
        added = noise * latents + data * flow.float()
        data, noise = _shares(next_sigma)
        return data * clean + noise * added
    return latents + (next_sigma - sigma) * flow.float()


def _shares(sigma: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of data and noise at a sigma, whose squares add up to 1."""
    length = torch.sqrt(sigma**2 + (1 - sigma) ** 2)
    return (1 - sigma) / length, sigma / length


def keeping_step(
    transformer: Any,
    latents: torch.Tensor,
    times: torch.Tensor,
    conditions: Mapping[str, torch.Tensor],
    guidance: float,
    calls: int,
    kind: str,
) -> tuple[torch.Tensor, Values]:
    """Take a `denoise_step` and return also what a later step may reuse, call by call.

    Args:
        transformer: See `denoise_step`.
        latents: See `denoise_step`.
        times: See `denoise_step`.
        conditions: See `denoise_step`.
        guidance: See `denoise_step`.
        calls: See `denoise_step`.
        kind: See `caching.StepCache`.
    """
    with keeping(transformer, kind) as kept:
        return denoise_step(transformer, latents, times, conditions, guidance, calls), kept


def reusing_step(
    transformer: Any,
    latents: torch.Tensor,
    times: torch.Tensor,
    conditions: Mapping[str, torch.Tensor],
    kept: Values,
    guidance: float,
    calls: int,
    kind: str,
) -> torch.Tensor:
    """Take a `denoise_step` with what `caching.Kept` gives in place of the blocks' results."""
    with reusing(transformer, kind, kept):
        return denoise_step(transformer, latents, times, conditions, guidance, calls)


STEPS = (denoise_step, keeping_step, reusing_step)


@dataclass(frozen=True)
class Denoiser:
    """The step of a ported transformer, compiled once for all steps of a run.

    Args:
        ported: A transformer with the methods `STEPS`.
        conditions: See `denoise_step`.
        guidance: Guidance scale; 1 for none.
        calls: See `denoise_step`.
        way: The spread of the transformer over a mesh; None for one device.
        cache: The steps that reuse results of others; None to compute all.
    """

    ported: PortedModel
    conditions: Mapping[str, jax.Array]
    guidance: float = 1.0
    calls: int = 1
    way: Spread | None = None
    cache: StepCache | None = None

    def run(
        self,
        latents: jax.Array,
        schedule: np.ndarray[Any, Any],
        first: int = 0,
        kept: Kept | None = None,
    ) -> Iterator[tuple[int, jax.Array]]:
        """Yield the number of steps done and the latents after each step.

        The buffers of the given latents and of each step's latents are donated to the next step.

        Args:
            latents: float32 (P, C, ...).
            schedule: Result of `make_schedule`.
            first: Step to begin with, which must be a full one.
            kept: What the steps before it have left; None at the first one.
        """
        conditions, latents = self._placed(dict(self.conditions)), self._placed(latents)
        full, reuse = self._programs
        state = self.ported.params, self.ported.buffers
        if self.cache is not None:
            kept = kept or Kept(self.cache)
        for number in range(first, len(schedule)):
            times = self._placed(jnp.asarray(schedule[number]))
            with nullcontext() if self.way is None else self.way.attention():
                if kept is None:
                    latents, _ = full(*state, latents, times, conditions)
                elif self.is_full(number):
                    kept.drop()  # frees its memory for the step
                    latents, values = full(*state, latents, times, conditions)
                    kept.take(number, values)
                    del values
                else:
                    latents = reuse(*state, latents, times, conditions, kept.at(number))
            yield number + 1, latents

    def is_full(self, step: int) -> bool:
        """Return whether a step, counted from 0, is computed by all blocks."""
        return self.cache is None or self.cache.is_full(step)

    @cached_property
    def _programs(self) -> tuple[Any, Any]:
        """Return two jitted steps: a full one, which keeps values, and one that reuses them."""
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
        """Return values replicated on the mesh. The compiled program shards them as it needs."""
        mesh = self.ported.mesh
        return values if mesh is None else jax.device_put(values, NamedSharding(mesh, P()))


def make_schedule(scheduler: Any, options: Options) -> np.ndarray[Any, Any]:
    """Return timestep and sigma of each step and of the next: float32 (steps, 4).

    Args:
        scheduler: `FlowMatchEulerDiscreteScheduler` of the folder.
        options: Options of the run. Its shift, if it has one, replaces the scheduler's.
    """
    if options.shift is not None:
        scheduler.set_shift(options.shift)
    # The same sigmas as in diffusers' pipelines of this model.
    return schedule_of(scheduler, sigmas=np.linspace(1.0, 0.0, options.steps + 1)[:-1])


def schedule_of(scheduler: Any, **wanted: Any) -> np.ndarray[Any, Any]:
    """Return timestep and sigma of each step and of the next: float32 (steps, 4).

    Args:
        scheduler: A flow-matching scheduler of diffusers.
        **wanted: Arguments of its `set_timesteps`.
    """
    scheduler.set_timesteps(**wanted)
    sigmas: Any = np.asarray(scheduler.sigmas)
    timesteps: Any = np.asarray(scheduler.timesteps)
    after = np.append(timesteps[1:], 0)
    return np.stack([timesteps, sigmas[:-1], after, sigmas[1:]], axis=1).astype(np.float32)


def velocity_schedule(scheduler: Any, steps: int) -> np.ndarray[Any, Any]:
    """Return what `schedule_of` does for DDIM.

    Args:
        scheduler: diffusers' `CogVideoXDDIMScheduler`.
        steps: Denoising steps.
    """
    scheduler.set_timesteps(steps)
    timesteps: Any = np.asarray(scheduler.timesteps)
    before = timesteps - scheduler.config.num_train_timesteps // steps
    kept = np.asarray(scheduler.alphas_cumprod, np.float64)
    # Where no timestep is left, a share of the data that the scheduler knows.
    last = float(scheduler.final_alpha_cumprod)
    shares = kept[timesteps], np.where(before >= 0, kept[np.maximum(before, 0)], last)
    data, noise = (np.sqrt([*map(part, shares)]) for part in (np.asarray, lambda x: 1 - x))
    sigmas = noise / (data + noise)
    after = np.append(timesteps[1:], 0)
    return np.stack([timesteps, sigmas[0], after, sigmas[1]], axis=1).astype(np.float32)


def make_noise(
    options: Options,
    channels: int,
    size: tuple[int, int],
    dtype: torch.dtype,
    earlier: int = 0,
) -> jax.Array:
    """Return the latents that a run begins with, float32 (P, C, T, h, w).

    The numbers are PyTorch's on the CPU, drawn in the dtype that the network computes in, so that a
    seed means the same as in PyTorch.

    Args:
        options: Options of the run.
        channels: Channels of the latents.
        size: Height and width of the video.
        dtype: Dtype in which the numbers are drawn.
        earlier: Number of such latents that are drawn before these.
    """
    height, width = (side // STRIDE for side in size)
    shape = (len(options.prompts), channels, options.latent_frames, height, width)
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(earlier):
        torch.randn(shape, generator=generator, dtype=dtype)
    noise = torch.randn(shape, generator=generator, dtype=dtype)
    return jnp.asarray(noise.float().numpy())
