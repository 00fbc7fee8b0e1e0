"""The commands of the planner; those of the chat model are in `finetune` and `cache`.

Each imports its framework only when it runs, so that help is fast.
"""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from recipes.command_line import Precision, mesh_sizes
from tpuport.cli._common import errors_as_exit_codes


class Layout(StrEnum):
    """The layout of a cache on disk."""

    UPSTREAM = "upstream"
    SAFETENSORS = "safetensors"


class PlannerSize(StrEnum):
    """The size of a planner."""

    TINY = "tiny"
    SMALL = "small"
    LARGE = "large"


class Method(StrEnum):
    """The method by which trajectories are sampled."""

    DDIM = "ddim"
    DDPM = "ddpm"
    FLOW = "flow"


class Stage(StrEnum):
    """The programs of the chat model and of the planner."""

    FINETUNE = "finetune"
    CACHE = "cache"
    TRAIN = "train"
    SAMPLE = "sample"
    CHAINS = "chains"
    GRPO = "grpo"


class Reward(StrEnum):
    """The reward of a trajectory."""

    SIMPLE = "simple"
    PDM = "pdm"


Cache = Annotated[Path, typer.Argument(help="Cache of hidden states, in either layout.")]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder of the run; resumed if it was begun.")
]
Checkpoint = Annotated[Path, typer.Option(help="Planner of `train`, or a checkpoint of upstream.")]
Upstream = Annotated[
    Path | None, typer.Option(help="Checkout of recogdrive, to use its own planner.")
]
Logs = Annotated[list[str] | None, typer.Option("--log", help="Drive to use; repeatable.")]
ValLogs = Annotated[
    list[str] | None, typer.Option("--val-log", help="Drive to validate on; repeatable.")
]
ValSamples = Annotated[int, typer.Option(help="Samples per validation, evenly spaced; 0 for all.")]
ValidateFirst = Annotated[
    bool, typer.Option("--validate-first", help="Also validate before the first step.")
]
BatchSize = Annotated[int, typer.Option(help="Samples per step, over all devices.")]
Lr = Annotated[float, typer.Option("--lr", help="Highest learning rate.")]
MinLr = Annotated[float, typer.Option(help="Final learning rate.")]
Warmup = Annotated[int, typer.Option(help="Epochs of learning rate warmup.")]
Ema = Annotated[float, typer.Option(help="Decay of the averaged weights; 0 for no average.")]
Mesh = Annotated[str | None, typer.Option(metavar="AXES", help="Devices by axis, such as fsdp=8.")]
Plots = Annotated[bool, typer.Option("--plots", help="Draw trajectories at each evaluation.")]
Workers = Annotated[int, typer.Option(help="Processes that read the cache.")]


def make_data(
    out: Annotated[Path, typer.Argument(help="Folder to write the cache to.")],
    count: Annotated[int, typer.Option(help="Number of samples.")] = 32,
    tokens: Annotated[int, typer.Option(help="Tokens per sample; real caches have 2800.")] = 16,
    width: Annotated[int, typer.Option(help="Width of the states; real: 1536 or 3584.")] = 64,
    layout: Annotated[Layout, typer.Option(help="Layout of the cache on disk.")] = Layout.UPSTREAM,
    seed: Annotated[int, typer.Option(help="Random seed of all data.")] = 0,
    chats: Annotated[
        Path | None, typer.Option(help="Folder for conversations, scenes and a tiny chat model.")
    ] = None,
) -> None:
    """Write a small cache of hidden states whose trajectories can be learned."""
    with errors_as_exit_codes("make-data"):
        if chats is not None:
            from recipes.recogdrive.make_chats import make_chats

            typer.echo(f"conversations, scenes and a chat model in {make_chats(chats, seed=seed)}")
        from recipes.recogdrive.make_data import make_cache

        made = make_cache(
            out, count=count, tokens=tokens, width=width, layout=layout.value, seed=seed
        )
        typer.echo(f"{len(made)} samples in {out}, {layout} layout")


def train(
    cache: Cache,
    out: Out,
    size: Annotated[PlannerSize, typer.Option(help="Planner size.")] = PlannerSize.SMALL,
    sampling_method: Annotated[Method, typer.Option(help="Sampling method.")] = Method.DDIM,
    init: Annotated[Path | None, typer.Option(help="Initial weights.")] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of training and of its schedule.")] = 200,
    steps: Annotated[int | None, typer.Option(help="Maximum number of steps.")] = None,
    batch_size: BatchSize = 16,
    lr: Lr = 1e-4,
    min_lr: MinLr = 1e-6,
    warmup_epochs: Warmup = 3,
    ema: Ema = 0.999,
    accumulate: Annotated[int, typer.Option(help="Microbatches per step.")] = 1,
    precision: Annotated[
        Precision, typer.Option(help="Precision of the computation.")
    ] = Precision.FLOAT32,
    mesh: Mesh = None,
    logs: Logs = None,
    val_logs: ValLogs = None,
    val_samples: ValSamples = 256,
    validate_first: ValidateFirst = False,
    workers: Workers = 0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 500,
    evaluate_every: Annotated[int, typer.Option(help="Steps between validations.")] = 500,
    log_every: Annotated[int, typer.Option(help="Steps between lines of the log.")] = 10,
    seed: Annotated[int, typer.Option(help="Random seed of weights, data order and noise.")] = 0,
    plots: Plots = False,
    upstream: Upstream = None,
) -> None:
    """Train the planner on the drives of a cache (stage 2)."""
    with errors_as_exit_codes("train"):
        from recipes.recogdrive import train as stage

        options = stage.TrainOptions(
            size=size.value,
            sampler=sampling_method.value,
            init=init,
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            lr=lr,
            min_lr=min_lr,
            warmup_epochs=warmup_epochs,
            ema_decay=ema or None,
            accumulate=accumulate,
            precision=precision.value,
            mesh=mesh_sizes(mesh),
            workers=workers,
            save_every=save_every,
            evaluate_every=evaluate_every,
            val_samples=val_samples or None,
            validate_first=validate_first,
            log_every=log_every,
            seed=seed,
            plots=plots,
        )
        found = stage.train(cache, out, options, logs=logs, val_logs=val_logs, checkout=upstream)
        _echo(found, out / "planner.safetensors")


def grpo(
    cache: Cache,
    out: Out,
    checkpoint: Checkpoint,
    reward: Annotated[Reward, typer.Option(help="Reward of a trajectory.")] = Reward.SIMPLE,
    metric_cache: Annotated[
        Path | None, typer.Option(help="Metric cache of navsim, for pdm.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Trajectories per scene.")] = 8,
    bc: Annotated[float, typer.Option(help="Weight of behaviour cloning.")] = 0.1,
    gamma: Annotated[float, typer.Option(help="Discount per sampling step.")] = 0.6,
    epochs: Annotated[int, typer.Option(help="Epochs of training and of its schedule.")] = 10,
    steps: Annotated[int | None, typer.Option(help="Maximum number of steps.")] = None,
    batch_size: BatchSize = 8,
    lr: Lr = 1e-4,
    accumulate: Annotated[int, typer.Option(help="Microbatches per step.")] = 1,
    mesh: Mesh = None,
    logs: Logs = None,
    val_logs: ValLogs = None,
    val_samples: ValSamples = 256,
    validate_first: ValidateFirst = False,
    workers: Workers = 0,
    reward_workers: Annotated[
        int | None, typer.Option(help="Processes that compute rewards.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    evaluate_every: Annotated[int, typer.Option(help="Steps between validations.")] = 100,
    log_every: Annotated[int, typer.Option(help="Steps between lines of the log.")] = 10,
    seed: Annotated[int, typer.Option(help="Random seed of data order and noise.")] = 0,
    plots: Plots = False,
    upstream: Upstream = None,
) -> None:
    """Reinforce the planner by rewards of its own trajectories (stage 3)."""
    with errors_as_exit_codes("grpo"):
        from recipes.recogdrive import grpo as stage

        training = replace(
            stage.GrpoOptions().train,
            epochs=epochs,
            steps=steps,
            batch_size=batch_size,
            lr=lr,
            accumulate=accumulate,
            mesh=mesh_sizes(mesh),
            workers=workers,
            save_every=save_every,
            evaluate_every=evaluate_every,
            val_samples=val_samples or None,
            validate_first=validate_first,
            log_every=log_every,
            seed=seed,
            plots=plots,
        )
        options = stage.GrpoOptions(
            train=training, samples=samples, gamma=gamma, bc=bc, workers=reward_workers
        )
        scored: dict[str, Any] = {"reward": reward.value, "metric_cache": metric_cache}
        drives: dict[str, Any] = {"logs": logs, "val_logs": val_logs}
        found = stage.grpo(cache, checkpoint, out, options, **scored, **drives, checkout=upstream)
        _echo(found, out / "planner.safetensors")


def sample(
    cache: Cache,
    out: Annotated[Path, typer.Option("--out", "-o", help="Name of the .json file to write.")],
    checkpoint: Checkpoint,
    batch_size: BatchSize = 16,
    logs: Logs = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of the first scenes to write.")] = None,
    verify: Annotated[bool, typer.Option(help="Compare with eager PyTorch.")] = True,
    upstream: Upstream = None,
) -> None:
    """Sample a trajectory for each scene of a cache."""
    with errors_as_exit_codes("sample"):
        from recipes.recogdrive import sample as stage

        found = stage.sample(
            cache,
            checkpoint,
            out,
            batch_size=batch_size,
            logs=logs,
            plot=plot,
            checkout=upstream,
            verify=verify,
        )
        _echo(found, out)


def compile_(
    stages: Annotated[list[Stage] | None, typer.Argument(help="Programs [default: all].")] = None,
    size: Annotated[PlannerSize, typer.Option(help="Planner size.")] = PlannerSize.SMALL,
    topology: Annotated[str, typer.Option("--topology", "-t", help="TPU slice.")] = "v6e-4",
    batch: Annotated[
        int | None,
        typer.Option(
            help="Rows (finetune) or scenes, over all chips"
            " [default: a row or 8 scenes (cache) per chip, else 64 scenes]."
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick/--full", help="Let libtpu optimise less or fully."),
    ] = True,
) -> None:
    """Compile the programs of all stages from shapes alone, for a TPU that need not be attached."""
    with errors_as_exit_codes("compile"):
        from recipes.recogdrive.compile import compile_stage

        for stage in stages or list(Stage):
            typer.echo(str(compile_stage(stage.value, size.value, topology, batch, quick=quick)))


def _echo(found: dict[str, Any], path: Path) -> None:
    numbers = "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in found.items()
    )
    typer.echo(f"{path}: {numbers}")
