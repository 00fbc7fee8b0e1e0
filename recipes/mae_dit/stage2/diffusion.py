"""The losses of diffusion and flow matching, whose random numbers are given as arguments.

They are those of ADM and DiT (noise prediction, learned variances), and of SiT and REPA (linear
path, velocity prediction, t from 0 for data to 1 for noise).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tpuport.foundation.errors import UsageError

ScheduleName = Literal["linear", "squaredcos_cap_v2"]
Denoiser = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_MAX_BETA = 0.99999
# Half the distance of two 8-bit values in [-1, 1], and beyond which a value stands for a tail.
_HALF_BIN, _EDGE = 1 / 255, 0.999
_SMALLEST_LOG = math.log(1e-12)


@dataclass(frozen=True)
class Schedule:
    """A forward process of T steps, in float64.

    Attributes:
        times: (T,), the denoiser's time at each step, ascending.
        kept: (T,), the share of the data's variance that is left: the product of 1 - beta.
    """

    times: np.ndarray
    kept: np.ndarray

    @classmethod
    def named(cls, name: ScheduleName, count: int = 1000) -> "Schedule":
        """Return a published schedule of `count` steps.

        Raises:
            UsageError: There is no such schedule, or none of so few steps.
        """
        if name == "linear":
            scale = 1000 / count
            betas = np.linspace(scale * 1e-4, scale * 0.02, count)
        elif name == "squaredcos_cap_v2":
            points = np.cos((np.arange(count + 1) / count + 0.008) / 1.008 * np.pi / 2) ** 2
            betas = np.minimum(1 - points[1:] / points[:-1], _MAX_BETA)
        else:
            raise UsageError(
                f"noise_schedule={name!r}: expected 'linear' or 'squaredcos_cap_v2' (the cosine)"
            )
        if count < 2 or betas.max() >= 1:
            raise UsageError(
                f"{count} steps of noise_schedule={name!r} have a beta of {betas.max():.3g};"
                " expected all below 1. What to do: take more steps, usually 1000, and sample in"
                " fewer with `spaced`"
            )
        return cls(np.arange(count), np.cumprod(1 - betas))

    def spaced(self, steps: int) -> "Schedule":
        """Return the process over `steps` of these times, evenly spaced from first to last.

        Raises:
            UsageError: It has fewer steps than that, or `steps` is below 2.
        """
        count = len(self.times)
        if not 2 <= steps <= count:
            raise UsageError(f"{steps} sampling steps: expected between 2 and {count}")
        # Summed up one by one as in ADM: a product rounds halves to other times.
        strides = np.full(steps, (count - 1) / (steps - 1))
        strides[0] = 0
        index = np.cumsum(strides).round().astype(np.int64)
        return Schedule(self.times[index], self.kept[index])

    def coefficients(self) -> dict[str, np.ndarray]:
        """Return what losses and samplers use at each step, each (T,).

        Noise e and clean x0 of a noisy x are `clean_x` x - `clean_noise` e, and the mean of the
        step before is `mean_clean` x0 + `mean_x` x. Log variances are that of the posterior
        (`log_low`, clipped at the first step, where it is 0), and beta (`log_high`).
        """
        kept, before = self.kept, np.append(1.0, self.kept[:-1])
        alphas = kept / before
        betas = 1 - alphas
        posterior = betas * (1 - before) / (1 - kept)
        log_low = np.log(np.append(posterior[1], posterior[1:]))
        return {
            "kept": kept,
            "before": before,
            "clean_x": np.sqrt(1 / kept),
            "clean_noise": np.sqrt(1 / kept - 1),
            "mean_clean": betas * np.sqrt(before) / (1 - kept),
            "mean_x": (1 - before) * np.sqrt(alphas) / (1 - kept),
            "log_low": log_low,
            "log_high": np.log(betas),
            # Of a denoiser that predicts none: beta, but the posterior's at the first step.
            "log_fixed": np.append(log_low[0], np.log(betas[1:])),
        }


class Losses(NamedTuple):
    """The losses of each sample, each (B,).

    Attributes:
        total: What is trained on, the sum of the others.
        error: The mean squared error of the prediction.
        bound: The variational bound in bits per value; 0 without learned variances.
    """

    total: torch.Tensor
    error: torch.Tensor
    bound: torch.Tensor


class DDPM(nn.Module):
    """Diffusion in discrete steps; the denoiser predicts the noise, and variances if asked for.

    Args:
        schedule: The forward process.
        learn_sigma: Whether the denoiser returns twice as many channels as it takes: the noise,
            and where the log variance lies between the posterior's (-1) and beta (1).
    """

    def __init__(self, schedule: Schedule, *, learn_sigma: bool = True) -> None:
        super().__init__()
        self.learn_sigma = learn_sigma
        found = schedule.coefficients()
        found |= {
            "kept_root": np.sqrt(schedule.kept),
            "lost_root": np.sqrt(1 - schedule.kept),
        }
        for name, value in found.items():
            self.register_buffer(name, torch.tensor(value, dtype=torch.float32), persistent=False)
        self.times: torch.Tensor
        self.register_buffer("times", torch.tensor(schedule.times), persistent=False)

    def _at(self, name: str, t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Return a coefficient at steps (B,), as (B, 1, ...)."""
        return getattr(self, name)[t].reshape(-1, *[1] * (like.ndim - 1))

    def noised(self, x: torch.Tensor, t: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return x at steps t (B,)."""
        return self._at("kept_root", t, x) * x + self._at("lost_root", t, x) * noise

    def loss(
        self,
        denoiser: Denoiser,
        x: torch.Tensor,
        labels: torch.Tensor,
        t: torch.Tensor,
        noise: torch.Tensor,
    ) -> Losses:
        """Return the losses of latents.

        Args:
            denoiser: Called with noisy latents, times (B,) and labels.
            x: (B, C, ...), the latents.
            labels: (B,).
            t: (B,), integers below the number of steps.
            noise: Like x.

        Raises:
            UsageError: The denoiser returns another number of channels.
        """
        noisy = self.noised(x, t, noise)
        output = denoiser(noisy, self.times[t], labels)
        check_output(output, x, 2 if self.learn_sigma else 1)
        predicted = output[:, : x.shape[1]]
        error = _mean((noise - predicted) ** 2)
        if not self.learn_sigma:
            return Losses(error, error, torch.zeros_like(error))
        # The bound trains variances only: its gradients with respect to the mean are too noisy.
        bound = self._bound(x, noisy, t, predicted.detach(), output[:, x.shape[1] :])
        return Losses(error + bound, error, bound)

    def _bound(
        self,
        x: torch.Tensor,
        noisy: torch.Tensor,
        t: torch.Tensor,
        predicted: torch.Tensor,
        share: torch.Tensor,
    ) -> torch.Tensor:
        """Return the bound's term in bits: a KL divergence, or at step 0 the likelihood of x."""
        names = ("clean_x", "clean_noise", "mean_clean", "mean_x", "log_low", "log_high")
        clean_x, clean_noise, mean_clean, mean_x, low, high = (self._at(n, t, x) for n in names)
        clean = clean_x * noisy - clean_noise * predicted
        mean = mean_clean * clean + mean_x * noisy
        log_variance = low + (share + 1) / 2 * (high - low)
        # The means of the two Gaussians differ by mean_clean (x - clean).
        distance = (mean_clean * (x - clean)) ** 2 * torch.exp(-log_variance)
        kl = 0.5 * (log_variance - low + torch.expm1(low - log_variance) + distance)
        likelihood = log_likelihood(x, mean, 0.5 * log_variance)
        return torch.where(t == 0, -_mean(likelihood), _mean(kl)) / math.log(2)


class FlowMatching(nn.Module):
    """Flow matching on the linear path (1 - t) x + t noise; the denoiser predicts its velocity."""

    def loss(
        self,
        denoiser: Denoiser,
        x: torch.Tensor,
        labels: torch.Tensor,
        t: torch.Tensor,
        noise: torch.Tensor,
    ) -> Losses:
        """Return the losses of latents, as `DDPM.loss` but with t (B,) in [0, 1]."""
        share = t.reshape(-1, *[1] * (x.ndim - 1))
        output = denoiser((1 - share) * x + share * noise, t, labels)
        check_output(output, x, 1)
        error = _mean((noise - x - output) ** 2)
        return Losses(error, error, torch.zeros_like(error))


def check_output(output: torch.Tensor, x: torch.Tensor, times: int) -> None:
    """Raise `UsageError` unless a denoiser returns `times` as many channels as x (B, C, ...)."""
    want = (x.shape[0], times * x.shape[1], *x.shape[2:])
    if tuple(output.shape) != want:
        raise UsageError(
            f"the denoiser returned {tuple(output.shape)} for latents {tuple(x.shape)}; expected"
            f" {want}. What to do: set learn_sigma as the denoiser has it; twice the channels are"
            " noise and variance, and flow matching has no variance"
        )


def log_likelihood(x: torch.Tensor, mean: torch.Tensor, log_scale: torch.Tensor) -> torch.Tensor:
    """Return the log likelihood of each value of x as one of 256 levels in [-1, 1] (ADM).

    A Gaussian's distribution function is approximated by sigmoid(2 u), where u is that of the tanh
    form of GELU. Values beyond 0.999 take the whole tail, those below 1e-12 count as that.
    """
    # The difference of two sigmoids is taken as logarithms: that of float32 values, as ADM has it,
    # leaves few digits of a likelihood below 1e-5.
    inverse = torch.exp(-log_scale)
    z, width = inverse * (x - mean), inverse * _HALF_BIN
    above, below = _logit(z + width), _logit(z - width)
    cubes = 6 * z**2 * width + 2 * width**3  # (z + width)³ - (z - width)³
    distance = 2 * math.sqrt(2 / math.pi) * (2 * width + 0.044715 * cubes)
    in_low_tail, in_high_tail = F.logsigmoid(above), F.logsigmoid(-below)
    inside = in_low_tail + in_high_tail + torch.log(-torch.expm1(-distance))
    found = torch.where(x > _EDGE, in_high_tail, inside)
    return torch.where(x < -_EDGE, in_low_tail, found).clamp(min=_SMALLEST_LOG)


def _logit(z: torch.Tensor) -> torch.Tensor:
    return 2 * math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)


def _mean(value: torch.Tensor) -> torch.Tensor:
    return value.flatten(1).mean(1)
