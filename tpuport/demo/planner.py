"""A diffusion planner in the style of research code; `tpuport demo` ports it untouched.

It plans where a car drives next from its state and from tokens of a vision-language model. Nothing
in this file knows of JAX: in-place edits, boolean masks, `.item()` on schedule values and
positions, a rotary table that grows on demand, noise drawn in `forward`, buffers that training
updates, and results in a dictionary class. B is the batch size, H the horizon.
"""

import math
from collections import UserDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Range of one step's displacement in metres and of the heading in radians.
_LOW = (-1.6, -19.7, -1.7)
_HIGH = (65.2, 22.3, 1.9)


class BatchFeature(UserDict):
    """Named tensors, readable as items or as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


class RotaryEmbedding(nn.Module):
    """Rotary position embedding whose table grows on demand."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.dim, self.base = dim, base
        self.cached_length = 0

    def _grow(self, length: int, device: torch.device) -> None:
        rates = self.base ** (-torch.arange(0, self.dim, 2, device=device) / self.dim)
        angles = torch.outer(torch.arange(length, device=device), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.cached_length = length

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate `x` of shape [B, heads, N, dim] by `positions` of shape [N]."""
        length = int(positions.max().item()) + 1
        if length > self.cached_length:
            self._grow(length, x.device)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos[positions] + turned * self.sin[positions]


class PlannerAttention(nn.Module):
    """Multi-head self-attention, or cross-attention if a context is given."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(
        self,
        x: torch.Tensor,
        rope: RotaryEmbedding,
        context: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend from `x` [B, N, width] to itself, or to `context` [B, L, width] under `mask`."""
        source = x if context is None else context
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.key_value(source).chunk(2, dim=-1)
        )
        if context is None:
            positions = torch.arange(x.shape[1], device=x.device)
            query, key = rope(query, positions), rope(key, positions)
        elif mask is not None:
            mask = mask[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class PlannerBlock(nn.Module):
    """Self-attention, cross-attention and an MLP, each modulated and gated by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=False) for _ in range(3))
        self.itself, self.context = PlannerAttention(width, heads), PlannerAttention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 9 * width)

    def forward(
        self,
        x: torch.Tensor,
        condition: torch.Tensor,
        rope: RotaryEmbedding,
        context: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Apply one layer of the denoiser to `x` [B, N, width] under a `condition` [B, width]."""
        steps = self.modulation(F.silu(condition))[:, None].chunk(9, dim=-1)
        branches = (
            lambda y: self.itself(y, rope),
            lambda y: self.context(y, rope, context, mask),
            self.mlp,
        )
        for i, branch in enumerate(branches):
            shift, scale, gate = steps[3 * i : 3 * i + 3]
            x = x + gate * branch(self.norms[i](x) * (1 + scale) + shift)
        return x


class DiffusionPlanner(nn.Module):
    """A planner that learns the noise in noisy plans, and samples plans by removing it (DDIM).

    `forward` takes `context` [B, L, context_width], `context_mask` bool [B, L] (False is padding),
    `status` [B, 8], `action` [B, H, 3] and `valid` bool [B, H]; `get_action` the first three.
    """

    alphas: torch.Tensor
    schedule: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    loss_ema: torch.Tensor
    num_updates: torch.Tensor

    def __init__(
        self,
        width: int = 192,
        depth: int = 4,
        heads: int = 4,
        context_width: int = 384,
        horizon: int = 8,
        train_steps: int = 100,
        sample_steps: int = 5,
    ) -> None:
        super().__init__()
        self.horizon, self.train_steps, self.width = horizon, train_steps, width
        self.eta, self.status_dropout, self.ema_decay = 1.0, 0.1, 0.99
        self.status_norm = nn.BatchNorm1d(8)
        self.status_encoder = nn.Sequential(nn.Linear(8, width), nn.SiLU(), nn.Linear(width, width))
        self.time_encoder = nn.Sequential(
            nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.context_encoder = nn.Linear(context_width, width)
        self.action_encoder = nn.Linear(3, width)
        self.rope = RotaryEmbedding(width // heads)
        self.blocks = nn.ModuleList(PlannerBlock(width, heads) for _ in range(depth))
        self.action_decoder = nn.Linear(width, 3)
        steps = torch.linspace(0, 1, train_steps + 1)
        level = torch.cos((steps + 0.008) / 1.008 * math.pi / 2).square()
        self.register_buffer("alphas", (level[1:] / level[0]).clamp(min=1e-4))
        self.register_buffer("schedule", torch.linspace(train_steps - 1, 0, sample_steps).long())
        self.register_buffer("low", torch.tensor(_LOW))
        self.register_buffer("high", torch.tensor(_HIGH))
        self.register_buffer("loss_ema", torch.zeros(()))
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.long))

    def normalize(self, action: torch.Tensor) -> torch.Tensor:
        """Scale metres and radians to [-1, 1]."""
        action = action.clone()
        action.sub_(self.low).div_(self.high - self.low)
        return action.mul_(2).sub_(1).clamp_(-1, 1)

    def add_noise(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Add noise to actions; return the result, the noise, and each sample's diffusion step."""
        step = torch.randint(0, self.train_steps, (action.shape[0],), device=action.device)
        noise = torch.randn_like(action)
        alpha = self.alphas[step][:, None, None]
        return alpha.sqrt() * action + (1 - alpha).sqrt() * noise, noise, step

    def encode_step(self, step: torch.Tensor) -> torch.Tensor:
        """Embed diffusion steps [B] by sines, cosines and an MLP to [B, width]."""
        emb = torch.zeros(step.shape[0], self.width, device=step.device)
        rates = torch.exp(torch.arange(0, self.width, 2, device=step.device) * (-9.2 / self.width))
        emb[:, 0::2] = torch.sin(step[:, None] * rates)
        emb[:, 1::2] = torch.cos(step[:, None] * rates)
        return self.time_encoder(emb)

    def encode_status(self, status: torch.Tensor) -> torch.Tensor:
        """Encode the car's state [B, 8] to [B, width], dropping it for some samples in training."""
        status = self.status_encoder(self.status_norm(status))
        if self.training:
            dropped = torch.rand(status.shape[0], device=status.device) < self.status_dropout
            status[dropped] = 0.0
        return status

    def denoise(
        self, action: torch.Tensor, step: torch.Tensor, batch: BatchFeature
    ) -> torch.Tensor:
        """Predict the noise in a noisy action [B, H, 3]."""
        condition = self.encode_step(step) + self.encode_status(batch.status)
        context = self.context_encoder(batch.context)
        context[~batch.context_mask] = 0.0
        x = self.action_encoder(action)
        for block in self.blocks:
            x = block(x, condition, self.rope, context, batch.context_mask)
        return self.action_decoder(x)

    def forward(self, batch: BatchFeature) -> BatchFeature:
        """Compute the training loss on one batch."""
        noisy, noise, step = self.add_noise(self.normalize(batch.action))
        error = (self.denoise(noisy, step, batch) - noise).square().mean(dim=-1)
        loss = error[batch.valid].mean()
        if self.training:
            with torch.no_grad():
                if self.num_updates == 0:
                    self.loss_ema.copy_(loss)
                else:
                    self.loss_ema.lerp_(loss, 1 - self.ema_decay)
                self.num_updates += 1
        return BatchFeature({"loss": loss, "error": error.detach()})

    @torch.no_grad()
    def get_action(self, batch: BatchFeature) -> BatchFeature:
        """Sample a plan [B, H, 3] in metres and radians."""
        size = batch.status.shape[0]
        action = torch.randn(size, self.horizon, 3, device=batch.status.device)
        for i in range(len(self.schedule)):
            step = self.schedule[i]
            alpha = self.alphas[step].item()
            last = i + 1 == len(self.schedule)
            before = 1.0 if last else self.alphas[self.schedule[i + 1]].item()
            noise = self.denoise(action, step.expand(size), batch)
            clean = (action - math.sqrt(1 - alpha) * noise) / math.sqrt(alpha)
            clean.clamp_(-1, 1)
            sigma = self.eta * math.sqrt((1 - before) / (1 - alpha) * (1 - alpha / before))
            action = math.sqrt(before) * clean + math.sqrt(1 - before - sigma**2) * noise
            if sigma > 0:
                action += sigma * torch.randn_like(action)
        plan = (action + 1) / 2 * (self.high - self.low) + self.low
        plan[..., 2].clamp_(-math.pi / 2, math.pi / 2)
        return BatchFeature({"plan": plan})
