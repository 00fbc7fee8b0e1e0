"""The losses of stage 2 are the published formulas, computed in float64 by numpy."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from recipes.mae_dit.stage2.diffusion import (
    DDPM,
    FlowMatching,
    Losses,
    Schedule,
    ScheduleName,
    log_likelihood,
)
from tpuport.foundation.errors import UsageError


class Net(nn.Module):
    """A denoiser of latents (B, 2, 3, 3) that uses time and labels."""

    def __init__(self, outputs: int, scale: float = 1000.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = scale
        self.labels = nn.Embedding(6, 18)
        self.layers = nn.Sequential(nn.Linear(18, 16), nn.SiLU(), nn.Linear(16, 9 * outputs))

    def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        mixed = x.flatten(1) + torch.cos(3 * t / self.scale)[:, None] + self.labels(labels)
        return self.layers(mixed).reshape(len(x), -1, 3, 3)


class Trained(nn.Module):
    """A denoiser with its loss."""

    def __init__(self, denoiser: Net, process: DDPM | FlowMatching) -> None:
        super().__init__()
        self.denoiser, self.process = denoiser, process

    def forward(self, *given: torch.Tensor) -> Losses:
        return self.process.loss(self.denoiser, *given)


def _batch(times: list[float]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(len(times), 2, 3, 3, generator=generator) for _ in range(2))
    return x, torch.arange(len(times)) % 6, torch.tensor(times), noise


def _betas(name: ScheduleName, count: int) -> list[float]:
    if name == "linear":
        first, last = 0.1 / count, 20 / count
        return [first + (last - first) * i / (count - 1) for i in range(count)]
    kept = [math.cos((i / count + 0.008) / 1.008 * math.pi / 2) ** 2 for i in range(count + 1)]
    return [min(0.99999, 1 - b / a) for a, b in itertools.pairwise(kept)]


def _log_bin(x: float, mean: float, scale: float) -> float:
    """Return the log likelihood of one value, by the distribution function itself."""

    def cdf(z: float) -> float:
        return 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    above, below = cdf((x - mean + 1 / 255) / scale), cdf((x - mean - 1 / 255) / scale)
    share = above if x < -0.999 else 1 - below if x > 0.999 else above - below
    return math.log(max(share, 1e-12))


def _bits(betas: np.ndarray, t: int, x: np.ndarray, noisy: np.ndarray, output: np.ndarray) -> float:
    """Return the variational bound's term of a sample, by the definitions of the two Gaussians."""
    kept = np.cumprod(1 - betas)
    before = np.append(1.0, kept[:-1])
    noise, share = np.split(output, 2)
    clean = (noisy - np.sqrt(1 - kept[t]) * noise) / np.sqrt(kept[t])

    def mean(of: np.ndarray) -> np.ndarray:
        total = np.sqrt(before[t]) * betas[t] * of + np.sqrt(1 - betas[t]) * (1 - before[t]) * noisy
        return total / (1 - kept[t])

    at = max(t, 1)
    low = betas[at] * (1 - before[at]) / (1 - kept[at])
    variance = betas[t] ** ((share + 1) / 2) * low ** ((1 - share) / 2)
    if t == 0:
        bins = np.vectorize(_log_bin)(x, mean(clean), np.sqrt(variance))
        return -bins.mean() / np.log(2)
    terms = np.log(variance / low) + (low + (mean(x) - mean(clean)) ** 2) / variance - 1
    return 0.5 * terms.mean() / np.log(2)


@pytest.mark.parametrize("learn_sigma", [True, False])
@pytest.mark.parametrize("name", ["linear", "squaredcos_cap_v2"])
def test_ddpm_equals_its_formulas(name: ScheduleName, learn_sigma: bool) -> None:
    model = Net(4 if learn_sigma else 2)
    process = DDPM(Schedule.named(name, 50), learn_sigma=learn_sigma)
    x, labels, t, noise = _batch([0, 0, 1, 2, 25, 48, 49])
    found = process.loss(model, x, labels, t, noise)
    betas = np.array(_betas(name, 50))
    kept = np.cumprod(1 - betas)
    for i, step in enumerate(t.tolist()):
        clean, drawn = x[i].double().numpy(), noise[i].double().numpy()
        noisy = np.sqrt(kept[step]) * clean + np.sqrt(1 - kept[step]) * drawn
        given = torch.tensor(noisy)[None]
        with torch.no_grad():
            output = model.double()(given, t[i : i + 1], labels[i : i + 1])[0].numpy()
        model.float()
        error = ((output[:2] - drawn) ** 2).mean()
        bound = _bits(betas, step, clean, noisy, output) if learn_sigma else 0.0
        want = (error + bound, error, bound)
        for field, value, expected in zip(Losses._fields, found, want, strict=True):
            assert value[i].item() == pytest.approx(expected, rel=1e-5, abs=1e-6), (field, step)


def test_the_bound_trains_the_variance_only() -> None:
    process = DDPM(Schedule.named("linear", 50))
    x, labels, t, noise = _batch([0, 1, 30])
    output = torch.randn(3, 4, 3, 3, generator=torch.Generator().manual_seed(4)).requires_grad_()
    found = process.loss(lambda *given: output, x, labels, t, noise)
    (of_bound,) = torch.autograd.grad(found.bound.sum(), output, retain_graph=True)
    (of_total,) = torch.autograd.grad(found.total.sum(), output)
    assert (of_bound[:, :2] == 0).all()
    assert (of_bound[:, 2:] != 0).any()
    assert torch.equal(of_total[:, 2:], of_bound[:, 2:])
    torch.testing.assert_close(of_total[:, :2], 2 / 18 * (output[:, :2] - noise).detach())


def test_likelihoods_are_exact_in_both_tails() -> None:
    x = torch.linspace(-1.1, 1.1, 23)
    for distance in (0.0, 0.003, 0.02, -0.035, 0.05, 0.3):
        mean, scale = x + distance, torch.full_like(x, 0.01)
        found = log_likelihood(x, mean, scale.log())
        given = zip(*(v.tolist() for v in (x, mean, scale)), strict=True)
        # float32 loses digits of x - mean, nothing else
        for value, one in zip(found.tolist(), given, strict=True):
            assert value == pytest.approx(_log_bin(*one), rel=1e-4), one


def test_flow_matching_equals_its_formula() -> None:
    model = Net(2, scale=1.0)
    x, labels, t, noise = _batch([0.0, 0.25, 0.7, 1.0])
    found = FlowMatching().loss(model, x, labels, t, noise)
    clean, drawn, time = (v.double().numpy() for v in (x, noise, t))
    noisy = np.stack([a + s * (b - a) for a, b, s in zip(clean, drawn, time, strict=True)])
    with torch.no_grad():
        output = model.double()(torch.tensor(noisy), torch.tensor(time), labels).numpy()
    want = ((output - (drawn - clean)) ** 2).mean((1, 2, 3))
    np.testing.assert_allclose(found.total.detach().numpy(), want, rtol=1e-5)
    assert torch.equal(found.total, found.error)


def test_a_denoiser_that_knows_the_path_has_no_loss() -> None:
    x, labels, t, noise = _batch([0.1, 0.6])
    found = FlowMatching().loss(lambda *given: noise - x, x, labels, t, noise)
    assert (found.total == 0).all()
    ddpm = DDPM(Schedule.named("linear", 50), learn_sigma=False)
    found = ddpm.loss(lambda *given: noise, x, labels, torch.tensor([0, 40]), noise)
    assert (found.total == 0).all()


@pytest.mark.parametrize("kind", ["ddpm", "flow"])
def test_the_port_equals_eager(kind: str) -> None:
    if kind == "ddpm":
        model = Trained(Net(4), DDPM(Schedule.named("squaredcos_cap_v2", 50)))
        batches = [_batch([0, 1, 49]), _batch([20, 0, 3])]
    else:
        model = Trained(Net(2, 1.0), FlowMatching())
        batches = [_batch([0.0, 0.5, 1.0]), _batch([0.2, 0.9, 0.4])]
    ported = tpuport.convert(model, verify=False)
    for batch in batches:
        want, found = model(*batch), tpuport.to_torch(ported(*batch))
        for field, a, b in zip(Losses._fields, want, found, strict=True):
            torch.testing.assert_close(b, a.detach(), rtol=1e-5, atol=1e-6, msg=field)


def test_spacing_keeps_first_and_last_and_the_variance_at_each() -> None:
    whole = Schedule.named("linear", 1000)
    spaced = whole.spaced(6)
    assert spaced.times.tolist() == [0, 200, 400, 599, 799, 999]
    np.testing.assert_array_equal(spaced.kept, whole.kept[spaced.times])
    assert np.array_equal(whole.spaced(1000).times, np.arange(1000))
    process = DDPM(spaced, learn_sigma=False)
    seen: list[torch.Tensor] = []
    x, labels, t, noise = _batch([1, 5])
    process.loss(lambda x, t, labels: (seen.append(t), x)[1], x, labels, t, noise)
    assert seen[0].tolist() == [200, 999]


@pytest.mark.parametrize("learn_sigma", [True, False])
def test_another_number_of_channels_is_refused(learn_sigma: bool) -> None:
    process = DDPM(Schedule.named("linear", 50), learn_sigma=learn_sigma)
    with pytest.raises(UsageError, match="set learn_sigma as the denoiser has it"):
        process.loss(Net(2 if learn_sigma else 4), *_batch([1, 2]))
    with pytest.raises(UsageError, match=r"returned \(2, 4, 3, 3\) for latents \(2, 2, 3, 3\)"):
        FlowMatching().loss(Net(4), *_batch([0.5, 0.1]))


@pytest.mark.parametrize(
    ("name", "count", "steps", "message"),
    [
        ("cosine", 1000, 10, "expected 'linear' or 'squaredcos_cap_v2'"),
        ("linear", 20, 10, "20 steps of noise_schedule='linear' have a beta of 1"),
        ("linear", 1000, 1, "1 sampling steps: expected between 2 and 1000"),
        ("linear", 1000, 1001, "expected between 2 and 1000"),
    ],
)
def test_impossible_schedules_are_refused(
    name: ScheduleName, count: int, steps: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Schedule.named(name, count).spaced(steps)
