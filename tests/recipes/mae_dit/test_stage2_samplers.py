"""Each sampler's scan equals a loop in eager PyTorch over the same denoiser and noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from recipes.mae_dit.stage2.diffusion import Schedule
from recipes.mae_dit.stage2.samplers import Guidance, ddim, ddpm, euler, heun, predictor
from tpuport.foundation.errors import UsageError

STEPS, NULL, SCALE = 7, 5, 3.0
# Its first 400 times: samples of later ones are so large that a step's noise is lost in rounding.
WHOLE = Schedule.named("linear", 1000)
SCHEDULE = Schedule(WHOLE.times[:400], WHOLE.kept[:400]).spaced(STEPS)
KEY = jax.random.key(3)
LABELS = torch.tensor([0, 4, 2])


class Net(nn.Module):
    """A denoiser of latents (B, 2, 3, 3) that depends on time and labels."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(outputs)
        self.labels = nn.Embedding(NULL + 1, 18)
        # Bounded, since steps of large noise multiply it.
        self.layers = nn.Sequential(nn.Linear(18, 9 * outputs), nn.Tanh())

    def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mixed = x.flatten(1) + torch.cos(t / 300 + 2 * t / (1 + t))[:, None] + self.labels(labels)
        return self.layers(mixed).reshape(len(x), -1, 3, 3)


def _start() -> torch.Tensor:
    return torch.randn(3, 2, 3, 3, generator=torch.Generator().manual_seed(0))


def _noises() -> list[torch.Tensor]:
    keys = jax.random.split(KEY, STEPS)
    return [torch.tensor(np.asarray(jax.random.normal(k, (3, 2, 3, 3)))) for k in keys]


def _predict(model: Net, x: torch.Tensor, time: float, scale: float | None) -> torch.Tensor:
    """Return the prediction, with guidance by two separate calls."""
    t = torch.full((3,), time)
    of_class = model(x, t, LABELS)
    if scale is None:
        return of_class
    of_null = model(x, t, torch.full((3,), NULL))
    noise = scale * of_class[:, :2] + (1 - scale) * of_null[:, :2]
    return torch.cat([noise, of_class[:, 2:]], 1)


def _ddpm_loop(model: Net, scale: float | None) -> torch.Tensor:
    x, kept = _start(), SCHEDULE.kept.tolist()
    for i, drawn in zip(reversed(range(STEPS)), _noises(), strict=True):
        before = kept[i - 1] if i else 1.0
        beta, low = 1 - kept[i] / before, (1 - kept[0]) / (1 - kept[1]) * (1 - kept[1] / kept[0])
        if i:
            low = (1 - before) / (1 - kept[i]) * beta
        output = _predict(model, x, int(SCHEDULE.times[i]), scale)
        clean = (x - (1 - kept[i]) ** 0.5 * output[:, :2]) / kept[i] ** 0.5
        mean = before**0.5 * beta * clean + (1 - beta) ** 0.5 * (1 - before) * x
        variance = torch.tensor(beta if i else low)
        if output.shape[1] == 4:
            share = (output[:, 2:] + 1) / 2
            variance = beta**share * low ** (1 - share)
        x = mean / (1 - kept[i]) + (variance.sqrt() * drawn if i else 0)
    return x


def _ddim_loop(model: Net, scale: float | None, eta: float) -> torch.Tensor:
    x, kept = _start(), SCHEDULE.kept.tolist()
    for i, drawn in zip(reversed(range(STEPS)), _noises(), strict=True):
        before = kept[i - 1] if i else 1.0
        noise = _predict(model, x, int(SCHEDULE.times[i]), scale)[:, :2]
        clean = (x - (1 - kept[i]) ** 0.5 * noise) / kept[i] ** 0.5
        variance = eta**2 * (1 - before) / (1 - kept[i]) * (1 - kept[i] / before)
        x = before**0.5 * clean + max(1 - before - variance, 0) ** 0.5 * noise
        x = x + variance**0.5 * drawn
    return x


def _flow_loop(model: Net, scale: float | None, steps: int, corrects: bool) -> torch.Tensor:
    x = _start()
    for i in range(steps):
        time, following = 1 - i / steps, 1 - (i + 1) / steps
        slope = _predict(model, x, time, scale)
        if corrects and i < steps - 1:
            ahead = _predict(model, x - slope / steps, following, scale)
            slope = (slope + ahead) / 2
        x = x - slope / steps
    return x


@pytest.fixture(scope="module")
def models() -> dict[int, tuple[Net, tpuport.PortedModel]]:
    """Return denoisers by their number of channels, and their ports."""
    return {n: (m, tpuport.convert(m, verify=False)) for n, m in ((n, Net(n)) for n in (2, 4))}


@pytest.mark.parametrize("guided", [True, False])
def test_scans_equal_loops(
    models: dict[int, tuple[Net, tpuport.PortedModel]], guided: bool
) -> None:
    guidance = Guidance(SCALE, NULL) if guided else None
    scale = SCALE if guided else None
    (two, ported_two), (four, ported_four) = models[2], models[4]
    labels = jnp.asarray(LABELS.numpy(), jnp.int32)

    @jax.jit
    def sampled(
        params_two: dict[str, jax.Array], params_four: dict[str, jax.Array], start: jax.Array
    ) -> dict[str, jax.Array]:
        fixed, learned = predictor(ported_two, params_two), predictor(ported_four, params_four)
        return {
            "ddpm, learned variances": ddpm(learned, SCHEDULE, start, labels, KEY, guidance),
            "ddpm, fixed variances": ddpm(fixed, SCHEDULE, start, labels, KEY, guidance),
            "ddim": ddim(learned, SCHEDULE, start, labels, KEY, guidance),
            "ddim with noise": ddim(fixed, SCHEDULE, start, labels, KEY, guidance, eta=0.8),
            "euler": euler(fixed, 5, start, labels, guidance),
            "heun": heun(fixed, 5, start, labels, guidance),
            "heun, one step": heun(fixed, 1, start, labels, guidance),
        }

    found = sampled(ported_two.params, ported_four.params, jnp.asarray(_start().numpy()))
    with torch.no_grad():
        want = {
            "ddpm, learned variances": _ddpm_loop(four, scale),
            "ddpm, fixed variances": _ddpm_loop(two, scale),
            "ddim": _ddim_loop(four, scale, 0.0),
            "ddim with noise": _ddim_loop(two, scale, 0.8),
            "euler": _flow_loop(two, scale, 5, corrects=False),
            "heun": _flow_loop(two, scale, 5, corrects=True),
            "heun, one step": _flow_loop(two, scale, 1, corrects=False),
        }
    for name, expected in want.items():
        torch.testing.assert_close(
            torch.tensor(np.asarray(found[name])), expected, rtol=1e-5, atol=1e-5, msg=name
        )
    assert not torch.allclose(want["euler"], want["heun"], rtol=1e-3)


def test_a_known_velocity_leads_to_the_data() -> None:
    start, data = jnp.asarray(_start().numpy()), jnp.full((3, 2, 3, 3), 0.5)
    labels = jnp.zeros(3, jnp.int32)
    for sampler in (euler, heun):
        found = sampler(lambda x, t, labels: start - data, 4, start, labels)
        np.testing.assert_allclose(found, data, atol=1e-6)


def test_a_known_noise_leads_to_the_data() -> None:
    """Deterministic steps undo what the forward process did, at any number of them."""
    data, noise = jnp.full((3, 2, 3, 3), 0.5), jnp.asarray(_start().numpy())
    kept = SCHEDULE.kept[-1]
    start = np.sqrt(kept) * data + np.sqrt(1 - kept) * noise
    found = ddim(lambda x, t, labels: noise, SCHEDULE, start, jnp.zeros(3, jnp.int32), KEY)
    np.testing.assert_allclose(found, data, atol=1e-5)


def test_one_denoiser_is_compiled_for_any_steps(
    models: dict[int, tuple[Net, tpuport.PortedModel]],
) -> None:
    predict = predictor(models[2][1], models[2][1].params)
    start, labels = jnp.zeros((3, 2, 3, 3)), jnp.zeros(3, jnp.int32)
    texts = [str(jax.make_jaxpr(lambda x, n=n: heun(predict, n, x, labels))(start)) for n in (3, 9)]
    assert [text.count("dot_general[") for text in texts] == [1, 1]


def test_wrong_outputs_and_no_steps_are_refused() -> None:
    start, labels = jnp.zeros((3, 2, 3, 3)), jnp.zeros(3, jnp.int32)
    double = jnp.zeros((3, 4, 3, 3))
    with pytest.raises(UsageError, match=r"returned \(3, 4, 3, 3\) .* expected \(3, 2, 3, 3\)"):
        euler(lambda x, t, labels: double, 3, start, labels)
    with pytest.raises(UsageError, match=r"expected \(3, 2, 3, 3\) or \(3, 4, 3, 3\)"):
        ddpm(lambda x, t, labels: double[:, :3], SCHEDULE, start, labels, KEY)
    with pytest.raises(UsageError, match="0 sampling steps: expected at least 1"):
        heun(lambda x, t, labels: x, 0, start, labels)
