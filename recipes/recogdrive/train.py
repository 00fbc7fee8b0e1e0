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
from recipes.recogdrive import hosts
from recipes.recogdrive.diffusion import Sampler
from recipes.recogdrive.kinds import OURS, Kind, upstream_kind
from recipes.recogdrive.layouts import CacheDataset, collate, collate_alike, datasets
from recipes.recogdrive.plots import check_plots
from recipes.recogdrive.rewards import RewardPool
from recipes.recogdrive.upstream import upstream_planner
from recipes.recogdrive.validation import Validation
from recipes.recogdrive.weights import read_weights
from tpuport.errors import UsageError
from tpuport.model.ported import PortedModel
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
    """How a planner is trained; the defaults are upstream's.

    Attributes:
        size: "tiny", "small" or "large".
        sampler: "ddim", "ddpm" or "flow".
        init: weights to begin with.
        epochs: of training, and of the schedule of the learning rate.
        steps: how many at most.
        batch_size: of all devices together; upstream has 16 on each of 32.
        lr: the highest learning rate, by epochs: up for `warmup_epochs`, and down to `min_lr` along
            a cosine.
        min_lr: the last one.
        warmup_epochs: how long it rises.
        clip_norm: the largest norm of all gradients together.
        ema_decay: of the averages that are evaluated and exported; None for none.
        accumulate: parts that a batch is cut into.
        precision: "bf16" computes in bfloat16 and keeps weights in float32.
        mesh: sizes by axis, to spread the training over devices; None for one device.
        rules: how parameters lie on the mesh.
        workers: processes that read the cache.
        seed: of weights, order and noise.
        save_every: steps between states on disk.
        evaluate_every: steps between evaluations.
        val_samples: how many samples an evaluation is over, evenly spaced; None for all.
        validate_first: evaluate before the first step, too.
        log_every: steps between lines of the log.
        plots: draw some trajectories at each evaluation.
        progress: show it.
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
    """Upstream's learning rate by step: the same during an epoch, up and then along a cosine."""

    def schedule(step: Any) -> jax.Array:
        epoch = jnp.floor_divide(step, steps_per_epoch)
        rising = lr * (epoch + 1) / max(warmup_epochs, 1)
        share = (epoch - warmup_epochs) / max(epochs - warmup_epochs, 1)
        falling = min_lr + 0.5 * (lr - min_lr) * (1 + jnp.cos(math.pi * share))
        return jnp.where(epoch < warmup_epochs, rising, falling)

    return schedule


def make_optimizer(options: TrainOptions, steps_per_epoch: int) -> optax.GradientTransformation:
    """Upstream's AdamW and schedule. Clipping is the step's."""
    rate = warmup_cosine(
        options.lr, options.min_lr, options.warmup_epochs, options.epochs, steps_per_epoch
    )
    b1, b2 = BETAS
    return optax.adamw(rate, b1=b1, b2=b2, weight_decay=WEIGHT_DECAY)


def port_planner(
    planner: torch.nn.Module, kind: Kind, options: TrainOptions, also: tuple[Any, ...] = ()
) -> PortedModel:
    """The planner as a ported model, on the mesh if there is one.

    Args:
        planner: on the CPU.
        kind: of planner.
        options: precision and mesh.
        also: functions to port besides sampling.
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
    """A step of training a planner.

    Args:
        ported: the planner.
        loss: of it and a batch.
        options: how.
        steps_per_epoch: for the learning rate.
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
    """The validation of a run in the folder `out`, with rewards if there is a pool."""
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
    """This recipe's planner, or that of an upstream checkout."""
    if checkout is None:
        yield OURS
        return
    with upstream_planner(checkout) as make:
        yield upstream_kind(make)


def start_planner(kind: Kind, dataset: CacheDataset, options: TrainOptions) -> torch.nn.Module:
    """A planner for the hidden states of a cache, with the weights to begin with."""
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
    """Train a planner on a cache; started again with the same arguments, it goes on.

    Writes OUT/states (to go on from), OUT/log.jsonl, OUT/planner.safetensors (the averages, or the
    weights without them) and, if asked for, OUT/plots.

    Args:
        cache: of either layout.
        out: the run's folder.
        options: how.
        logs: drives to train on; by default all, or all that are not for validation.
        val_logs: drives to validate on; by default those of training, which shows how well the
            planner fits them and no more.
        checkout: an upstream checkout, whose own planner is trained then.

    Returns:
        The last validation.

    Raises:
        UsageError: an argument does not fit.
        CheckpointError: the cache or a state on disk is damaged.
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
    """Take the steps of a run, or those that are left of it, and write the planner.

    Args:
        step: a `TrainStep`, or what has its face.
        batches: its input.
        validation: logged now and then and after the last step; before the first if asked for.
        options: how many steps, what is saved when.
        out: the run's folder.

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
    found = validation.last or validation(step, state)  # none, if the run had ended before
    ported = hosts.gather(step.put(state, ema=options.ema_decay is not None))
    if first:
        tpuport.save_checkpoint(out / "planner.safetensors", ported)
    return found


def _batches(dataset: CacheDataset, kind: Kind, options: TrainOptions) -> Batches:
    """The input: of a set smaller than a batch all samples, the last batch filled up."""
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
