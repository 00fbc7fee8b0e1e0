"""Images of a trained model of stage 2: one program samples latents, another decodes them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from torch import nn

import tpuport
from recipes.mae_dit.stage2.diffusion import Schedule
from recipes.mae_dit.stage2.models import Diffusion
from recipes.mae_dit.stage2.samplers import Guidance, ddim, ddpm, euler, heun, predictor
from recipes.mae_dit.stage2.training import Stage2, images_of
from tpuport.foundation.errors import UsageError

DISCRETE: dict[str, Callable[..., jax.Array]] = {"ddpm": ddpm, "ddim": ddim}
CONTINUOUS: dict[str, Callable[..., jax.Array]] = {"euler": euler, "heun": heun}


@dataclass(frozen=True)
class Sampling:
    """How a denoiser is sampled from.

    Attributes:
        denoiser: Predicts noise, or a velocity.
        num_classes: Classes; the label of no class.
        sampler: A name of `DISCRETE` or `CONTINUOUS`.
        steps: Their number.
        guidance: Scale of classifier-free guidance; below 1 there is none.
        schedule: Process of a sampler of `DISCRETE`, over `steps`.
    """

    denoiser: nn.Module
    num_classes: int
    sampler: str
    steps: int
    guidance: float
    schedule: Schedule | None


def sampling_of(
    model: nn.Module,
    sampler: str | None = None,
    steps: int | None = None,
    guidance: float | None = None,
) -> Sampling:
    """Return how a model is sampled from: by its own settings, unless others are given.

    Raises:
        UsageError: The settings do not fit the model, or it has no sampler here.
    """
    if not isinstance(model, Diffusion):
        return _of_upstream(model, sampler, steps, guidance)
    settings = model.settings
    discrete = settings.process == "ddpm"
    _check_sampler(sampler, DISCRETE if discrete else CONTINUOUS)
    scale = settings.cfg if guidance is None else guidance
    if scale >= 1 and scale != 1 and settings.class_dropout_prob == 0:
        raise UsageError(
            f"guidance of {scale} needs an embedding of no class, which class_dropout_prob=0 has"
            " not trained. What to do: sample without guidance"
        )
    count = steps or settings.inference_step
    return Sampling(
        model.denoiser,
        settings.num_classes,
        sampler or ("ddpm" if discrete else "euler"),
        count,
        scale,
        settings.schedule.spaced(count) if discrete else None,
    )


def _check_sampler(name: str | None, known: Any) -> None:
    if name is not None and name not in known:
        raise UsageError(f"sampler={name!r}: expected {' or '.join(known)} for this model")


def _of_upstream(
    model: Any, sampler: str | None, steps: int | None, guidance: float | None
) -> Sampling:
    """Return the sampling of upstream's DiT_Stage2, whose diffusion has its schedule as arrays."""
    whole = getattr(model, "diffusion", None)
    kept = getattr(whole, "alphas_cumprod", None)
    if kept is None:
        raise UsageError(
            f"{type(model).__name__} has no sampler here, as its process is not that of DDPM. What"
            " to do: call its infer"
        )
    _check_sampler(sampler, DISCRETE)
    count = steps or model.inference_step
    times = np.asarray(getattr(whole, "timestep_map", np.arange(len(kept))))
    return Sampling(
        model.model,
        model.num_classes,
        sampler or "ddpm",
        count,
        model.cfg if guidance is None else guidance,
        Schedule(times, np.asarray(kept)).spaced(count),
    )


class Sampler:
    """Samples images in batches of one size.

    Args:
        modules: The modules with their weights; they have an autoencoder.
        sampling: How to sample.
        shape: Shape of a latent.

    Attributes:
        sampling: How it samples.
    """

    def __init__(self, modules: Stage2, sampling: Sampling, shape: tuple[int, ...]) -> None:
        self.sampling, self._shape = sampling, shape
        self._denoiser = tpuport.convert(sampling.denoiser.eval(), verify=False)
        self._decoder = tpuport.convert(modules.eval(), methods=(images_of,), verify=False)
        self._program = jax.jit(partial(_sample, self._denoiser, sampling))

        names = {id(part): name for name, part in modules.named_modules()}
        self._prefix = names[id(sampling.denoiser)]

    def images(
        self, count: int, seed: int, batch_size: int, params: Mapping[str, jax.Array] | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return images (count, H, W, 3) of 8 bits, of classes in turn, and their labels.

        Args:
            count: Number of images.
            seed: Random seed.
            batch_size: Images of a batch. Of the last one the first are taken.
            params: Weights of the ported modules, of which those of the denoiser are taken.
        """
        parts = range(-(-count // batch_size))
        found = [self.batch(number, seed, batch_size, params) for number in parts]
        return np.concatenate(found)[:count], self.labels(0, count)

    def labels(self, start: int, count: int) -> np.ndarray:
        """Return the labels of images from one on."""
        classes = self.sampling.num_classes
        return (np.arange(start, start + count) % classes).astype(np.int32)

    def batch(
        self, number: int, seed: int, size: int, params: Mapping[str, jax.Array] | None = None
    ) -> np.ndarray:
        """Return one batch of `images`, which depends on no other."""
        own = self._denoiser.params
        if params is not None:
            own = {name: params[f"{self._prefix}.{name}"] for name in own}
        labels = self.labels(number * size, size)
        first, second = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
        noise = jax.random.normal(first, (size, *self._shape))
        zs = self._program(own, noise, jnp.asarray(labels), second)
        pixels = tpuport.to_numpy(self._decoder.images_of(zs)).transpose(0, 2, 3, 1)
        return np.round(pixels * 255).astype(np.uint8)


def _sample(
    denoiser: tpuport.PortedModel,
    given: Sampling,
    params: dict[str, jax.Array],
    start: jax.Array,
    labels: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """Return latents of labels, as one scan."""
    predict = predictor(denoiser, params)
    guidance = Guidance(given.guidance, given.num_classes) if given.guidance > 1 else None
    if given.schedule is not None:
        return DISCRETE[given.sampler](predict, given.schedule, start, labels, key, guidance)
    return CONTINUOUS[given.sampler](predict, given.steps, start, labels, guidance)
