"""Stage 2: from noise to latents, a compiled step at a time."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from recipes.hunyuan_video.options import STRIDE, Options
from recipes.hunyuan_video.spreading import Spread
from tpuport.errors import UsageError
from tpuport.model.ported import PortedModel

Arrays = dict[str, jax.Array]


def denoise_step(
    transformer: Any,
    latents: torch.Tensor,
    times: torch.Tensor,
    condition: torch.Tensor,
    text: torch.Tensor,
    text_mask: torch.Tensor,
    glyph: torch.Tensor,
    glyph_mask: torch.Tensor,
    picture: torch.Tensor,
    guidance: float,
    calls: int = 1,
) -> torch.Tensor:
    """One Euler step of the flow (diffusers, FlowMatchEulerDiscreteScheduler.step).

    Latents stay in float32 however the network computes. With guidance, all conditions have the
    rows of the negative prompt first.

    Args:
        transformer: `HunyuanVideo15Transformer3DModel`.
        latents: float32 (P, C, T, h, w).
        times: float32 (3,): timestep, sigma and the next sigma.
        condition: (P, C + 1, T, h, w), the first frame's latents and where they are.
        text: (B, L, D), with B = 2P if there is guidance, else P.
        text_mask: (B, L).
        glyph: (B, G, E).
        glyph_mask: (B, G).
        picture: (B, N, F); N is 0 for text to video.
        guidance: 1 for none.
        calls: of the network; two with guidance take less memory than one.
    """
    timestep, sigma, following = times.unbind(0)
    dtype = text.dtype
    hidden = torch.cat([latents.to(dtype), condition], dim=1)
    rows = text.shape[0]
    hidden = hidden.repeat(rows // hidden.shape[0], 1, 1, 1, 1)
    parts, size = [], max(1, rows // calls)
    for start in range(0, rows, size):
        at = slice(start, start + size)
        parts.append(
            transformer(
                hidden_states=hidden[at],
                timestep=timestep.expand(hidden[at].shape[0]).to(dtype),
                encoder_hidden_states=text[at],
                encoder_attention_mask=text_mask[at],
                encoder_hidden_states_2=glyph[at],
                encoder_attention_mask_2=glyph_mask[at],
                image_embeds=picture[at],
                return_dict=False,
            )[0]
        )
    flow = torch.cat(parts)
    if guidance > 1:
        without, with_prompt = flow.chunk(2)
        flow = without + guidance * (with_prompt - without)
    return latents + (following - sigma) * flow.float()


@dataclass(frozen=True)
class Denoiser:
    """The step of a ported transformer, compiled once for all steps of a run.

    Args:
        ported: a transformer with the method `denoise_step`.
        options: of the run.
        conditions: of `encode.encode`.
        calls: see `denoise_step`.
        way: how the transformer was spread over a mesh; None if it was not.
    """

    ported: PortedModel
    options: Options
    conditions: Arrays
    calls: int = 1
    way: Spread | None = None

    def run(
        self, latents: jax.Array, schedule: np.ndarray[Any, Any], first: int = 0
    ) -> Iterator[tuple[int, jax.Array]]:
        """Number of steps done and the latents, after each step from the first on.

        The memory of the latents that were given, and of those of each step, goes to the next.

        Args:
            latents: float32 (P, C, T, h, w).
            schedule: of `make_schedule`.
            first: the step to begin with.
        """
        inputs, latents = self._placed(self._inputs(latents)), self._placed(latents)
        step = jax.jit(self._step, donate_argnums=2)
        state = self.ported.params, self.ported.buffers
        for number in range(first, len(schedule)):
            with nullcontext() if self.way is None else self.way.attention():
                latents = step(*state, latents, self._placed(jnp.asarray(schedule[number])), inputs)
            yield number + 1, latents

    def _step(self, params: Any, buffers: Any, latents: Any, times: Any, inputs: Any) -> Any:
        how = {"guidance": self.options.guidance, "calls": self.calls}
        return self.ported.apply(
            params, buffers, None, latents, times, **inputs, **how, method=denoise_step.__name__
        )[0]

    def _placed(self, values: Any) -> Any:
        """On all devices of the mesh; which part of them a device needs, the program knows."""
        mesh = self.ported.mesh
        return values if mesh is None else jax.device_put(values, NamedSharding(mesh, P()))

    def _inputs(self, latents: jax.Array) -> Arrays:
        given, count = self.conditions, latents.shape[0]
        names = ("text", "text_mask", "glyph", "glyph_mask")
        if self.options.has_guidance:
            negative = {n: jnp.repeat(given[f"negative_{n}"], count, axis=0) for n in names}
            inputs = {n: jnp.concatenate([negative[n], given[n]]) for n in names}
        else:
            inputs = {n: given[n] for n in names}
        rows, dtype = inputs["text"].shape[0], inputs["text"].dtype
        return {
            **inputs,
            "condition": _condition(given.get("first_frame"), latents.shape, dtype),
            "picture": _picture(given.get("picture"), rows, self.ported, dtype),
        }


def make_schedule(scheduler: Any, options: Options) -> np.ndarray[Any, Any]:
    """Timestep, sigma and the next sigma of each step: float32 (steps, 3).

    Args:
        scheduler: `FlowMatchEulerDiscreteScheduler` of the folder.
        options: of the run; its shift, if it has one, is taken instead of the scheduler's.
    """
    if options.shift is not None:
        scheduler.set_shift(options.shift)
    # As diffusers' pipelines of this model give them.
    sigmas = np.linspace(1.0, 0.0, options.steps + 1)[:-1]
    scheduler.set_timesteps(sigmas=sigmas)
    found = scheduler.sigmas.numpy()
    return np.stack([scheduler.timesteps.numpy(), found[:-1], found[1:]], axis=1).astype("float32")


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


def _condition(first_frame: jax.Array | None, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Latents of the first frame and a channel of ones where they are; zeros else."""
    count, channels, *sizes = shape
    found = jnp.zeros((count, channels + 1, *sizes), dtype)
    if first_frame is None:
        return found
    if first_frame.shape[1:] != (channels, 1, *sizes[1:]):
        raise UsageError(
            f"first_frame: expected latents {(1, channels, 1, *sizes[1:])} for a video of this"
            f" size, got {first_frame.shape}. What to do: encode again with this size"
        )
    found = found.at[:, :channels, 0].set(first_frame[:, :, 0].astype(dtype))
    return found.at[:, channels, 0].set(1)


def _picture(states: jax.Array | None, rows: int, ported: PortedModel, dtype: Any) -> jax.Array:
    """Of no picture no tokens: what the network makes of zeros, and fewer tokens to attend to."""
    if states is None:
        config: Any = ported.module.config
        return jnp.zeros((rows, 0, config.image_embed_dim), dtype)
    return jnp.repeat(states.astype(dtype), rows, axis=0)
