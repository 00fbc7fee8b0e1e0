"""The interface of planners for training and sampling, for this recipe's own and for upstream's.

Each method is a function of the module and a batch in PyTorch, which `tpuport` ports.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from recipes.recogdrive import upstream
from recipes.recogdrive.planner import make_planner
from tpuport.training.input.batches import MASK

Batch = dict[str, torch.Tensor]


def scene_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states (B, tokens, width), history (B, 12) and status (B, 8) of a batch."""
    history = batch["history_trajectory"].flatten(1)
    return batch["last_hidden_state"], history, batch["status_feature"]


def imitation_loss(planner: Any, batch: Batch) -> tuple[torch.Tensor, Batch]:
    """Return the mean squared error over the samples of a batch that count.

    Args:
        planner: This recipe's planner.
        batch: Result of `collate`. `noise` (B, 8, 3) and `times` (B,) replace drawn ones, if
            present, and `sample_mask` (B,) is present if some samples are padding.

    Returns:
        The loss, and the number of samples that it is a mean over.
    """
    drawn = batch.get("noise"), batch.get("times")
    losses = planner.loss(*scene_of(batch), batch["trajectory"], *drawn)
    mask = batch.get(MASK)
    counts = torch.ones_like(losses) if mask is None else mask.to(losses.dtype)
    return (losses * counts).sum() / counts.sum(), {"weight": counts.sum()}


def sampled(planner: Any, batch: Batch) -> torch.Tensor:
    """Sample trajectories (B, 8, 3), from `init` and with `step_noise` if the batch has them."""
    return planner.get_action(*scene_of(batch), batch.get("init"), batch.get("step_noise"))


# -- reinforcement -----------------------------------------------------------------------------

# Log probabilities are clamped to these limits.
LOGP_MIN, LOGP_MAX = -5.0, 2.0


def sampled_chains(planner: Any, batch: Batch, count: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample exploring chains (B, count, steps + 1, 8, 3), and trajectories (B, count, 8, 3)."""
    chains, ends = planner.sample_chain(*scene_of(batch), count)
    return chains.unflatten(0, (-1, count)), ends.unflatten(0, (-1, count))


def upstream_chains(
    planner: Any, batch: Batch, count: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample chains of upstream's planner, which is given each scene `count` times."""
    scenes = (part.repeat_interleave(count, 0) for part in scene_of(batch))
    chains, ends = planner.sample_chain(*scenes)
    return chains.unflatten(0, (-1, count)), ends.unflatten(0, (-1, count))


def _logprobs(planner: Any, batch: Batch, chains: torch.Tensor) -> torch.Tensor:
    return planner.get_logprobs(*scene_of(batch), chains.flatten(0, 1))


def _upstream_logprobs(planner: Any, batch: Batch, chains: torch.Tensor) -> torch.Tensor:
    scenes = (part.repeat_interleave(chains.shape[1], 0) for part in scene_of(batch))
    flat = chains.flatten(0, 1)
    return planner.get_logprobs(*scenes, flat).unflatten(0, (*flat.shape[:1], -1))


def reinforced_loss(planner: Any, batch: Batch) -> tuple[torch.Tensor, Batch]:
    """Return the loss of reinforcement, see `_reinforced`."""
    return _reinforced(_logprobs, planner, batch)


def upstream_reinforced_loss(planner: Any, batch: Batch) -> tuple[torch.Tensor, Batch]:
    """Return the loss of reinforcement for upstream's planner."""
    return _reinforced(_upstream_logprobs, planner, batch)


def _reinforced(logprobs: Any, planner: Any, batch: Batch) -> tuple[torch.Tensor, Batch]:
    """Return the advantage-weighted likelihood of chains, with that of the reference's chains.

    Args:
        logprobs: Returns the log probability of each element of chains.
        planner: The policy.
        batch: Scenes with `chains` (B, G, steps + 1, 8, 3), their `advantages` (B, G), the
            `reference_chains` (B, 1, steps + 1, 8, 3), `discount` (B, steps) and `bc` (B,), the
            weight of the second term.
    """
    chains, advantages = batch["chains"], batch["advantages"]
    likely = logprobs(planner, batch, chains).clamp(LOGP_MIN, LOGP_MAX).mean((2, 3))
    weighted = likely.unflatten(0, advantages.shape) * advantages[..., None]
    policy = -(weighted * batch["discount"][:, None]).mean((1, 2))
    reference = logprobs(planner, batch, batch["reference_chains"])
    cloned = -reference.clamp(LOGP_MIN, LOGP_MAX).mean((1, 2, 3))
    mask = batch.get(MASK)
    counts = torch.ones_like(policy) if mask is None else mask.to(policy.dtype)
    total = counts.sum()
    policy_loss, bc_loss = ((part * counts).sum() / total for part in (policy, cloned))
    loss = ((policy + batch["bc"] * cloned) * counts).sum() / total
    return loss, {"policy_loss": policy_loss, "bc_loss": bc_loss, "weight": total}


@dataclass(frozen=True)
class Kind:
    """A kind of planner.

    Attributes:
        make: `make(size, sampler, state_width=..., seed=...)` returns a planner with fresh weights.
        loss: Loss of imitation, for a batch.
        sample: Samples trajectories, for a batch.
        chains: Samples chains and their trajectories, for a batch and a count.
        reinforced: Loss of reinforcement, for a batch with chains.
        masks: Whether the loss of imitation ignores padding.
    """

    make: Callable[..., torch.nn.Module]
    loss: Callable[..., Any]
    sample: Callable[..., torch.Tensor]
    chains: Callable[..., Any]
    reinforced: Callable[..., Any]
    masks: bool


OURS = Kind(make_planner, imitation_loss, sampled, sampled_chains, reinforced_loss, masks=True)


def upstream_kind(make: Callable[..., torch.nn.Module]) -> Kind:
    """Return upstream's kind, whose loss is a mean over the complete batch.

    Args:
        make: Result of `upstream.upstream_planner`.
    """
    return Kind(
        make,
        upstream.imitation_loss,
        upstream.sampled,
        upstream_chains,
        upstream_reinforced_loss,
        masks=False,
    )
