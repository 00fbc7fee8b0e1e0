"""The commands; what computes is imported when one runs, so that help needs no framework."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tpuport.commands._common import errors_as_exit_codes


class Task(StrEnum):
    """From a text, or from a text and the first frame."""

    T2V = "t2v"
    I2V = "i2v"


class Resolution(StrEnum):
    """Buckets of sizes."""

    P360 = "360p"
    P480 = "480p"
    P720 = "720p"
    P1080 = "1080p"


class Program(StrEnum):
    """What is compiled."""

    ENCODE = "encode"
    DENOISE = "denoise"
    DECODE = "decode"


class Spread(StrEnum):
    """How the denoiser lies over the devices."""

    SEQUENCE = "sequence"
    GUIDANCE = "guidance"
    TENSOR = "tensor"
    MIXED = "mixed"


class Precision(StrEnum):
    """What all models compute in."""

    BF16 = "bf16"
    FLOAT32 = "float32"


Model = Annotated[Path, typer.Argument(help="The model's folder, as diffusers publishes it.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="The run's folder; begun, it goes on.")]
Prompts = Annotated[list[str], typer.Option("--prompt", "-p", help="Repeatable: a video each.")]
TaskOption = Annotated[Task, typer.Option(help="Text or image to video.")]
Image = Annotated[Path | None, typer.Option(help="The first frame, for i2v.")]
Negative = Annotated[str, typer.Option("--negative-prompt", help="What to lead away from.")]
ResolutionOption = Annotated[Resolution, typer.Option(help="With --aspect the size.")]
Aspect = Annotated[str, typer.Option(help="width:height; of i2v the image's.")]
Height = Annotated[int | None, typer.Option(help="In pixels, in place of both.")]
Width = Annotated[int | None, typer.Option(help="Likewise.")]
Frames = Annotated[int, typer.Option(help="4n + 1; 24 a second.")]
Steps = Annotated[int, typer.Option(help="Of denoising; step-distilled models: 12.")]
Guidance = Annotated[float, typer.Option(help="1 for none, as distilled models want it.")]
Shift = Annotated[float | None, typer.Option(help="Of the noise [default: the scheduler's].")]
Seed = Annotated[int, typer.Option(help="Of the noise.")]
PrecisionOption = Annotated[Precision, typer.Option(help="What all models compute in.")]
SaveEvery = Annotated[int, typer.Option(help="Steps after which latents are saved.")]
SpreadOption = Annotated[
    Spread | None, typer.Option(help="How the denoiser lies over all devices [default: on one].")
]
Calls = Annotated[int, typer.Option(help="Of the network a step; 2 takes less memory.")]


def make_weights(
    out: Annotated[Path, typer.Argument(help="The folder of the model.")],
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Write a tiny model with random weights in the published layout."""
    with errors_as_exit_codes("make-weights"):
        from recipes.hunyuan_video.make_weights import make_weights as make

        typer.echo(f"a tiny model in {make(out, seed)}")


def encode(
    model: Model,
    out: Out,
    prompts: Prompts,
    task: TaskOption = Task.T2V,
    image: Image = None,
    negative_prompt: Negative = "",
    resolution: ResolutionOption = Resolution.P720,
    aspect: Aspect = "16:9",
    height: Height = None,
    width: Width = None,
    frames: Frames = 121,
    steps: Steps = 50,
    guidance: Guidance = 6.0,
    shift: Shift = None,
    seed: Seed = 0,
    precision: PrecisionOption = Precision.BF16,
) -> None:
    """Begin a run: prompts and image as the denoiser takes them."""
    _begin(["encode"], locals())


def generate(
    model: Model,
    out: Out,
    prompts: Prompts,
    task: TaskOption = Task.T2V,
    image: Image = None,
    negative_prompt: Negative = "",
    resolution: ResolutionOption = Resolution.P720,
    aspect: Aspect = "16:9",
    height: Height = None,
    width: Width = None,
    frames: Frames = 121,
    steps: Steps = 50,
    guidance: Guidance = 6.0,
    shift: Shift = None,
    seed: Seed = 0,
    precision: PrecisionOption = Precision.BF16,
    save_every: SaveEvery = 10,
    calls: Calls = 1,
    spread: SpreadOption = None,
) -> None:
    """All stages: from prompts to mp4 files."""
    _begin(["encode", "denoise", "decode"], locals())


def denoise(
    model: Model,
    out: Out,
    save_every: SaveEvery = 10,
    calls: Calls = 1,
    spread: SpreadOption = None,
) -> None:
    """Latents of a run that `encode` has begun."""
    _go_on("denoise", model, out, save_every=save_every, calls=calls, spread=spread)


def decode(model: Model, out: Out) -> None:
    """The videos of a run whose latents are there."""
    _go_on("decode", model, out)


def compare(
    left: Annotated[Path, typer.Argument(help="A run's folder or an mp4 file.")],
    right: Annotated[Path, typer.Argument(help="Another one.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="An mp4 file.")],
) -> None:
    """Two videos beside each other, and how far they are from each other."""
    with errors_as_exit_codes("compare"):
        from recipes.hunyuan_video import video

        (one, about), (other, _) = (video.read_video(_video_of(path)) for path in (left, right))
        both = video.side_by_side(one, other)
        video.write_video(out, both, about={"left": str(left), "right": str(right), **about})
        length = len(both)
        typer.echo(f"{out}: PSNR {video.psnr(one[:length], other[:length]):.1f} dB")


def compile_(
    programs: Annotated[list[Program] | None, typer.Argument(help="Which; all by default.")] = None,
    topology: Annotated[str, typer.Option("--topology", "-t", help="A slice.")] = "v6e-8",
    spread: Annotated[Spread, typer.Option(help="Of the denoiser.")] = Spread.SEQUENCE,
    resolution: ResolutionOption = Resolution.P720,
    aspect: Aspect = "16:9",
    frames: Frames = 121,
    guidance: Guidance = 6.0,
    calls: Calls = 1,
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Let libtpu optimise less, or take its time.")
    ] = True,
) -> None:
    """Compile the programs at full size for a TPU that need not be there, from shapes alone."""
    with errors_as_exit_codes("compile"):
        from recipes.hunyuan_video.compile import compile_denoise, compile_encode
        from recipes.hunyuan_video.compile_decode import compile_decode
        from recipes.hunyuan_video.options import Options, size_of

        given = Options(("",), resolution=resolution.value, aspect=aspect, frames=frames)
        size = (frames, *size_of(given))
        for program in programs or list(Program):
            match program:
                case Program.ENCODE:
                    report = compile_encode(topology, quick=quick)
                case Program.DENOISE:
                    how: dict[str, Any] = {"guidance": guidance, "calls": calls, "quick": quick}
                    report = compile_denoise(spread.value, topology, *size, **how)
                case Program.DECODE:
                    report = compile_decode(topology, *size, quick=quick)
            typer.echo(str(report))


def _video_of(path: Path) -> Path:
    """The video of a run, or the file itself."""
    return path / "video.mp4" if path.is_dir() else path


def _begin(stages: list[str], given: dict[str, Any]) -> None:
    """Run stages with a command's arguments."""
    with errors_as_exit_codes(stages[0] if len(stages) == 1 else "generate"):
        from recipes.hunyuan_video.options import Options
        from recipes.hunyuan_video.runs import Run

        model, out = given.pop("model"), given.pop("out")
        how = {name: given.pop(name) for name in ("save_every", "calls", "spread") if name in given}
        given = {n: v.value if isinstance(v, StrEnum) else v for n, v in given.items()}
        given["image"] = None if given["image"] is None else str(given["image"])
        options = Options(**{**given, "prompts": tuple(given["prompts"])})
        _run(stages, Run.begin(model, out, options), how)


def _go_on(stage: str, model: Path, out: Path, **how: Any) -> None:
    with errors_as_exit_codes(stage):
        from recipes.hunyuan_video.runs import Run

        _run([stage], Run.open(model, out), how)


def _run(stages: list[str], run: Any, how: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from recipes.hunyuan_video.generate import How, run_stages

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("denoise"), *columns, console=Console(stderr=True)) as bar:
        steps = bar.add_task("denoise", total=run.options.steps, visible=False)

        def on_step(done: int, total: int) -> None:
            bar.update(steps, completed=done, total=total, visible=True)

        how = {n: v.value if isinstance(v, StrEnum) else v for n, v in how.items()}
        report = run_stages(run, How(**how, say=bar.console.print, on_step=on_step), stages)
    typer.echo(str(report))
