"""Fine-tuning of a policy on demonstrations, of all weights or with LoRA."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import optax

import tpuport
from recipes.openpi.dataset import Demonstrations, LeRobot, Samples
from recipes.openpi.inputs import Preparation
from recipes.openpi.lora import add_lora, merge_lora
from recipes.openpi.model import Pi0, augmented_loss, policy_loss
from recipes.openpi.robots import Robot, robot_of
from recipes.openpi.statistics import Stats, read_stats, write_stats
from recipes.openpi.tokens import NAME, read_prompts
from recipes.openpi.weights import WEIGHTS, read_weights, write_weights
from recipes.records import check_run, digest_of
from tpuport.model.ported_model import PortedModel
from tpuport.training import Batches, Checkpoints, JsonLines, TrainStep, fit, make_train_step


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions:
    """The settings of fine-tuning. The defaults are openpi's.

    Attributes:
        robot: Whose observations the dataset has.
        lora: Whether to train low-rank changes of both transformers instead of their weights.
        steps: Number of steps.
        batch_size: Samples per step, over all devices.
        lr: Highest learning rate.
        min_lr: Final learning rate.
        warmup_steps: Steps in which the rate rises; at most half of all.
        clip_norm: Largest global norm of the gradients.
        ema_decay: Decay of the averaged weights that are exported; None for no average, as with
            LoRA.
        augment: Whether to change images at random.
        precision: "bf16" computes in bfloat16 and keeps weights in float32.
        mesh: Sizes by mesh axis, to shard the training over devices; None for one device.
        workers: Processes that read the dataset.
        seed: Random seed of data order, noise and changes of images.
        save_every: Steps between checkpoints.
        log_every: Steps between lines of the log.
        progress: Whether to show progress.
    """

    robot: str = "libero"
    lora: bool = False
    steps: int = 30_000
    batch_size: int = 32
    lr: float = 2.5e-5
    min_lr: float = 2.5e-6
    warmup_steps: int = 1000
    clip_norm: float = 1.0
    ema_decay: float | None = 0.99
    augment: bool = True
    precision: str = "float32"
    mesh: Mapping[str, int] | None = None
    workers: int = 0
    seed: int = 0
    save_every: int = 1000
    log_every: int = 100
    progress: bool = True


def make_optimizer(options: FinetuneOptions) -> optax.GradientTransformation:
    """Return openpi's AdamW with its warmup and cosine decay; the step clips gradients."""
    warmup = min(options.warmup_steps, options.steps // 2)
    rate = optax.warmup_cosine_decay_schedule(
        options.lr / (warmup + 1), options.lr, warmup, options.steps, options.min_lr
    )
    return optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=1e-10)


def port_policy(policy: Pi0, options: FinetuneOptions) -> PortedModel:
    """Port a policy for training, cast and sharded as the options say."""
    ported = tpuport.convert(policy, verify=False)
    if options.precision == "bf16":
        tpuport.cast(ported, "bf16_master")
    if options.mesh is not None:
        tpuport.shard(ported, options.mesh, "fsdp")
    return ported


def make_step(ported: PortedModel, options: FinetuneOptions) -> TrainStep:
    """Return the training step of a policy."""
    return make_train_step(
        ported,
        augmented_loss if options.augment else policy_loss,
        make_optimizer(options),
        clip_norm=options.clip_norm,
        ema_decay=None if options.lora else options.ema_decay,
    )


def finetune(data: Path, policy: Path, out: Path, options: FinetuneOptions) -> Path:
    """Train a policy on a dataset, or resume if started again with the same arguments.

    It writes OUT/states (to resume from), OUT/log.jsonl, and OUT/policy: weights in openpi's names,
    sizes, tokenizer and norm stats.

    Args:
        data: A LeRobot dataset.
        policy: Folder of the policy to begin with.
        out: Folder of the run.
        options: Settings of training.

    Raises:
        UsageError: An argument does not fit, or the run was begun otherwise.
        CheckpointError: A file is damaged.
    """
    model = read_weights(policy).float()
    found = Demonstrations(LeRobot(data), robot_of(options.robot), model.config.action_horizon)
    _check_begun(data, policy, out, options)
    stats = _stats_of(found, out)
    preparation = Preparation(model.config, found.robot, stats, read_prompts(policy, model.config))
    batches = Batches(
        Samples(found, preparation),
        batch_size=options.batch_size,
        shuffle=True,
        seed=options.seed,
        last="drop",
        workers=options.workers,
    )
    if options.lora:
        add_lora(model, options.seed)
    step = make_step(port_policy(model.train(), options), options)
    with Checkpoints(out / "states") as saved:
        state = fit(
            step,
            batches,
            steps=options.steps,
            state=step.init(options.seed),
            checkpoints=saved,
            save_every=options.save_every,
            log_every=options.log_every,
            sinks=[JsonLines(out / "log.jsonl")],
            progress=options.progress,
        )
    average = options.ema_decay is not None and not options.lora
    trained: Any = step.load_state(state, ema=average).to_torch()
    return export(merge_lora(trained), found.robot, stats, policy / NAME, out / "policy")


def export(policy: Pi0, robot: Robot, stats: Stats, tokenizer: Path, folder: Path) -> Path:
    """Write a policy with all that serving reads, and return its folder."""
    write_weights(folder, policy)
    write_stats(folder / "assets" / robot.name, stats)
    shutil.copyfile(tokenizer, folder / NAME)
    return folder


def _check_begun(data: Path, policy: Path, out: Path, options: FinetuneOptions) -> None:
    shown = {name: value for name, value in asdict(options).items() if name not in _FREE}
    check_run(
        out / "run.json",
        {
            **shown,
            "data": digest_of([data / "meta" / "info.json", data / "meta" / "episodes.jsonl"]),
            "policy": digest_of([policy / WEIGHTS, policy / NAME]),
        },
        "give the data and options that the run was begun with, or another --out",
    )


# What may differ when a run is resumed.
_FREE = ("workers", "save_every", "log_every", "progress", "mesh")


def _stats_of(found: Demonstrations, out: Path) -> Stats:
    """Return the statistics of the dataset, computed once for a run."""
    folder = out / "stats"
    if not (folder / "norm_stats.json").is_file():
        write_stats(folder, found.stats())
    return read_stats(folder)
