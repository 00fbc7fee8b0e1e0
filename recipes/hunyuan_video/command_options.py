"""What the commands' options are and say."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from recipes.command_line import Precision


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

    AUTO = "auto"
    SEQUENCE = "sequence"
    GUIDANCE = "guidance"
    TENSOR = "tensor"
    MIXED = "mixed"


class Cache(StrEnum):
    """Steps that reuse what blocks gave in earlier ones."""

    DEEPCACHE = "deepcache"
    TEACACHE = "teacache"


class Output(StrEnum):
    """What is made of latents."""

    MP4 = "mp4"
    PNG = "png"
    LATENTS = "latents"


class Layout(StrEnum):
    """Whose folders a model's are like."""

    DIFFUSERS = "diffusers"
    UPSTREAM = "upstream"


Model = Annotated[
    Path,
    typer.Argument(
        help="A folder as diffusers or upstream publish it, or its name in Hugging Face's cache."
    ),
]
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
CacheOption = Annotated[
    Cache | None, typer.Option(help="Reuse blocks' results in some steps [default: none].")
]
CacheStart = Annotated[int, typer.Option(help="First step that may reuse.")]
CacheEnd = Annotated[int, typer.Option(help="First step after those.")]
CacheInterval = Annotated[int, typer.Option(help="Of those, every so many are full.")]
Version = Annotated[
    str, typer.Option(help="Of the transformer, of upstream's folder [default: its only one].")
]
SaveEvery = Annotated[int, typer.Option(help="Steps after which latents are saved.")]
SpreadOption = Annotated[
    Spread | None,
    typer.Option(help="Over all devices: how; auto: the fastest [default: on one]."),
]
OutputOption = Annotated[Output, typer.Option(help="A film, a picture a frame, or nothing more.")]
Calls = Annotated[int, typer.Option(help="Of the network a step; 2 takes less memory.")]
