"""π0 and π0.5: a chunk of actions by a flow, from images, a prompt and the robot's state.

Parameters have the names of openpi's model.safetensors. The tokens of the prefix (images, prompt)
do not attend to those of the suffix (state, actions), so the language model computes the prefix
alone, and the expert attends to its keys and values. That is so in training and in sampling.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.openpi.augment import augmented
from recipes.openpi.config import Config
from recipes.openpi.gemma import Gemma, Keys
from recipes.openpi.siglip import Siglip

Batch = dict[str, Tensor]

# Periods of the embedding of the time.
SHORTEST, LONGEST = 4e-3, 4.0


@dataclass(frozen=True)
class Prefix:
    """What the flow reads of images and prompt.

    Attributes:
        keys: Keys and values by layer.
        valid: Which of the tokens exist, (B, tokens).
    """

    keys: list[Keys]
    valid: Tensor


class _Tower(nn.Module):
    """SigLIP, under the name that it has in openpi's files."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.vision_model = Siglip(config.vision)

    def forward(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Encode images (N, 3, height, width) in [-1, 1] to (N, tokens, width)."""
        model = self.vision_model
        return model.post_layernorm(model.encoder(model.embeddings(pixels).to(dtype)))


class _Projector(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear = nn.Linear(config.vision.width, config.language.width)


class _PaliGemma(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.vision_tower = _Tower(config)
        self.multi_modal_projector = _Projector(config)
        self.language_model = Gemma(config.language, vocab_size=config.vocab_size, adaptive=False)


class _Named(nn.Module):
    """A module with the one child `model`, a level of openpi's names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class _Both(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.paligemma = _Named(_PaliGemma(config))
        expert = Gemma(config.expert, vocab_size=None, adaptive=config.pi05)
        self.gemma_expert = _Named(expert)


def embedded_time(time: Tensor, width: int) -> Tensor:
    """Return sines and cosines (B, width) of times (B,), at periods of a geometric series."""
    fraction = torch.linspace(0.0, 1.0, width // 2, dtype=torch.float64)
    rates = (2 * math.pi / (SHORTEST * (LONGEST / SHORTEST) ** fraction)).float()
    angles = rates.to(time.device) * time[:, None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def as_pixels(images: Tensor) -> Tensor:
    """Return images (..., height, width, 3) of bytes as numbers in [-1, 1]."""
    return images.float() / 255.0 * 2.0 - 1.0


class Pi0(nn.Module):
    """A policy.

    A batch has `images` (B, cameras, height, width, 3) as bytes, `image_masks` (B, cameras),
    `tokens` and `token_mask` (B, length), `state` (B, action dim), and for training `actions` (B,
    horizon, action dim).
    """

    # Read by `tpuport.cast`: what openpi computes in float32.
    _keep_in_fp32_modules_strict = (
        *("action_in_proj", "action_out_proj", "state_proj", "time_mlp_in", "time_mlp_out"),
        *("action_time_mlp_in", "action_time_mlp_out"),
        *("input_layernorm", "post_attention_layernorm", "norm"),
        *("patch_embedding", "position_embedding"),
    )

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.paligemma_with_expert = _Both(config)
        width = config.expert.width
        self.action_in_proj = nn.Linear(config.action_dim, width)
        self.action_out_proj = nn.Linear(width, config.action_dim)
        if config.pi05:
            self.time_mlp_in = nn.Linear(width, width)
            self.time_mlp_out = nn.Linear(width, width)
        else:
            self.state_proj = nn.Linear(config.action_dim, width)
            self.action_time_mlp_in = nn.Linear(2 * width, width)
            self.action_time_mlp_out = nn.Linear(width, width)

    @property
    def _paligemma(self) -> Any:
        return self.paligemma_with_expert.paligemma.model

    @property
    def _expert(self) -> Any:
        return self.paligemma_with_expert.gemma_expert.model

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of both transformers. Inputs, time and actions are computed in float32."""
        return self._paligemma.language_model.embed_tokens.weight.dtype

    def encode_images(self, images: Tensor, *, augment: bool = False) -> Tensor:
        """Return the tokens (B, cameras * tokens, width) of all cameras."""
        batch = images.shape[0]
        pixels = as_pixels(images)
        if augment:
            pixels = augmented(pixels)
        tokens = self._paligemma.vision_tower(pixels.flatten(0, 1).permute(0, 3, 1, 2), self._dtype)
        tokens = self._paligemma.multi_modal_projector.linear(tokens)
        return tokens.unflatten(0, (batch, -1)).flatten(1, 2)

    def read_prefix(self, batch: Batch, images: Tensor) -> Prefix:
        """Compute the keys and values of the encoded images and the prompt, once for all steps."""
        language = self._paligemma.language_model
        tokens = language.embed_tokens(batch["tokens"])
        x = torch.cat([images, tokens * math.sqrt(tokens.shape[-1])], dim=1)
        of_images = batch["image_masks"].repeat_interleave(self.config.vision.num_tokens, dim=1)
        valid = torch.cat([of_images, batch["token_mask"]], dim=1)
        positions = valid.cumsum(1) - 1
        return Prefix(language(x, positions, valid[:, None, None])[1], valid)

    def velocity(self, prefix: Prefix, state: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """Return the flow's velocity (B, horizon, action dim) of actions at times (B,)."""
        x, condition = self._suffix(state, noisy, time)
        batch, length = x.shape[:2]
        starts = torch.zeros(length, dtype=torch.long)
        starts[0] = starts[length - self.config.action_horizon] = 1
        groups = starts.cumsum(0)
        own = (groups[None, :] <= groups[:, None]).expand(batch, -1, -1).to(prefix.valid.device)
        pairs = torch.cat([prefix.valid[:, None].expand(-1, length, -1), own], dim=2)
        positions = prefix.valid.sum(1)[:, None] + torch.arange(length, device=x.device)
        x, _ = self._expert(x.to(self._dtype), positions, pairs[:, None], condition, prefix.keys)
        normed = self._expert.norm(x, condition)[0]
        return self.action_out_proj(normed[:, -self.config.action_horizon :].float())

    def _suffix(self, state: Tensor, noisy: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the expert's tokens, and the condition of its norms."""
        actions = self.action_in_proj(noisy)
        times = embedded_time(time, actions.shape[-1])
        if self.config.pi05:
            return actions, F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(times))))
        both = torch.cat([actions, times[:, None].expand_as(actions)], dim=2)
        mixed = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(both)))
        return torch.cat([self.state_proj(state)[:, None], mixed], dim=1), None

    def forward(self, batch: Batch, *, augment: bool = False) -> Tensor:
        """Return the squared error of the velocity (B, horizon, action dim).

        `noise` and `time` of the batch replace drawn ones.
        """
        actions = batch["actions"]
        noise, time = batch.get("noise"), batch.get("time")
        if noise is None:
            noise = torch.randn_like(actions)
        if time is None:
            # By the inverse of the distribution function of Beta(1.5, 1).
            uniform = torch.rand(actions.shape[0], device=actions.device)
            time = uniform ** (1 / 1.5) * 0.999 + 0.001
        share = time[:, None, None]
        prefix = self.read_prefix(batch, self.encode_images(batch["images"], augment=augment))
        found = self.velocity(prefix, batch["state"], share * noise + (1 - share) * actions, time)
        return F.mse_loss(found, noise - actions, reduction="none")

    def sample_actions(self, batch: Batch, noise: Tensor, num_steps: Tensor | int = 10) -> Tensor:
        """Sample chunks of actions (B, horizon, action dim).

        Args:
            batch: Observations.
            noise: Where the flow begins, (B, horizon, action dim).
            num_steps: Steps of the flow. With a tensor one program serves any number, and its
                steps are a loop.
        """
        prefix = self.read_prefix(batch, self.encode_images(batch["images"]))
        return self.flow(prefix, batch["state"], noise, num_steps)

    def flow(self, prefix: Prefix, state: Tensor, noise: Tensor, num_steps: Tensor | int) -> Tensor:
        """Follow the velocity from noise at time 1 to actions at time 0."""
        x, step = noise, torch.zeros((), dtype=torch.int32)
        while step < num_steps:
            time = (1 - step / num_steps).float().expand(x.shape[0])
            x = x - self.velocity(prefix, state, x, time) / num_steps
            step = step + 1
        return x


def policy_loss(policy: Pi0, batch: Batch) -> Tensor:
    """Return the mean loss of a batch."""
    return policy(batch).mean()


def augmented_loss(policy: Pi0, batch: Batch) -> Tensor:
    """Return the mean loss of a batch whose images are changed at random."""
    return policy(batch, augment=True).mean()


def to_bfloat16(policy: Pi0) -> Pi0:
    """Turn the transformers to bfloat16, but for their norms and the embedding of patches."""
    kept = set(policy._keep_in_fp32_modules_strict)
    for name, parameter in policy.named_parameters():
        if not kept.intersection(name.split(".")):
            parameter.data = parameter.data.bfloat16()
    return policy


def make_policy(config: Config, seed: int = 0) -> Pi0:
    """Return a policy in float32 with random weights.

    Adaptive norms begin as openpi's do, at zero.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Pi0(config).eval()
