"""The commands. Each imports its framework only when it runs, so that help is fast."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuport.cli._common import errors_as_exit_codes

if TYPE_CHECKING:
    from recipes.openpilot.train import TrainOptions


class Labels(StrEnum):
    """The source of labels."""

    MODEL = "modelV2"
    POSE = "pose"


class Sampling(StrEnum):
    """The way a device samples its cameras."""

    BILINEAR = "bilinear"
    NEAREST = "nearest"


class Generation(StrEnum):
    """Releases whose model contracts differ."""

    V097 = "0.9.7"
    V099 = "0.9.9"
    V0100 = "0.10.0"
    V0103 = "0.10.3"
    JULY_2026 = "2026-07"
    SEPTEMBER_2026 = "2026-09"


class SizeName(StrEnum):
    """The size of a model with random weights, or the one with trained ones."""

    SMALL = "small"
    PRETRAINED = "pretrained"
    REAL = "real"
    LARGE = "large"


class Program(StrEnum):
    """The program to compile."""

    WARP = "warp"
    DRIVE = "drive"
    TRAIN = "train"


Model = Annotated[
    list[Path], typer.Argument(help="ONNX files of the model: one, or vision and policy.")
]
Data = Annotated[Path, typer.Option("--data", "-d", help="Folder of a training set.")]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder to write to; resumed if it was begun.")
]

Layers = Annotated[
    list[str] | None, typer.Option("--layer", help="Pattern of layers with adapters; repeatable.")
]
Rank = Annotated[int, typer.Option(help="Rank of the adapters.")]
Losses = Annotated[
    list[str] | None,
    typer.Option("--loss", help="Loss as name=weight; repeatable [default: path=1, plan=0.1]."),
]
BatchSize = Annotated[int, typer.Option(help="Windows per step, over all devices.")]
Warmup = Annotated[int, typer.Option(help="Frames before those in the loss; 100 fill every queue.")]
Length = Annotated[int, typer.Option(help="Frames in the loss.")]
Truncate = Annotated[
    int | None, typer.Option(help="Stop gradients after so many frames [default: never].")
]
SeeOnce = Annotated[
    bool,
    typer.Option(
        "--see-once/--see-always",
        help="Compute the frozen layers' outputs for the cameras once before the first step, or"
        " in each step.",
    ),
]


def make_data(
    out: Annotated[
        Path, typer.Argument(help="Folder to write routes/train, routes/held_out and model to.")
    ],
    generation: Annotated[
        Generation, typer.Option(help="Generation of the model.")
    ] = Generation.JULY_2026,
    routes: Annotated[int, typer.Option(help="Routes to train on; one more is held out.")] = 3,
    segments: Annotated[int, typer.Option(help="Segments per route.")] = 2,
    seconds: Annotated[float, typer.Option(help="Seconds per segment; a device has 60.")] = 8.0,
    size: Annotated[
        SizeName,
        typer.Option(
            help="Model size; large is July 2026's. pretrained is small, and follows lanes."
        ),
    ] = SizeName.SMALL,
    lane_width: Annotated[float, typer.Option(help="Width of the lanes in m.")] = 3.5,
    camera_height: Annotated[
        float, typer.Option(help="Height of the cameras above the road in m.")
    ] = 1.22,
    opset: Annotated[int, typer.Option(help="ONNX opset of the model, 18 to 21.")] = 20,
    fp16: Annotated[
        bool, typer.Option("--fp16", help="Store the model's weights in float16.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Random seed of roads and weights.")] = 0,
) -> None:
    """Write small routes in the real formats, and a model with the real contract."""
    with errors_as_exit_codes("make-data"):
        from recipes.openpilot.make_data import RouteOptions
        from recipes.openpilot.make_data import make_data as make
        from recipes.openpilot.make_model import make_model
        from recipes.progress import steps_bar

        options = RouteOptions(
            segments=segments, seconds=seconds, lane=lane_width, height=camera_height
        )
        count, made = (routes + 1) * segments, 0
        with steps_bar("segments", count) as on_step:

            def on_segment(path: Path) -> None:
                nonlocal made
                made += 1
                on_step(made, count)
                on_step.say(str(path))

            make(out / "routes", train=routes, options=options, seed=seed, on_segment=on_segment)
        how = {"seed": seed, "opset": opset, "fp16": fp16, "size": size.value}
        for path in make_model(out / "model", generation.value, **how):
            typer.echo(str(path))


def pretrain(
    out: Annotated[Path, typer.Argument(help="File to write, which ends in .safetensors.")],
    steps: Annotated[int, typer.Option(help="Training steps.")] = 1400,
    drives: Annotated[int, typer.Option(help="Drives to draw, each seen in a mirror, too.")] = 2000,
    batch_size: Annotated[int, typer.Option(help="Drives per step.")] = 8,
    learning_rate: Annotated[
        float, typer.Option(help="Learning rate, which decays to 0.")
    ] = 2.5e-3,
    seed: Annotated[int, typer.Option(help="Random seed of weights and roads.")] = 0,
) -> None:
    """Train the weights of `make-data --size pretrained` from scratch, on drawn roads."""
    with errors_as_exit_codes("pretrain"):
        from recipes.openpilot.pretrain import PretrainOptions
        from recipes.openpilot.pretrain import pretrain as run

        run(out, PretrainOptions(steps, drives, batch_size, learning_rate, seed))
        typer.echo(str(out))


def prepare(
    routes: Annotated[Path, typer.Argument(help="Folder with segments, at any depth.")],
    out: Out,
    labels: Annotated[
        Labels, typer.Option(help="What the model that drove said, or the path driven.")
    ] = (Labels.MODEL),
    sampling: Annotated[
        Sampling, typer.Option(help="As on the model's device.")
    ] = Sampling.BILINEAR,
    keep_private: Annotated[
        bool, typer.Option("--keep-private", help="Keep VIN, dongle id and GPS.")
    ] = False,
) -> None:
    """Convert logs and videos to a training set, and report per segment what cannot be used."""
    with errors_as_exit_codes("prepare"):
        from recipes.openpilot.prepare import PrepareOptions
        from recipes.openpilot.progress import prepare_and_show

        options = PrepareOptions(labels.value, sampling.value, keep_private=keep_private)
        prepare_and_show(routes, out, options)


def label(
    model: Model,
    data: Data,
    out: Out,
    host: Annotated[
        bool, typer.Option("--host", help="Run the teacher by onnxruntime, on the host.")
    ] = False,
) -> None:
    """Write a teacher's outputs for each frame."""
    with errors_as_exit_codes("label"):
        from recipes.openpilot.shards import find_shards
        from recipes.openpilot.teacher import label as write

        def done(shard: Path, frames: int) -> None:
            typer.echo(f"{shard.name}: {frames} frames")

        write(model, find_shards(data), out, host=host, done=done)


def train(
    model: Model,
    data: Data,
    out: Out,
    teacher: Annotated[Path | None, typer.Option(help="Folder that `label` wrote.")] = None,
    layer: Layers = None,
    rank: Rank = 16,
    loss: Losses = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 200,
    batch_size: BatchSize = 8,
    warmup: Warmup = 100,
    length: Length = 20,
    truncate: Truncate = None,
    see_once: SeeOnce = True,
    devices: Annotated[int, typer.Option(help="Number of devices; -1 for all.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Learning rate, which decays to 0.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Random seed of adapters and data order.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
) -> None:
    """Fine-tune by DoRA over windows of drives."""
    with errors_as_exit_codes("train"):
        from recipes.openpilot.runs import Run

        options = _train_options(
            layer,
            rank,
            loss,
            warmup=warmup,
            length=length,
            truncate=truncate,
            steps=steps,
            batch_size=batch_size,
            devices=devices,
            learning_rate=learning_rate,
            see_once=see_once,
            seed=seed,
            save_every=save_every,
        )
        run = Run(
            tuple(map(str, model)), str(data), None if teacher is None else str(teacher), options
        )
        run.begin(out)
        typer.echo(f"{steps} steps in {out}")


def export(
    run: Annotated[Path, typer.Argument(help="Folder that `train` wrote.")],
    out: Out,
) -> None:
    """Export the trained model to files with the contract of the original ones."""
    with errors_as_exit_codes("export"):
        from recipes.openpilot.runs import export_run

        for report in export_run(run, out):
            typer.echo(
                f"{report.path}: {len(report.changed)} weights changed; onnxruntime and the trained"
                f" module differ by {report.largest_difference:.1e} of {report.tolerance:.0e}"
            )


def evaluate(
    model: Model,
    data: Data,
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", help="File of a base model to compare with; repeatable."),
    ] = None,
    warmup: Annotated[int, typer.Option(help="Frames at a segment's start to leave out.")] = 0,
    film: Annotated[
        Path | None, typer.Option(help="File (.mp4 or .png) for both models' paths, side by side.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="File to plot path errors by horizon to.")
    ] = None,
) -> None:
    """Measure errors of paths, lanes and leads on a training set, and draw pictures of them."""
    with errors_as_exit_codes("evaluate"):
        from recipes.openpilot.evaluate import plot_path_errors, table
        from recipes.openpilot.scoring import evaluate_models
        from recipes.openpilot.shards import find_shards

        models = {"base": against} if against else {}
        models["model"] = model
        found = evaluate_models(models, find_shards(data), warmup=warmup, film=film)
        typer.echo(table(found))
        if plot is not None:
            plot_path_errors(plot, found)


def compile_(
    model: Annotated[
        list[Path] | None,
        typer.Argument(help="ONNX files of the model [default: random weights]."),
    ] = None,
    program: Annotated[
        list[Program] | None, typer.Option(help="Program; repeatable [default: all].")
    ] = None,
    topology: Annotated[str, typer.Option("--topology", "-t", help="TPU slice.")] = "v6e-1",
    generation: Annotated[
        Generation, typer.Option(help="Generation, without model files.")
    ] = Generation.JULY_2026,
    size: Annotated[
        SizeName, typer.Option(help="Size, without model files; real is 0.10's, large July 2026's.")
    ] = SizeName.LARGE,
    frames: Annotated[int, typer.Option(help="Frames per drive (drive) or per chip (warp).")] = (
        64
    ),
    layer: Layers = None,
    rank: Rank = 16,
    loss: Losses = None,
    batch_size: BatchSize = 8,
    warmup: Warmup = 100,
    length: Length = 20,
    truncate: Truncate = None,
    see_once: SeeOnce = True,
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Let libtpu optimise less or fully.")
    ] = True,
) -> None:
    """Compile the programs from shapes alone, for a TPU that need not be attached."""
    with errors_as_exit_codes("compile"):
        from recipes.openpilot.compile import compile_program, files_of

        options = _train_options(
            layer,
            rank,
            loss,
            warmup=warmup,
            length=length,
            truncate=truncate,
            batch_size=batch_size,
            see_once=see_once,
        )
        with files_of(model, generation.value, size.value) as files:
            for one in program or list(Program):
                found = compile_program(one.value, files, topology, options, frames, quick=quick)
                typer.echo(str(found))


def _train_options(
    layer: list[str] | None, rank: int, loss: list[str] | None, **rest: Any
) -> "TrainOptions":
    from recipes.openpilot.losses import LossWeights
    from recipes.openpilot.student import DoraOptions
    from recipes.openpilot.train import TrainOptions

    dora = DoraOptions(rank=rank, alpha=float(rank))
    if layer:
        dora = DoraOptions(tuple(layer), rank, float(rank))
    losses = LossWeights(**_weights(loss)) if loss else TrainOptions().losses
    return TrainOptions(dora, losses, **rest)


def _weights(given: list[str]) -> dict[str, float]:
    from dataclasses import fields

    from recipes.openpilot.losses import LossWeights
    from tpuport.foundation.errors import UsageError

    names = [field.name for field in fields(LossWeights)]
    # Losses that are not named are left out.
    found = dict.fromkeys(names, 0.0)
    for one in given:
        name, _, weight = one.partition("=")
        try:
            found[name] = float(weight) if name in names else float("nan")
        except ValueError:
            found[name] = float("nan")
        if found[name] != found[name]:
            raise UsageError(
                f"--loss {one}: expected name=number, with a name of {', '.join(names)}"
            )
    return found
