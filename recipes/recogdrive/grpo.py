"""Stage 3: the planner learns from rewards of its own trajectories, by GRPO.

A step samples several trajectories of each scene with one program, scores them in other processes
on the host, and computes the gradient with a second program. The loss is the likelihood of each
chain, weighted by its advantage over the others of its scene, and the likelihood of the reference
policy's chains, so that the planner does not forget how people drive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch

import tpuport
from recipes.hosts import refuse_several
from recipes.recogdrive.diffusion import NUM_STEPS
from recipes.recogdrive.kinds import Kind
from recipes.recogdrive.layouts import CacheDataset, collate, datasets
from recipes.recogdrive.plots import check_plots
from recipes.recogdrive.rewards import PdmScorer, RewardPool, Scorer, SimpleScorer
from recipes.recogdrive.train import (
    TrainOptions,
    kind_of,
    make_step,
    make_validation,
    port_planner,
    run,
)
from recipes.recogdrive.weights import config_of, read_weights
from tpuport.foundation.errors import UsageError
from tpuport.sharding.shard import argument_name
from tpuport.training import Batches, TrainState, TrainStep
from tpuport.training.input.batches import MASK

INDEX = "index"
# Folded into the key, so that the reference policy draws its own random numbers.
_REFERENCE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GrpoOptions:
    """The settings with which a planner is reinforced. The defaults are upstream's.

    Attributes:
        train: Settings as in stage 2, but for one process. Sizes and sampler come from the
            checkpoint.
        samples: Trajectories per scene.
        gamma: Weight of a sampling step relative to the one after it.
        bc: Weight of behaviour cloning.
        parts: Number of parts in which the scenes of a batch are sampled, so that one is scored
            while the next is sampled.
        workers: Processes that score; None for one per core, at most 8; 0 for none.
    """

    train: TrainOptions = field(
        default_factory=lambda: TrainOptions(
            epochs=10, batch_size=8, min_lr=0.0, warmup_epochs=0, ema_decay=None
        )
    )
    samples: int = 8
    gamma: float = 0.6
    bc: float = 0.1
    parts: int = 2
    workers: int | None = None


class IndexedCache(torch.utils.data.Dataset[dict[str, Any]]):
    """The samples of a cache with their indices, by which their names are found again."""

    def __init__(self, dataset: CacheDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self._dataset[index], INDEX: torch.tensor(index)}


class GrpoStep:
    """A step of reinforcement with the interface of a `TrainStep`: sample, score, update.

    The policy that samples is the one that is updated. Work overlaps only within a step.

    Args:
        step: Training step of the reinforcement loss.
        chains: Name of the ported method that samples chains.
        pool: Scores trajectories.
        tokens: Names of the samples, by their indices.
        options: Settings of reinforcement.
    """

    def __init__(
        self,
        step: TrainStep,
        chains: str,
        pool: RewardPool,
        tokens: Sequence[str],
        options: GrpoOptions,
    ) -> None:
        self.step, self.ported = step, step.ported
        self._pool, self._tokens, self._options = pool, tokens, options
        # A copy of the current weights, since `load_state` replaces those of the model.
        self._reference = {**self.ported.params}
        # Buffers are not trained. As constants of the program they stay concrete: upstream's
        # sampler converts its schedule and eta to Python numbers, which a tracer does not allow.
        ported, fixed = self.ported, {**self.ported.buffers}

        def sample(params: Any, key: Any, batch: Any, count: int) -> Any:
            return ported.apply(params, fixed, key, batch, count, method=chains)[0]

        self._sample = jax.jit(sample, static_argnums=3)
        powers = np.arange(NUM_STEPS - 1, -1, -1)
        self._discount = (options.gamma**powers).astype(np.float32)

    def init(self, seed: int = 0) -> TrainState:
        """Return the state before the first step."""
        return self.step.init(seed)

    @property
    def causes(self) -> list[tuple[str, ...]]:
        """Return the reason why each program of the loss was compiled."""
        return self.step.causes

    def place(self, batch: dict[str, torch.Tensor], *, share: Any = None) -> dict[str, Any]:
        """Return a batch on the devices, except for the entries that the host reads."""
        del share
        here = {name: batch[name].numpy() for name in (INDEX, "trajectory")}
        call = self.step.place({name: t for name, t in batch.items() if name not in here})
        names = [argument_name(path).removeprefix("0.") for path in call.paths]
        return {**dict(zip(names, call.values, strict=True)), **here}

    def load_state(self, state: TrainState, *, ema: bool = False) -> Any:
        """Give the model the weights of a state, and return it."""
        return self.step.load_state(state, ema=ema)

    def sampled(self, state: TrainState, batch: dict[str, Any]) -> tuple[Any, Any, np.ndarray]:
        """Return chains (B, G, steps + 1, 8, 3), the reference's chains, and rewards (B, G).

        All programs are dispatched before the first result is awaited. Each part is then scored as
        it arrives.
        """
        options = self._options
        scenes = {n: batch[n] for n in ("last_hidden_state", "history_trajectory")}
        scenes["status_feature"] = batch["status_feature"]
        key = jax.random.fold_in(state.key, state.step)
        parts = _cut(scenes, options.parts)
        made = [
            self._sample(state.params, jax.random.fold_in(key, i), part, options.samples)
            for i, part in enumerate(parts)
        ]
        key = jax.random.fold_in(key, _REFERENCE)
        reference, _ = self._sample(self._reference, key, scenes, 1)
        names = [self._tokens[int(i)] for i in batch[INDEX]]
        true, pending, start = batch["trajectory"], [], 0
        for _, ends in made:
            rows = slice(start, start + len(ends))
            pending.append(self._pool.submit(names[rows], np.asarray(ends), true[rows]))
            start += len(ends)
        rewards = np.concatenate([one.result() for one in pending])
        return jnp.concatenate([chains for chains, _ in made]), reference, rewards

    def __call__(
        self, state: TrainState, batch: dict[str, Any]
    ) -> tuple[TrainState, dict[str, Any]]:
        """Take one step. Its metrics are those of the loss and `reward`, see `mean_reward`."""
        chains, reference, rewards = self.sampled(state, batch)
        count = len(rewards)
        given = {n: v for n, v in batch.items() if n not in (INDEX, "trajectory")}
        given |= {
            "chains": chains,
            "reference_chains": reference,
            "advantages": jnp.asarray(advantages(rewards)),
            "discount": jnp.asarray(np.tile(self._discount, (count, 1))),
            "bc": jnp.full(count, self._options.bc, jnp.float32),
        }
        state, metrics = self.step(state, given)
        return state, {**metrics, "reward": mean_reward(rewards, batch.get(MASK))}


def mean_reward(rewards: np.ndarray, mask: Any = None) -> float:
    """Return the mean over all samples of the scenes that count.

    Args:
        rewards: (scenes, samples).
        mask: (scenes,), False for a scene that is padding.
    """
    return float((rewards if mask is None else rewards[np.asarray(mask, bool)]).mean())


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Return the advantage of each sample over its scene's mean, in standard deviations.

    Args:
        rewards: (scenes, samples).
    """
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return centred / (rewards.std(axis=1, ddof=1, keepdims=True) + 1e-8)


def _cut(batch: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Split a batch into equal parts, as many as divide it and at most `parts`."""
    size = len(next(iter(batch.values())))
    count = max(n for n in range(1, parts + 1) if size % n == 0)
    rows = [slice(i * size // count, (i + 1) * size // count) for i in range(count)]
    return [{name: value[one] for name, value in batch.items()} for one in rows]


def _refuse_several() -> None:
    refuse_several(
        "reinforcement",
        "which scores for all its devices (mesh= is over them, and a larger planner or batch fits"
        " by accumulate=)",
    )


def make_grpo_step(
    planner: torch.nn.Module,
    kind: Kind,
    pool: RewardPool,
    tokens: Sequence[str],
    options: GrpoOptions,
    steps_per_epoch: int,
) -> GrpoStep:
    """Return a step that reinforces a planner, whose current weights are the reference policy.

    Raises:
        UsageError: An option does not fit.
    """
    if options.samples < 2:
        raise UsageError(
            f"samples={options.samples}: expected 2 or more, as each is compared with the others"
        )
    if options.parts < 1:
        raise UsageError(f"parts={options.parts}: expected 1 or more")
    _refuse_several()
    ported = port_planner(planner, kind, options.train, also=(kind.chains,))
    step = make_step(ported, kind.reinforced, options.train, steps_per_epoch)
    return GrpoStep(step, kind.chains.__name__, pool, tokens, options)


def make_scorer(reward: Literal["simple", "pdm"], metric_cache: str | Path | None) -> Scorer:
    """Return the scorer of trajectories.

    Raises:
        UsageError: There is no such reward, or what it needs is missing.
    """
    if reward == "simple":
        return SimpleScorer()
    if reward != "pdm":
        raise UsageError(f"reward={reward!r}: expected 'simple' or 'pdm'")
    if metric_cache is None:
        raise UsageError("reward='pdm' needs metric_cache=, what run_metric_caching.py wrote")
    return PdmScorer(metric_cache)


def _reference_of(checkpoint: str | Path, out: Path) -> dict[str, torch.Tensor]:
    """Return the initial weights, of which the run keeps a copy as its reference policy."""
    kept = out / "reference.safetensors"
    if not kept.exists():
        weights = read_weights(checkpoint)
        out.mkdir(parents=True, exist_ok=True)
        tpuport.save_checkpoint(kept, weights)
    return read_weights(kept)


def _batches(dataset: CacheDataset, options: TrainOptions) -> Batches:
    """Return the input.

    A set smaller than a batch is one batch, and the last batch is padded.
    """
    return Batches(
        IndexedCache(dataset),
        batch_size=min(options.batch_size, len(dataset)),
        shuffle=True,
        seed=options.seed,
        collate=collate,
        last="pad",
        workers=options.workers,
    )


def grpo(
    cache: str | Path,
    checkpoint: str | Path,
    out: str | Path,
    options: GrpoOptions | None = None,
    *,
    reward: Literal["simple", "pdm"] = "simple",
    metric_cache: str | Path | None = None,
    logs: Sequence[str] | None = None,
    val_logs: Sequence[str] | None = None,
    checkout: str | Path | None = None,
) -> dict[str, float]:
    """Reinforce a planner of stage 2, or resume if started again with the same arguments.

    It writes OUT/states, OUT/log.jsonl, OUT/reference.safetensors and OUT/planner.safetensors.

    Args:
        cache: Cache of either layout.
        checkpoint: Initial planner, which is also the reference policy. A resumed run uses its own
            copy of it.
        out: Folder of the run.
        options: Settings of reinforcement.
        reward: "simple" (see `SimpleScorer`), or "pdm", navsim's simulator.
        metric_cache: Folder of navsim's metrics, for "pdm".
        logs: Drives to train on; by default all that are not for validation.
        val_logs: Drives to validate on; by default those of training.
        checkout: Upstream checkout, to train its own planner.

    Returns:
        The last validation: errors as in stage 2, and `reward` of the trajectories sampled for it.

    Raises:
        UsageError: An argument does not fit.
        CheckpointError: The cache, the checkpoint or a saved state is damaged.
    """
    _refuse_several()
    options, out = options or GrpoOptions(), Path(out)
    scorer = make_scorer(reward, metric_cache)
    if options.train.plots:
        check_plots()
    dataset, validated = datasets(cache, logs, val_logs)
    weights = _reference_of(checkpoint, out)
    config, sampler = config_of(weights)
    if sampler != "ddim":
        raise UsageError(
            f"{checkpoint} is a planner for {sampler}, and likelihoods of chains are those of ddim."
            " What to do: train it with sampler='ddim'"
        )
    with kind_of(checkout) as kind, RewardPool(scorer, options.workers) as pool:
        planner = kind.make(config, sampler, state_width=config.state_width)
        planner.load_state_dict(weights)
        batches = _batches(dataset, options.train)
        step = make_grpo_step(planner, kind, pool, dataset.tokens, options, len(batches))
        validation = make_validation(validated, kind, options.train, out, pool)
        return run(step, batches, validation, options.train, out)
