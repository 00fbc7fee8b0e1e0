"""Options and help texts of the commands."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from recipes.command_line import Precision


class Task(StrEnum):
    """The task: text to video, or text and first frame to video."""

    T2V = "t2v"
    I2V = "i2v"


class Resolution(StrEnum):
    """Resolutions, each with a bucket of sizes."""

    P360 = "360p"
    P480 = "480p"
    P720 = "720p"
    P1080 = "1080p"


class Program(StrEnum):
    """The program to compile."""

    ENCODE = "encode"
    DENOISE = "denoise"
    UPSCALE = "upscale"
    DECODE = "decode"


class SpreadName(StrEnum):
    """The way the denoiser is spread over the devices."""

    AUTO = "auto"
    SEQUENCE = "sequence"
    GUIDANCE = "guidance"
    TENSOR = "tensor"
    MIXED = "mixed"


class Cache(StrEnum):
    """The cache with which steps reuse block outputs of earlier ones."""

    DEEPCACHE = "deepcache"
    TEACACHE = "teacache"
    TAYLORCACHE = "taylorcache"


class LargerName(StrEnum):
    """The resolution that super-resolution makes."""

    P720 = "720p"
    P1080 = "1080p"


class Output(StrEnum):
    """The form in which the result is written."""

    MP4 = "mp4"
    PNG = "png"
    LATENTS = "latents"


class Layout(StrEnum):
    """The folder layout of a model."""

    DIFFUSERS = "diffusers"
    UPSTREAM = "upstream"


Model = Annotated[
    Path,
    typer.Argument(
        help="Model folder in diffusers' or upstream's layout, or its name in Hugging Face's cache."
    ),
]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder of the run; resumed if it was begun.")
]
Prompts = Annotated[
    list[str], typer.Option("--prompt", "-p", help="Text prompt; repeat for more videos.")
]
TaskOption = Annotated[Task, typer.Option(help="Text or image to video.")]
Image = Annotated[Path | None, typer.Option(help="File with the first frame, for i2v.")]
Negative = Annotated[str, typer.Option("--negative-prompt", help="What guidance leads away from.")]
ResolutionOption = Annotated[Resolution, typer.Option(help="Gives the size, with --aspect.")]
Aspect = Annotated[str, typer.Option(help="width:height; i2v takes the image's.")]
Height = Annotated[int | None, typer.Option(help="Height in pixels, if not by --resolution.")]
Width = Annotated[int | None, typer.Option(help="Width in pixels, see --height.")]
Frames = Annotated[int, typer.Option(help="Frames of the video: 4n + 1, at 24 a second.")]
Steps = Annotated[int, typer.Option(help="Denoising steps; 12 for step-distilled models.")]
Guidance = Annotated[float, typer.Option(help="Guidance scale; 1 (none) for distilled models.")]
Shift = Annotated[
    float | None, typer.Option(help="Shift of the noise schedule [default: the model's].")
]
Seed = Annotated[int, typer.Option(help="Random seed of the noise.")]
PrecisionOption = Annotated[Precision, typer.Option(help="Precision that all models compute in.")]
CacheOption = Annotated[
    Cache | None, typer.Option(help="Reuse block outputs in some steps [default: none].")
]
CacheStart = Annotated[int, typer.Option(help="First step that may reuse block outputs.")]
CacheEnd = Annotated[int, typer.Option(help="First step after which all are full.")]
CacheInterval = Annotated[int, typer.Option(help="Every how many of these steps one is full.")]
Version = Annotated[
    str, typer.Option(help="Transformer version in an upstream folder [default: its only one].")
]
SuperResolution = Annotated[
    LargerName | None,
    typer.Option(help="Make the video larger: 480p to 720p, 720p to 1080p [default: no]."),
]
SaveEvery = Annotated[int, typer.Option(help="Save the latents every so many steps.")]
SpreadOption = Annotated[
    SpreadName | None,
    typer.Option(help="How to spread the denoiser over all devices [default: use one]."),
]
OutputOption = Annotated[
    Output, typer.Option(help="Write an mp4, a PNG per frame, or only latents.")
]
Calls = Annotated[int, typer.Option(help="Network calls per step; 2 takes less memory.")]
