"""Samplers with classifier-free guidance: each is one scan, so one program for any steps.

They call a pure function and can be jitted with the parameters as an argument:

    def sample(params, start, labels, key):
        predict = predictor(ported, params)
        return ddpm(predict, schedule.spaced(250), start, labels, key, Guidance(4.0, 1000))
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import tpuport
from recipes.mae_dit.stage2.diffusion import Schedule
from tpuport.foundation.errors import UsageError

# Of noisy latents (B, C, ...), times (B,) and labels (B,): noise or velocity, perhaps variances.
Predict = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Coefficients = dict[str, jax.Array]
Step = Callable[[jax.Array, jax.Array, jax.Array, Coefficients], jax.Array]


class Guidance(NamedTuple):
    """Classifier-free guidance: the step from the null class to the class, times a scale.

    Attributes:
        scale: 1 is none.
        null_class: The label of no class.
    """

    scale: float
    null_class: int


def predictor(ported: tpuport.PortedModel, params: dict[str, jax.Array]) -> Predict:
    """Return the pure function of a ported denoiser, with given parameters such as averages."""

    def predict(x: jax.Array, times: jax.Array, labels: jax.Array) -> jax.Array:
        return ported.apply(params, ported.buffers, None, x, times, labels)[0]

    return predict


def ddpm(
    predict: Predict,
    schedule: Schedule,
    start: jax.Array,
    labels: jax.Array,
    key: jax.Array,
    guidance: Guidance | None = None,
) -> jax.Array:
    """Sample by ancestral steps, with the denoiser's variances if it returns them, else beta.

    Args:
        predict: Predicts the noise, and may return variances in as many further channels.
        schedule: The steps, see `Schedule.spaced`.
        start: (B, C, ...), normal noise.
        labels: (B,).
        key: Of the steps' noise: step i of n draws it from `jax.random.split(key, n)[i]`.
        guidance: None without guidance. The variances are the class's own.

    Returns:
        Latents like start.
    """

    def step(x: jax.Array, output: jax.Array, noise: jax.Array, at: Coefficients) -> jax.Array:
        predicted, share = output[:, : x.shape[1]], output[:, x.shape[1] :]
        clean = at["clean_x"] * x - at["clean_noise"] * predicted
        log_variance = at["log_fixed"]
        if share.shape[1]:
            log_variance = at["log_low"] + (share + 1) / 2 * (at["log_high"] - at["log_low"])
        mean = at["mean_clean"] * clean + at["mean_x"] * x
        return mean + at["is_noisy"] * jnp.exp(0.5 * log_variance) * noise

    return _denoised(predict, step, _rows(schedule), start, labels, key, guidance)


def ddim(
    predict: Predict,
    schedule: Schedule,
    start: jax.Array,
    labels: jax.Array,
    key: jax.Array,
    guidance: Guidance | None = None,
    eta: float = 0.0,
) -> jax.Array:
    """Sample as `ddpm`, by the steps of Song et al. 2020 (arXiv:2010.02502).

    Args:
        predict: Predicts the noise; variances are not used.
        schedule: The steps.
        start: (B, C, ...), normal noise.
        labels: (B,).
        key: Of the steps' noise, as for `ddpm`.
        guidance: None without guidance.
        eta: The amount of noise; 0 adds none.

    Returns:
        Latents like start.
    """
    rows = _rows(schedule)
    kept, before = rows["kept"], rows["before"]
    sigma = eta * np.sqrt((1 - before) / (1 - kept) * (1 - kept / before))
    rows |= {
        "before_root": np.sqrt(before),
        "direction": np.sqrt(np.maximum(1 - before - sigma**2, 0)),
        "sigma": sigma,
    }

    def step(x: jax.Array, output: jax.Array, noise: jax.Array, at: Coefficients) -> jax.Array:
        predicted = output[:, : x.shape[1]]
        clean = at["clean_x"] * x - at["clean_noise"] * predicted
        return at["before_root"] * clean + at["direction"] * predicted + at["sigma"] * noise

    return _denoised(predict, step, rows, start, labels, key, guidance)


def euler(
    predict: Predict,
    steps: int,
    start: jax.Array,
    labels: jax.Array,
    guidance: Guidance | None = None,
) -> jax.Array:
    """Follow a velocity from noise at t = 1 to data at t = 0 in equal steps.

    Args:
        predict: Predicts the velocity.
        steps: Their number, each with one prediction.
        start: (B, C, ...), normal noise.
        labels: (B,).
        guidance: None without guidance.

    Returns:
        Latents like start.

    Raises:
        UsageError: There is no step.
    """
    points = _points(steps)
    return _flow(
        predict, points[:-1], np.diff(points), np.zeros(steps, bool), start, labels, guidance
    )


def heun(
    predict: Predict,
    steps: int,
    start: jax.Array,
    labels: jax.Array,
    guidance: Guidance | None = None,
) -> jax.Array:
    """Sample as `euler`, each step but the last corrected by a second prediction at its end."""
    points = _points(steps)
    # Predictions are at each point twice, but at the first once and at the last never.
    index = np.arange(2 * steps - 1)
    corrects = index % 2 == 1
    times, widths = points[(index + 1) // 2], np.diff(points)[index // 2]
    return _flow(predict, times, widths, corrects, start, labels, guidance)


def _denoised(
    predict: Predict,
    step: Step,
    rows: dict[str, np.ndarray],
    start: jax.Array,
    labels: jax.Array,
    key: jax.Array,
    guidance: Guidance | None,
) -> jax.Array:
    """Scan over steps of a discrete process."""
    given = {n: jnp.asarray(v, jnp.int32 if n == "times" else start.dtype) for n, v in rows.items()}
    guided = _guided(predict, guidance, widths=(1, 2))

    def body(x: jax.Array, inputs: tuple[Coefficients, jax.Array]) -> tuple[jax.Array, None]:
        at, drawn = inputs
        output = guided(x, jnp.full(x.shape[0], at["times"]), labels)
        return step(x, output, jax.random.normal(drawn, x.shape, x.dtype), at), None

    keys = jax.random.split(key, len(rows["times"]))
    return jax.lax.scan(body, start, (given, keys))[0]


def _flow(
    predict: Predict,
    times: np.ndarray,
    widths: np.ndarray,
    corrects: np.ndarray,
    start: jax.Array,
    labels: jax.Array,
    guidance: Guidance | None,
) -> jax.Array:
    """Scan over predictions, so that the program has one denoiser for both halves of a step.

    Args:
        predict: Predicts the velocity.
        times: (predictions,), of each.
        widths: (predictions,), of its step.
        corrects: (predictions,), whether it corrects the prediction before it.
        start: (B, C, ...).
        labels: (B,).
        guidance: None without guidance.

    Returns:
        Latents like start.
    """
    guided = _guided(predict, guidance, widths=(1,))
    at, by = (jnp.asarray(v, start.dtype) for v in (times, widths))

    def body(
        carry: tuple[jax.Array, jax.Array, jax.Array],
        inputs: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], None]:
        x, x_before, slope_before = carry
        time, width, is_second = inputs
        slope = guided(x, jnp.full(x.shape[0], time), labels)
        corrected = x_before + width * (slope_before + slope) / 2
        return (jnp.where(is_second, corrected, x + width * slope), x, slope), None

    initial = (start, start, jnp.zeros_like(start))
    return jax.lax.scan(body, initial, (at, by, jnp.asarray(corrects)))[0][0]


def _guided(predict: Predict, guidance: Guidance | None, *, widths: tuple[int, ...]) -> Predict:
    """Return a prediction of the samples' dtype, guided in its first C channels."""

    def checked(x: jax.Array, times: jax.Array, labels: jax.Array) -> jax.Array:
        output = predict(x, times, labels)
        shapes = [(x.shape[0], width * x.shape[1], *x.shape[2:]) for width in widths]
        if output.shape not in shapes:
            raise UsageError(
                f"the denoiser returned {output.shape} for latents {x.shape}; expected"
                f" {' or '.join(map(str, shapes))}"
            )
        return output.astype(x.dtype)

    if guidance is None:
        return checked

    def guided(x: jax.Array, times: jax.Array, labels: jax.Array) -> jax.Array:
        null = jnp.full_like(labels, guidance.null_class)
        both = checked(*(jnp.concatenate(p) for p in ((x, x), (times, times), (labels, null))))
        of_class, of_null = jnp.split(both, 2)
        channels = x.shape[1]
        step = of_class[:, :channels] - of_null[:, :channels]
        found = of_null[:, :channels] + guidance.scale * step
        return jnp.concatenate([found, of_class[:, channels:]], axis=1)

    return guided


def _rows(schedule: Schedule) -> dict[str, np.ndarray]:
    """Return the coefficients of each step, from the last time to the first."""
    found = schedule.coefficients() | {
        "times": schedule.times,
        "is_noisy": np.arange(len(schedule.times)) > 0,
    }
    return {name: value[::-1] for name, value in found.items()}


def _points(steps: int) -> np.ndarray:
    if steps < 1:
        raise UsageError(f"{steps} sampling steps: expected at least 1")
    return np.linspace(1.0, 0.0, steps + 1)
