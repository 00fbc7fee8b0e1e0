"""The planner: a diffusion transformer over eight poses, which attends to the VLM's states.

Its parameters have upstream's names and shapes, so that state dicts load either way. Odd blocks
attend to the states, even ones among the poses. Time and the ego's status modulate each block.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from recipes.recogdrive.diffusion import (
    ACTION_DIM,
    HORIZON,
    NUM_STEPS,
    Context,
    Diffusion,
    Sampler,
)
from tpuport.foundation.errors import UsageError

HISTORY_DIM, STATUS_DIM = 12, 8
TIME_CHANNELS = 256
MAX_PERIOD = 10_000.0


@dataclass(frozen=True)
class PlannerConfig:
    """The sizes of a planner.

    Attributes:
        heads: Attention heads.
        head_dim: Width of a head.
        layers: Blocks of the transformer.
        output_dim: Width of the transformer's output, which the decoder takes.
        state_width: Width of the chat model's hidden states.
        hidden: Width inside the encoders and the decoder.
    """

    heads: int
    head_dim: int
    layers: int
    output_dim: int
    state_width: int
    hidden: int = 1024

    @property
    def width(self) -> int:
        """Return the width of the transformer."""
        return self.heads * self.head_dim


SIZES = {
    "tiny": PlannerConfig(4, 16, 4, 64, state_width=64, hidden=128),
    "small": PlannerConfig(8, 48, 16, 512, state_width=1536),  # with InternVL3-2B
    "large": PlannerConfig(32, 48, 16, 1536, state_width=3584),  # with InternVL3-8B
}


class RMSNorm(nn.Module):
    """Root-mean-square norm, in float32."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., dim) to the same shape."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Mlp(nn.Module):
    """Linear, GELU, LayerNorm, Linear."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.fc2 = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., inputs) to (..., outputs)."""
        return self.fc2(self.norm(F.gelu(self.fc1(x))))


class SwiGLU(nn.Module):
    """The feed-forward part of a block."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(dim, 2 * dim)
        self.w3 = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., dim) to the same shape."""
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


class RotaryEmbedding(nn.Module):
    """Cosines and sines by position (Su et al. 2021), for as many positions as there are poses."""

    inv_freq: torch.Tensor
    cos_cached: torch.Tensor
    sin_cached: torch.Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / MAX_PERIOD ** (torch.arange(0, dim, 2) / dim))
        angles = torch.outer(torch.arange(HORIZON).float(), self.inv_freq).repeat(1, 2)
        self.register_buffer("cos_cached", angles.cos()[None, None], persistent=False)
        self.register_buffer("sin_cached", angles.sin()[None, None], persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate queries or keys (B, heads, poses, dim) by their positions."""
        cos, sin = self.cos_cached.to(x.dtype), self.sin_cached.to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Attention with normalised queries and keys, among the poses or from them to the states."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        dim = heads * head_dim
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.q_norm, self.k_norm = RMSNorm(head_dim), RMSNorm(head_dim)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])

    def forward(
        self, x: torch.Tensor, states: torch.Tensor | None, rotary: RotaryEmbedding
    ) -> torch.Tensor:
        """Attend from poses (B * n, 8, dim) to states (B, tokens, dim), or among the poses.

        The queries of a scene's n samples are put in one row, so that keys and values, of far more
        tokens, are computed and kept once.
        """
        source = x if states is None else states
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.to_q(x), self.to_k(source), self.to_v(source))
        )
        q, k = rotary(self.q_norm(q)), self.k_norm(k)
        if states is None:
            k = rotary(k)
        else:
            q = q.unflatten(0, (len(states), -1)).transpose(1, 2).flatten(2, 3)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.to_out[0](out.reshape(x.shape))


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Shift and scale (B, dim) each position of (B, poses, dim)."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def _modulation(dim: int, count: int) -> nn.Sequential:
    """Return the module that makes shifts, scales and gates, all zero at first."""
    linear = nn.Linear(dim, count * dim)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.SiLU(), linear)


class Block(nn.Module):
    """Attention and feed-forward, each modulated by the condition."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        dim = heads * head_dim
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.attn = Attention(heads, head_dim)
        self.ffn = SwiGLU(dim)
        self.adaLN_modulation = _modulation(dim, 6)

    def forward(
        self,
        x: torch.Tensor,
        condition: torch.Tensor,
        states: torch.Tensor | None,
        rotary: RotaryEmbedding,
    ) -> torch.Tensor:
        """Map poses (B, 8, dim) under a condition (B, dim) to the same shape."""
        parts = self.adaLN_modulation(condition).chunk(6, dim=1)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = parts
        x = x + gate.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift, scale), states, rotary)
        return x + ffn_gate.unsqueeze(1) * self.ffn(modulate(self.norm2(x), ffn_shift, ffn_scale))


class FinalLayer(nn.Module):
    """The last layer: from the transformer's width to the decoder's."""

    def __init__(self, dim: int, output_dim: int) -> None:
        super().__init__()
        self.norm_final = RMSNorm(dim)
        self.linear = nn.Linear(dim, output_dim)
        self.modulation_proj = _modulation(dim, 2)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """Map (B, 8, dim) to (B, 8, output_dim)."""
        shift, scale = self.modulation_proj(condition).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class TimestepEmbedder(nn.Module):
    """Two layers over sines and cosines of the time."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(TIME_CHANNELS, dim)
        self.linear_2 = nn.Linear(dim, dim)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        """Map (B,) to (B, dim)."""
        half = TIME_CHANNELS // 2
        exponent = -math.log(MAX_PERIOD) * torch.arange(half, device=times.device).float()
        angles = times[:, None].float() * torch.exp(exponent / (half - 1))
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return self.linear_2(F.silu(self.linear_1(waves.to(self.linear_1.weight.dtype))))


class TimestepEncoder(nn.Module):
    """An encoder of times to conditions. Upstream nests its layers one name deeper."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.timestep_embedder = TimestepEmbedder(dim)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        """Map (B,) to (B, dim)."""
        return self.timestep_embedder(times)


class DiT(nn.Module):
    """The diffusion transformer."""

    def __init__(self, config: PlannerConfig) -> None:
        super().__init__()
        self.timestep_encoder = TimestepEncoder(config.width)
        self.rotary_embedder = RotaryEmbedding(config.head_dim)
        self.transformer_blocks = nn.ModuleList(
            Block(config.heads, config.head_dim) for _ in range(config.layers)
        )
        self.final_layer = FinalLayer(config.width, config.output_dim)

    def forward(
        self, x: torch.Tensor, states: torch.Tensor, ego: torch.Tensor, times: torch.Tensor
    ) -> torch.Tensor:
        """Map poses (B, 8, dim), states (B, tokens, dim), ego (B, dim) to (B, 8, output_dim)."""
        condition = self.timestep_encoder(times) + ego
        for index, block in enumerate(self.transformer_blocks):
            x = block(x, condition, states if index % 2 else None, self.rotary_embedder)
        return self.final_layer(x, condition)


class ActionEncoder(nn.Module):
    """An encoder of noisy poses and their time to the transformer's width."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(ACTION_DIM, dim)
        self.fc2 = nn.Linear(2 * dim, dim)
        self.fc3 = nn.Linear(dim, dim)

    def forward(self, actions: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        """Map actions (B, 8, 3) at times (B,) to (B, 8, dim)."""
        poses = self.fc1(actions)
        half = poses.shape[-1] // 2
        # Upstream computes this logarithm in float32, which differs in the last bits.
        step = -torch.log(torch.tensor(MAX_PERIOD)) / half
        frequencies = torch.exp(torch.arange(half, device=times.device).float() * step)
        angles = times.float()[:, None, None] * frequencies
        waves = torch.cat([angles.sin(), angles.cos()], dim=-1).expand(-1, poses.shape[1], -1)
        x = torch.cat([poses, waves.to(poses.dtype)], dim=-1)
        return self.fc3(F.silu(self.fc2(x)))


class Planner(Diffusion):
    """A planner of trajectories from hidden states, the last poses and the ego's status.

    Args:
        config: Sizes of the planner.
        sampler: "ddim", "ddpm" or "flow".
        steps: Sampling steps.
    """

    def __init__(
        self, config: PlannerConfig, sampler: Sampler = "ddim", steps: int = NUM_STEPS
    ) -> None:
        super().__init__(sampler, steps)
        self.config = config
        width, hidden = config.width, config.hidden
        self.model = DiT(config)
        self.his_traj_encoder = Mlp(HISTORY_DIM, hidden, width)
        self.ego_status_encoder = Mlp(STATUS_DIM, hidden, width)
        self.action_encoder = ActionEncoder(width)
        self.feature_encoder = nn.Linear(config.state_width, width)
        self.fusion_projector = nn.Linear(3 * width, width)
        self.action_decoder = Mlp(config.output_dim, hidden, ACTION_DIM)
        self.position_embedding = nn.Embedding(HORIZON, width)
        nn.init.normal_(self.position_embedding.weight, std=0.02)

    def encode(self, states: torch.Tensor, history: torch.Tensor, status: torch.Tensor) -> Context:
        """Encode a scene: (B, tokens, width), (B, 12) and (B, 8)."""
        past = self.his_traj_encoder(history.unsqueeze(1)).expand(-1, HORIZON, -1)
        return Context(self.feature_encoder(states), past, self.ego_status_encoder(status))

    def predict(self, x: torch.Tensor, times: torch.Tensor, context: Context) -> torch.Tensor:
        """Predict noise or velocity (B, 8, 3) of noisy actions (B, 8, 3) at times (B,)."""
        actions = self.action_encoder(x, times) + self.position_embedding.weight
        mean = context.states.mean(1, keepdim=True).expand(-1, HORIZON, -1)
        mean = mean.repeat_interleave(len(x) // len(mean), 0)
        fused = self.fusion_projector(torch.cat([context.history, mean, actions], dim=2))
        return self.action_decoder(self.model(fused, context.states, context.ego, times))


def make_planner(
    size: str | PlannerConfig = "small",
    sampler: Sampler = "ddim",
    *,
    state_width: int | None = None,
    seed: int = 0,
) -> Planner:
    """Return a planner of a named size with fresh weights, the same for the same seed.

    Args:
        size: "tiny" (for trying things out), "small" or "large"; or a `PlannerConfig`.
        sampler: "ddim", "ddpm" or "flow".
        state_width: Width of the hidden states; by default that of the chat model of that size.
        seed: Random seed of the weights.

    Raises:
        UsageError: There is no such size or sampler.
    """
    if isinstance(size, str) and size not in SIZES:
        raise UsageError(f"size={size!r}: expected one of {', '.join(SIZES)}")
    config = SIZES[size] if isinstance(size, str) else size
    if state_width is not None:
        config = replace(config, state_width=state_width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Planner(config, sampler)
