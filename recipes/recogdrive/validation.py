"""Errors of a planner's sampled trajectories against the driven ones."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import torch

from recipes import hosts
from recipes.recogdrive.diffusion import ACTION_DIM, HORIZON, NUM_STEPS
from recipes.recogdrive.kinds import Batch
from recipes.recogdrive.layouts import CacheDataset, collate
from recipes.recogdrive.plots import plot_trajectories
from recipes.recogdrive.rewards import RewardPool
from tpuport.foundation.errors import UsageError
from tpuport.training import TrainState

_EVALUATION_SEED = 7
_PLOTTED = 8


def errors_of(predicted: torch.Tensor, true: torch.Tensor) -> dict[str, float]:
    """Return `l1` and `displacement` of trajectories (scenes, 8, 3).

    `l1` is over x, y and heading, as in upstream's validation; `displacement` is in metres.
    """
    off = predicted - true
    return {"l1": off.abs().mean().item(), "displacement": off[..., :2].norm(dim=-1).mean().item()}


class Validation:
    """The mean error of sampled trajectories, as in upstream's validation.

    The noise is the same each time, so that evaluations differ in the weights only.

    Args:
        dataset: Scenes to sample for.
        batch_size: Scenes per batch.
        sample: Name of the ported method that samples.
        ema: Whether to evaluate the averaged weights.
        plots: Folder of the pictures; None for no pictures.
        pool: Also computes rewards of the sampled trajectories, if given.
        count: Number of evenly spaced samples; None for all.

    Raises:
        UsageError: The count is below 1.
    """

    def __init__(
        self,
        dataset: CacheDataset,
        batch_size: int,
        sample: str,
        *,
        ema: bool,
        plots: Path | None = None,
        pool: RewardPool | None = None,
        count: int | None = None,
    ) -> None:
        if count is not None and count < 1:
            raise UsageError(f"val_samples={count}: expected 1 or more, or None for all")
        self._dataset, self._sample, self._ema = dataset, sample, ema
        self._plots, self._pool = plots, pool
        total = len(dataset)
        count = total if count is None else min(count, total)
        self.indices = [i * total // count for i in range(count)]
        self._size = min(batch_size, count)
        self.last: dict[str, float] | None = None

    def batches(self) -> Iterator[tuple[Batch, int]]:
        """Yield batches of one size, the last padded with earlier scenes, and their row counts."""
        generator = torch.Generator().manual_seed(_EVALUATION_SEED)
        total = len(self.indices)
        for start in range(0, total, self._size):
            rows = [self.indices[i % total] for i in range(start, start + self._size)]
            batch = collate([self._dataset[i] for i in rows])
            shape = (self._size, HORIZON, ACTION_DIM)
            batch["init"] = torch.randn(shape, generator=generator)
            batch["step_noise"] = torch.randn((NUM_STEPS, *shape), generator=generator)
            yield batch, min(self._size, total - start)

    def __call__(self, step: Any, state: TrainState) -> dict[str, float]:
        """Return a state's errors: `val_l1`, `val_displacement` in metres, and `val_reward`."""
        sample = getattr(step.load_state(state, ema=self._ema), self._sample)
        kept = []
        for batch, count in self.batches():
            predicted = hosts.to_torch(sample(batch)).float()
            kept.append((predicted[:count], batch["trajectory"][:count]))
        predicted, true = (torch.cat(part) for part in zip(*kept, strict=True))
        self.last = {f"val_{name}": value for name, value in errors_of(predicted, true).items()}
        if self._pool is not None:
            given = predicted.unsqueeze(1).numpy(), true.numpy()
            tokens = [self._dataset.tokens[i] for i in self.indices]
            rewards = self._pool.submit(tokens, *given).result()
            self.last["val_reward"] = float(rewards.mean())
        if self._plots is not None and jax.process_index() == 0:
            path = self._plots / f"step-{int(state.step):06d}.png"
            plot_trajectories(path, predicted[:_PLOTTED], true[:_PLOTTED])
        return self.last
