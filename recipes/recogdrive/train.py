"""Stage 2: the planner learns to drive as the drives of a cache do."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import torch

import tpuport
from recipes import hosts
from recipes.recogdrive.diffusion import Sampler
from recipes.recogdrive.kinds import OURS, Kind, upstream_kind
from recipes.recogdrive.layouts import CacheDataset, collate, collate_alike, datasets
from recipes.recogdrive.plots import check_plots
from recipes.recogdrive.rewards import RewardPool
from recipes.recogdrive.upstream import upstream_planner
from recipes.recogdrive.validation import Validation
from recipes.recogdrive.weights import read_weights
from tpuport.foundation.errors import UsageError
from tpuport.model.ported_model import PortedModel
from tpuport.training import (
    Batches,
    Checkpoints,
    JsonLines,
    TrainStep,
    fit,
    initialize,
    make_train_step,
)

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 1e-4

Precision = Literal["float32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The settings with which a planner is trained. The defaults are upstream's.

    Attributes:
        size: "tiny", "small" or "large".
        sampler: "ddim", "ddpm" or "flow".
        init: Initial weights.
        epochs: Epochs of training, and of the schedule of the learning rate.
        steps: Maximum number of steps.
        batch_size: Samples per step over all devices; upstream has 16 on each of 32.
        lr: Highest learning rate. By epochs it rises for `warmup_epochs`, and falls to `min_lr`
            along a cosine.
        min_lr: Final learning rate.
        warmup_epochs: Epochs of warmup.
        clip_norm: Largest global norm of the gradients.
        ema_decay: Decay of the averaged weights that are evaluated and exported; None for no
            average.
        accumulate: Number of microbatches per step.
        precision: "bf16" computes in bfloat16 and keeps weights in float32.
        mesh: Sizes by mesh axis, to shard the training over devices; None for one device.
        rules: Sharding rules of the parameters.
        workers: Processes that read the cache.
        seed: Random seed of weights, data order and noise.
        save_every: Steps between checkpoints.
        evaluate_every: Steps between evaluations.
        val_samples: Number of evenly spaced samples of an evaluation; None for all.
        validate_first: Whether to evaluate before the first step, too.
        log_every: Steps between lines of the log.
        plots: Whether to draw some trajectories at each evaluation.
        progress: Whether to show progress.
    """

    size: str = "small"
    sampler: Sampler = "ddim"
    init: str | Path | None = None
    epochs: int = 200
    steps: int | None = None
    batch_size: int = 16
    lr: float = 1e-4
    min_lr: float = 1e-6
    warmup_epochs: int = 3
    clip_norm: float = 1.0
    ema_decay: float | None = 0.999
    accumulate: int = 1
    precision: Precision = "float32"
    mesh: Mapping[str, int] | None = None
    rules: str = "fsdp"
    workers: int = 0
    seed: int = 0
    save_every: int = 500
    evaluate_every: int = 500
    val_samples: int | None = 256
    validate_first: bool = False
    log_every: int = 10
    plots: bool = False
    progress: bool = True


def warmup_cosine(
    lr: float, min_lr: float, warmup_epochs: int, epochs: int, steps_per_epoch: int
) -> Callable[[Any], jax.Array]:
    """Return upstream's learning rate by step: constant per epoch, up, then down as a cosine."""

    def schedule(step: Any) -> jax.Array:
        epoch = jnp.floor_divide(step, steps_per_epoch)
        rising = lr * (epoch + 1) / max(warmup_epochs, 1)
        share = (epoch - warmup_epochs) / max(epochs - warmup_epochs, 1)
        falling = min_lr + 0.5 * (lr - min_lr) * (1 + jnp.cos(math.pi * share))
        return jnp.where(epoch < warmup_epochs, rising, falling)

    return schedule


def make_optimizer(options: TrainOptions, steps_per_epoch: int) -> optax.GradientTransformation:
    """Return upstream's AdamW and schedule. The training step clips gradients."""
    rate = warmup_cosine(
        options.lr, options.min_lr, options.warmup_epochs, options.epochs, steps_per_epoch
    )
    b1, b2 = BETAS
    return optax.adamw(rate, b1=b1, b2=b2, weight_decay=WEIGHT_DECAY)


def port_planner(
    planner: torch.nn.Module, kind: Kind, options: TrainOptions, also: tuple[Any, ...] = ()
) -> PortedModel:
    """Return the planner as a ported model, sharded if there is a mesh.

    Args:
        planner: Planner on the CPU.
        kind: Kind of the planner.
        options: Settings of precision and mesh.
        also: Functions to port besides sampling.
    """
    ported = tpuport.convert(planner, methods=(kind.sample, *also), verify=False)
    if options.precision == "bf16":
        tpuport.cast(ported, "bf16_master")
    elif options.precision != "float32":
        raise UsageError(f"precision={options.precision!r}: expected 'float32' or 'bf16'")
    if options.mesh is not None:
        tpuport.shard(ported, options.mesh, options.rules)
    return ported


def make_step(
    ported: PortedModel, loss: Callable[..., Any], options: TrainOptions, steps_per_epoch: int
) -> TrainStep:
    """Return the training step of a planner.

    Args:
        ported: The planner.
        loss: Loss of the planner and a batch.
        options: Settings of training.
        steps_per_epoch: Steps per epoch, for the learning rate.
    """
    return make_train_step(
        ported,
        loss,
        make_optimizer(options, steps_per_epoch),
        accumulate=options.accumulate,
        clip_norm=options.clip_norm,
        ema_decay=options.ema_decay,
    )


def make_validation(
    dataset: CacheDataset,
    kind: Kind,
    options: TrainOptions,
    out: Path,
    pool: RewardPool | None = None,
) -> Validation:
    """Return the validation of a run in the folder `out`, with rewards if there is a pool."""
    return Validation(
        dataset,
        options.batch_size,
        kind.sample.__name__,
        ema=options.ema_decay is not None,
        plots=out / "plots" if options.plots else None,
        pool=pool,
        count=options.val_samples,
    )


@contextlib.contextmanager
def kind_of(checkout: str | Path | None) -> Iterator[Kind]:
    """Yield this recipe's planner, or that of an upstream checkout."""
    if checkout is None:
        yield OURS
        return
    with upstream_planner(checkout) as make:
        yield upstream_kind(make)


def start_planner(kind: Kind, dataset: CacheDataset, options: TrainOptions) -> torch.nn.Module:
    """Return a planner for the hidden states of a cache, with its initial weights."""
    width = dataset[0]["last_hidden_state"].shape[-1]
    planner = kind.make(options.size, options.sampler, state_width=width, seed=options.seed)
    if options.init is not None:
        weights = read_weights(options.init)
        try:
            planner.load_state_dict(weights)
        except RuntimeError as error:
            raise UsageError(
                f"init={str(options.init)!r} is of another planner than size={options.size!r},"
                f" sampler={options.sampler!r}: {error}"
            ) from error
    return planner


def train(
    cache: str | Path,
    out: str | Path,
    options: TrainOptions | None = None,
    *,
    logs: Sequence[str] | None = None,
    val_logs: Sequence[str] | None = None,
    checkout: str | Path | None = None,
) -> dict[str, float]:
    """Train a planner on a cache, or resume if started again with the same arguments.

    It writes OUT/states (to resume from), OUT/log.jsonl, OUT/planner.safetensors (the averaged
    weights, or the weights if there is no average) and, if asked for, OUT/plots.

    Args:
        cache: Cache of either layout.
        out: Folder of the run.
        options: Settings of training.
        logs: Drives to train on; by default all that are not for validation.
        val_logs: Drives to validate on; by default those of training, which shows only how well the
            planner fits them.
        checkout: Upstream checkout, to train its own planner.

    Returns:
        The last validation.

    Raises:
        UsageError: An argument does not fit.
        CheckpointError: The cache or a saved state is damaged.
    """
    initialize()
    options = options or TrainOptions()
    out = Path(out)
    if options.mesh is None:
        hosts.check_covers("no mesh", 1, "--mesh fsdp=-1, which is over the devices of all")
    if checkout is not None and options.sampler == "ddpm":
        raise UsageError(
            "sampler='ddpm' does not train with upstream's planner: its loss reads"
            " ddpm_num_train_timesteps, which upstream sets for ddim only. What to do: take ddim,"
            " whose loss is the same, or leave the checkout out"
        )
    if options.plots:
        check_plots()
    dataset, validated = datasets(cache, logs, val_logs)
    hosts.check_same({"options": options, "samples": [dataset.names, validated.names]})
    with kind_of(checkout) as kind:
        planner = start_planner(kind, dataset, options)
        batches = _batches(dataset, kind, options)
        ported = port_planner(planner, kind, options)
        step = make_step(ported, kind.loss, options, len(batches))
        validation = make_validation(validated, kind, options, out)
        return run(step, batches, validation, options, out)


def run(
    step: Any, batches: Batches, validation: Validation, options: TrainOptions, out: Path
) -> dict[str, float]:
    """Take the steps of a run, or those that are left, and write the planner.

    Args:
        step: A `TrainStep`, or an object with its interface.
        batches: Input of the run.
        validation: Logged at intervals and after the last step; before the first step if asked for.
        options: Settings of steps and intervals.
        out: Folder of the run.

    Returns:
        The last validation.
    """
    log, first = JsonLines(out / "log.jsonl"), jax.process_index() == 0
    steps = len(batches) * options.epochs
    with Checkpoints(out / "states") as saved:
        state = step.init(options.seed)
        if options.validate_first and not saved.steps:
            found = validation(step, state)
            if first:
                log.start(0)
                log.write(0, {f"evaluate/{name}": value for name, value in found.items()})
                log.close()
            validation.last = None
        state = fit(
            step,
            batches,
            steps=steps if options.steps is None else min(steps, options.steps),
            state=state,
            checkpoints=saved,
            save_every=options.save_every,
            log_every=options.log_every,
            evaluate=validation,
            evaluate_every=options.evaluate_every,
            sinks=[log],
            progress=options.progress,
        )
    found = validation.last or validation(step, state)  # None if the run had already ended
    ported = hosts.gather(step.load_state(state, ema=options.ema_decay is not None))
    if first:
        tpuport.save_checkpoint(out / "planner.safetensors", ported)
    return found


def _batches(dataset: CacheDataset, kind: Kind, options: TrainOptions) -> Batches:
    """Return the input.

    A set smaller than a batch is one batch, and the last batch is padded.
    """
    if not kind.masks and len(dataset) < options.batch_size:
        raise UsageError(
            f"batch_size={options.batch_size} and {len(dataset)} samples: upstream's loss counts"
            " every row, so no batch is filled up. What to do: a smaller batch_size"
        )
    return Batches(
        dataset,
        batch_size=options.batch_size,
        shuffle=True,
        seed=options.seed,
        collate=collate if jax.process_count() == 1 else collate_alike(dataset),
        last="pad" if kind.masks else "drop",
        workers=options.workers,
    )
