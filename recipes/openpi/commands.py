"""The commands that make data and policies.

Each imports its framework only when it runs, so that help is fast.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from recipes.command_line import Precision, mesh_sizes
from tpuport.cli._common import errors_as_exit_codes


class Size(StrEnum):
    """The size of a policy."""

    TINY_PI0 = "tiny-pi0"
    TINY_PI05 = "tiny-pi05"
    PI0 = "pi0"
    PI05 = "pi05"


class RobotName(StrEnum):
    """The robots whose observations are known."""

    LIBERO = "libero"
    ALOHA = "aloha"
    ALOHA_SIM = "aloha_sim"


def make_data(
    out: Annotated[Path, typer.Argument(help="Folder to write the dataset to.")],
    episodes: Annotated[int, typer.Option(help="Number of demonstrations.")] = 8,
    frames: Annotated[int, typer.Option(help="Frames of each.")] = 20,
    seed: Annotated[int, typer.Option(help="Random seed of the scenes.")] = 0,
) -> None:
    """Write a small LeRobot dataset with drawn pictures and scripted demonstrations."""
    with errors_as_exit_codes("make-data"):
        from recipes.openpi.make_data import make_dataset

        count = make_dataset(out, episodes=episodes, frames=frames, seed=seed)
        typer.echo(f"{count} frames of {episodes} episodes in {out}")


def make_weights(
    out: Annotated[Path, typer.Argument(help="Folder to write the policy to.")],
    size: Annotated[Size, typer.Option(help="Size of the policy.")] = Size.TINY_PI0,
    data: Annotated[
        Path | None, typer.Option(help="Dataset for the norm stats [default: unit].")
    ] = None,
    robot: Annotated[RobotName, typer.Option(help="Robot of the dataset.")] = RobotName.LIBERO,
    seed: Annotated[int, typer.Option(help="Random seed of the weights.")] = 0,
) -> None:
    """Write a policy with random weights, under the names of openpi's files."""
    with errors_as_exit_codes("make-weights"):
        from recipes.openpi.make_weights import make_folder

        count = make_folder(out, size.value, data=data, robot=robot.value, seed=seed)
        typer.echo(f"{count:,} parameters in {out}")


def finetune(
    data: Annotated[Path, typer.Argument(help="LeRobot dataset.")],
    policy: Annotated[Path, typer.Option(help="Folder of the policy to begin with.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder of the run; resumed if it was begun.")
    ],
    robot: Annotated[RobotName, typer.Option(help="Robot of the dataset.")] = RobotName.LIBERO,
    lora: Annotated[bool, typer.Option("--lora", help="Train low-rank changes.")] = False,
    steps: Annotated[int, typer.Option(help="Number of steps.")] = 30_000,
    batch_size: Annotated[int, typer.Option(help="Samples per step, over all devices.")] = 32,
    lr: Annotated[float, typer.Option("--lr", help="Highest learning rate.")] = 2.5e-5,
    min_lr: Annotated[float, typer.Option(help="Final learning rate.")] = 2.5e-6,
    warmup_steps: Annotated[int, typer.Option(help="Steps in which the rate rises.")] = 1000,
    ema: Annotated[float, typer.Option(help="Decay of the averaged weights; 0 for none.")] = 0.99,
    augment: Annotated[bool, typer.Option(help="Change images at random.")] = True,
    precision: Annotated[
        Precision, typer.Option(help="Precision of the computation.")
    ] = Precision.FLOAT32,
    mesh: Annotated[
        str | None, typer.Option(metavar="AXES", help="Devices by axis, such as fsdp=8.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that read the dataset.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 1000,
    log_every: Annotated[int, typer.Option(help="Steps between lines of the log.")] = 100,
    seed: Annotated[int, typer.Option(help="Random seed of data order and noise.")] = 0,
) -> None:
    """Fine-tune a policy on demonstrations, all weights or with LoRA."""
    with errors_as_exit_codes("finetune"):
        from recipes.openpi import finetune as stage

        options = stage.FinetuneOptions(
            robot=robot.value,
            lora=lora,
            steps=steps,
            batch_size=batch_size,
            lr=lr,
            min_lr=min_lr,
            warmup_steps=warmup_steps,
            ema_decay=ema or None,
            augment=augment,
            precision=precision.value,
            mesh=mesh_sizes(mesh),
            workers=workers,
            save_every=save_every,
            log_every=log_every,
            seed=seed,
        )
        typer.echo(f"the policy is in {stage.finetune(data, policy, out, options)}")
