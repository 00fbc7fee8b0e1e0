"""Noise schedules, the training loss and the samplers of the planner: ddim, ddpm, flow matching.

Each computes the same as upstream's planner to the bit, with the same buffer names. Random numbers
may be given as arguments, so that two implementations can be compared.
"""

import abc
import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tpuport.foundation.errors import UsageError

Sampler = Literal["ddim", "ddpm", "flow"]
SAMPLERS = ("ddim", "ddpm", "flow")

NUM_TRAIN_TIMES = 100
NUM_STEPS = 5
HORIZON, ACTION_DIM = 8, 3
# Flow matching draws times from Beta(1.5, 1), and cuts them into this number of buckets.
FLOW_ALPHA, FLOW_SCALE, FLOW_BUCKETS = 1.5, 0.999, 1000
# Normalization of a pose: its smallest value (m, m, rad) and the range above that.
LOWEST, RANGE = (-1.57, -19.68, -1.67), (66.74, 42.0, 3.53)

# Smallest standard deviations of a sampling step, and where its noise is clamped. Evaluation stays
# close to the mean, reinforcement explores, and its likelihoods assume wider steps.
EVAL_MIN_STD, EVAL_NOISE_CLIP = 1e-4, 1.0
DDPM_EVAL_MIN_STD = 1e-3
CHAIN_MIN_STD, CHAIN_NOISE_CLIP = 0.04, 5.0
LOGPROB_MIN_STD = 0.1
MIN_SIGMA, MIN_VARIANCE = 1e-10, 1e-20


class Context(NamedTuple):
    """The inputs from which a trajectory is predicted, encoded to the planner's width D.

    Attributes:
        states: (B, tokens, D), of the chat model. There are fewer rows if each scene has several
            consecutive samples.
        history: (B, 8, D), the same for each pose of the trajectory.
        ego: (B, D), from command, velocity and acceleration.
    """

    states: torch.Tensor
    history: torch.Tensor
    ego: torch.Tensor

    def repeated(self, count: int) -> "Context":
        """Repeat each sample `count` times in a row, except for the states, which are large."""
        history, ego = (p.repeat_interleave(count, 0) for p in (self.history, self.ego))
        return Context(self.states, history, ego)


def normalise(trajectory: torch.Tensor) -> torch.Tensor:
    """Normalise poses (..., 3) in metres and radians to about [-1, 1]."""
    return torch.cat(
        [2 * (trajectory[..., i : i + 1] - LOWEST[i]) / RANGE[i] - 1 for i in range(ACTION_DIM)],
        dim=-1,
    )


def denormalise(action: torch.Tensor) -> torch.Tensor:
    """Invert `normalise`."""
    return torch.cat(
        [(action[..., i : i + 1] + 1) / 2 * RANGE[i] + LOWEST[i] for i in range(ACTION_DIM)],
        dim=-1,
    )


def cosine_betas(count: int, offset: float = 0.008) -> torch.Tensor:
    """Return the cosine schedule of Nichol & Dhariwal 2021 (arXiv:2102.09672).

    It uses `count` + 1 points, which reach one step beyond the end as in upstream.
    """
    points = np.linspace(0, count + 1, count + 1) / (count + 1)
    kept = np.cos((points + offset) / (1 + offset) * np.pi * 0.5) ** 2
    kept = kept / kept[0]
    return torch.tensor(np.clip(1 - kept[1:] / kept[:-1], 0, 0.999), dtype=torch.float32)


def ddpm_buffers(count: int = NUM_TRAIN_TIMES) -> dict[str, torch.Tensor]:
    """Return upstream's buffers of the forward process and of ddpm's posterior, each (count,)."""
    betas = cosine_betas(count)
    alphas = 1.0 - betas
    kept = torch.cumprod(alphas, dim=0)
    before = torch.cat([torch.ones(1), kept[:-1]])
    variance = betas * (1.0 - before) / (1.0 - kept)
    found = {
        "betas": betas,
        "alphas": alphas,
        "alphas_cumprod": kept,
        "alphas_cumprod_prev": before,
        "sqrt_alphas_cumprod": kept.sqrt(),
        "sqrt_one_minus_alphas_cumprod": (1.0 - kept).sqrt(),
        "sqrt_recip_alphas_cumprod": (1.0 / kept).sqrt(),
        "sqrt_recipm1_alphas_cumprod": (1.0 / kept - 1.0).sqrt(),
        "var": variance,
        "logvar_clipped": variance.clamp(min=MIN_VARIANCE).log(),
        "mu_coef1": betas * before.sqrt() / (1.0 - kept),
        "mu_coef2": (1.0 - before) * alphas.sqrt() / (1.0 - kept),
    }
    return {f"ddpm_{name}": value for name, value in found.items()}


def ddim_buffers(kept: torch.Tensor, steps: int = NUM_STEPS) -> dict[str, torch.Tensor]:
    """Return upstream's buffers of ddim, in the order of sampling, each (steps,)."""
    times = torch.arange(steps) * (len(kept) // steps)
    alphas = kept[times]
    before = torch.cat([torch.ones(1), kept[times[:-1]]])
    found = {
        "t": times,
        "alphas": alphas,
        "alphas_sqrt": alphas.sqrt(),
        "alphas_prev": before,
        "sqrt_one_minus_alphas": (1.0 - alphas) ** 0.5,
        "sigmas": torch.zeros(steps),
    }
    flipped = {f"ddim_{name}": value.flip(0) for name, value in found.items()}
    return {"ddim_t_schedule": times, **flipped}


class FixedEta(nn.Module):
    """The amount of noise in ddim, as a frozen parameter.

    The parameter is the inverse of a tanh that is 1, so inf.
    """

    def __init__(self, base: float = 1.0, lowest: float = 0.1, highest: float = 1.0) -> None:
        super().__init__()
        share = torch.tensor([2 * (base - lowest) / (highest - lowest) - 1])
        self.eta_logit = nn.Parameter(torch.atanh(share), requires_grad=False)
        self.lowest, self.highest = lowest, highest

    def forward(self) -> torch.Tensor:
        """Return eta, (1,)."""
        share = 0.5 * (torch.tanh(self.eta_logit) + 1)
        return share * (self.highest - self.lowest) + self.lowest


class Diffusion(nn.Module, abc.ABC):
    """The loss and the samplers around two methods of a subclass, `encode` and `predict`.

    Args:
        sampler: "ddim" and "ddpm" predict the noise, "flow" the velocity.
        steps: Sampling steps.

    Raises:
        UsageError: There is no such sampler.
    """

    def __init__(self, sampler: Sampler = "ddim", steps: int = NUM_STEPS) -> None:
        super().__init__()
        if sampler not in SAMPLERS:
            raise UsageError(f"sampler={sampler!r}: expected one of {', '.join(SAMPLERS)}")
        self.sampler: Sampler = sampler
        self.steps = steps
        if sampler == "flow":
            return
        for name, value in ddpm_buffers().items():
            self.register_buffer(name, value)
        if sampler == "ddim":
            self.eta = FixedEta()
            kept: Any = self.ddpm_alphas_cumprod
            for name, value in ddim_buffers(kept, steps).items():
                self.register_buffer(name, value)

    @abc.abstractmethod
    def encode(self, states: torch.Tensor, history: torch.Tensor, status: torch.Tensor) -> Context:
        """Encode a scene for `predict`, see `loss`."""

    @abc.abstractmethod
    def predict(self, x: torch.Tensor, times: torch.Tensor, context: Context) -> torch.Tensor:
        """Predict noise or velocity (B, 8, 3) of noisy actions (B, 8, 3) at integer times (B,)."""

    def _at(self, name: str, index: torch.Tensor) -> torch.Tensor:
        """Return a buffer's values at indices (B,), as (B, 1, 1)."""
        return getattr(self, name).gather(-1, index)[:, None, None]

    # -- training ----------------------------------------------------------------------------------

    def loss(
        self,
        states: torch.Tensor,
        history: torch.Tensor,
        status: torch.Tensor,
        trajectory: torch.Tensor,
        noise: torch.Tensor | None = None,
        times: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the mean squared error of each sample, (B,).

        Args:
            states: (B, tokens, width), the chat model's last hidden states.
            history: (B, 12), the last four poses.
            status: (B, 8), command, velocity and acceleration.
            trajectory: (B, 8, 3), the poses to predict, in metres and radians.
            noise: (B, 8, 3); drawn by default.
            times: (B,), integers below 100, or for flow floats in [0, 1]; drawn by default.
        """
        context = self.encode(states, history, status)
        action = normalise(trajectory)
        noise = torch.randn_like(action) if noise is None else noise
        times = self.draw_times(action) if times is None else times
        if self.sampler == "flow":
            share = times[:, None, None]
            noisy, target = (1 - share) * noise + share * action, action - noise
            times = (times * FLOW_BUCKETS).long()
        else:
            kept = self._at("ddpm_sqrt_alphas_cumprod", times)
            lost = self._at("ddpm_sqrt_one_minus_alphas_cumprod", times)
            noisy, target = kept * action + lost * noise, noise
        error = F.mse_loss(self.predict(noisy, times, context), target, reduction="none")
        return error.mean((1, 2))

    def draw_times(self, action: torch.Tensor) -> torch.Tensor:
        """Draw times to train at, (B,)."""
        batch = action.shape[0]
        if self.sampler != "flow":
            return torch.randint(0, NUM_TRAIN_TIMES, (batch,), device=action.device)
        # Beta(a, 1) by the inverse of its distribution function.
        drawn = torch.rand(batch, device=action.device, dtype=action.dtype) ** (1 / FLOW_ALPHA)
        return (FLOW_SCALE - drawn) / FLOW_SCALE

    # -- sampling ----------------------------------------------------------------------------------

    def p_mean_variance(
        self,
        x: torch.Tensor,
        times: torch.Tensor,
        index: torch.Tensor,
        context: Context,
        deterministic: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Take one step back: mean (B, 8, 3), log variance (B, 1, 1) and clean action (B, 8, 3).

        Args:
            x: (B, 8, 3), the noisy actions.
            times: (B,), indices of the 100 training times.
            index: (B,), indices of the sampling steps, from 0; ddpm does not use it.
            context: Encoded scene.
            deterministic: Whether ddim adds no noise.
        """
        noise = self.predict(x, times, context)
        if self.sampler == "ddpm":
            recip = self._at("ddpm_sqrt_recip_alphas_cumprod", times)
            recip_m1 = self._at("ddpm_sqrt_recipm1_alphas_cumprod", times)
            clean = (recip * x - recip_m1 * noise).clamp(-1.0, 1.0)
            first, second = self._at("ddpm_mu_coef1", times), self._at("ddpm_mu_coef2", times)
            return first * clean + second * x, self._at("ddpm_logvar_clipped", times), clean
        alpha, before = self._at("ddim_alphas", index), self._at("ddim_alphas_prev", index)
        lost = self._at("ddim_sqrt_one_minus_alphas", index)
        clean = ((x - lost * noise) / alpha**0.5).clamp(-1.0, 1.0)
        noise = (x - alpha**0.5 * clean) / lost
        eta = torch.zeros_like(before) if deterministic else self.eta().expand_as(before)
        sigma = (eta * ((1 - before) / (1 - alpha) * (1 - alpha / before)) ** 0.5).clamp(
            min=MIN_SIGMA
        )
        direction = (1.0 - before - sigma**2).clamp(min=0).sqrt() * noise
        return before**0.5 * clean + direction, (sigma**2 + MIN_VARIANCE).log(), clean

    def sampling_times(self) -> list[int]:
        """Return the times that sampling goes through."""
        if self.sampler == "flow":
            return [int(step / self.steps * FLOW_BUCKETS) for step in range(self.steps)]
        stride = NUM_TRAIN_TIMES // self.steps
        if self.sampler == "ddim":
            return [step * stride for step in reversed(range(self.steps))]
        return list(reversed(range(0, NUM_TRAIN_TIMES, stride)))

    def get_action(
        self,
        states: torch.Tensor,
        history: torch.Tensor,
        status: torch.Tensor,
        init: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> torch.Tensor:
        """Sample trajectories (B, 8, 3) in metres and radians.

        Args:
            states: (B, tokens, width).
            history: (B, 12).
            status: (B, 8).
            init: (B, 8, 3), the start; noise by default.
            noise: (steps, B, 8, 3), of the steps; drawn by default.
            deterministic: Whether ddim adds no noise.
        """
        context = self.encode(states, history, status)
        x = self._begin(context.ego, init)
        for index, time in enumerate(self.sampling_times()):
            times = torch.full((len(x),), time, device=x.device)
            if self.sampler == "flow":
                x = x + 1.0 / self.steps * self.predict(x, times, context)
                continue
            indices = torch.full((len(x),), index, device=x.device)
            mean, logvar, _ = self.p_mean_variance(x, times, indices, context, deterministic)
            std = self._eval_std(logvar, time, deterministic)
            drawn = torch.randn_like(x) if noise is None else noise[index]
            if self.sampler == "ddim":  # upstream clamps ddpm's only after reinforcement
                drawn = drawn.clamp(-EVAL_NOISE_CLIP, EVAL_NOISE_CLIP)
            x = mean + std * drawn
        return denormalise(x.clamp(-1.0, 1.0))

    def _begin(self, like: torch.Tensor, init: torch.Tensor | None) -> torch.Tensor:
        if init is not None:
            return init
        shape = (like.shape[0], HORIZON, ACTION_DIM)
        return torch.randn(shape, device=like.device, dtype=like.dtype)

    def _eval_std(self, logvar: torch.Tensor, time: int, deterministic: bool) -> torch.Tensor:
        std = torch.exp(0.5 * logvar)
        if self.sampler == "ddpm":
            return torch.zeros_like(std) if time == 0 else std.clamp(min=DDPM_EVAL_MIN_STD)
        return torch.zeros_like(std) if deterministic else std.clamp(min=EVAL_MIN_STD)

    # -- reinforcement -----------------------------------------------------------------------------

    def sample_chain(
        self,
        states: torch.Tensor,
        history: torch.Tensor,
        status: torch.Tensor,
        count: int = 1,
        init: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample with exploring ddim and return all steps: chains (B * count, steps + 1, 8, 3).

        Args:
            states: (B, tokens, width).
            history: (B, 12).
            status: (B, 8).
            count: Consecutive samples per scene. The scene is encoded once.
            init: (B * count, 8, 3); drawn by default.
            noise: (steps, B * count, 8, 3); drawn by default.

        Returns:
            The chains in normalised actions, and their ends (B * count, 8, 3) in metres and
            radians; both are detached.
        """
        context = self.encode(states, history, status).repeated(count)
        x = self._begin(context.ego, init)
        chain, times = [x], self.sampling_times()
        for index, time in enumerate(times):
            given = (torch.full((len(x),), value, device=x.device) for value in (time, index))
            mean, logvar, _ = self.p_mean_variance(x, *given, context, deterministic=False)
            std = torch.exp(0.5 * logvar).clamp(min=CHAIN_MIN_STD)
            drawn = torch.randn_like(x) if noise is None else noise[index]
            x = mean + std * drawn.clamp(-CHAIN_NOISE_CLIP, CHAIN_NOISE_CLIP)
            x = x.clamp(-1.0, 1.0) if index == len(times) - 1 else x
            chain.append(x)
        return torch.stack(chain, dim=1).detach(), denormalise(x).detach()

    def get_logprobs(
        self,
        states: torch.Tensor,
        history: torch.Tensor,
        status: torch.Tensor,
        chains: torch.Tensor,
    ) -> torch.Tensor:
        """Return the log probability of each element of each step, (B * count, steps, 8, 3).

        Args:
            states: (B, tokens, width).
            history: (B, 12).
            status: (B, 8).
            chains: (B * count, steps + 1, 8, 3), of ddim.
        """
        total, steps = chains.shape[0], chains.shape[1] - 1
        context = self.encode(states, history, status)
        context = context.repeated(total // len(states) * steps)
        times = torch.tensor(self.sampling_times(), device=chains.device)
        index = torch.arange(steps, device=chains.device)
        before, after = chains[:, :-1].flatten(0, 1), chains[:, 1:].flatten(0, 1)
        mean, logvar, _ = self.p_mean_variance(
            before, times.repeat(total), index.repeat(total), context, deterministic=False
        )
        std = torch.exp(0.5 * logvar).clamp(min=LOGPROB_MIN_STD)
        squares = (after - mean) ** 2 / (2 * std**2)
        log_prob = -squares - std.log() - 0.5 * math.log(2 * math.pi)
        return log_prob.unflatten(0, (total, steps))
