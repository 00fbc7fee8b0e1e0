"""The commands. Each imports its framework only when it runs, so that help is fast."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from recipes.command_line import Precision
from recipes.hunyuan_video.command_options import (
    Aspect,
    CacheEnd,
    CacheInterval,
    CacheOption,
    CacheStart,
    Calls,
    Frames,
    Guidance,
    Height,
    Image,
    LargerName,
    Layout,
    Model,
    Negative,
    Out,
    Output,
    OutputOption,
    PrecisionOption,
    Program,
    Prompts,
    Resolution,
    ResolutionOption,
    SaveEvery,
    Seed,
    Shift,
    SpreadName,
    SpreadOption,
    Steps,
    SuperResolution,
    Task,
    TaskOption,
    Version,
    Width,
)
from recipes.progress import steps_bar
from tpuport.cli._common import errors_as_exit_codes


def make_weights(
    out: Annotated[Path, typer.Argument(help="Folder to write the model to.")],
    seed: Annotated[int, typer.Option(help="Random seed of the weights.")] = 0,
    layout: Annotated[Layout, typer.Option(help="Folder layout of the model.")] = Layout.DIFFUSERS,
) -> None:
    """Write a tiny model with random weights in the published layout."""
    with errors_as_exit_codes("make-weights"):
        from recipes.hunyuan_video.make_weights import make_weights as make

        typer.echo(f"a tiny model in {make(out, seed, layout.value)}")


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
    version: Version = "",
    cache: CacheOption = None,
    cache_start: CacheStart = 11,
    cache_end: CacheEnd = 45,
    cache_interval: CacheInterval = 4,
) -> None:
    """Begin a run: encode the prompts and the image for the denoiser."""
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
    version: Version = "",
    cache: CacheOption = None,
    cache_start: CacheStart = 11,
    cache_end: CacheEnd = 45,
    cache_interval: CacheInterval = 4,
    super_resolution: SuperResolution = None,
    save_every: SaveEvery = 10,
    calls: Calls = 1,
    spread: SpreadOption = None,
    output: OutputOption = Output.MP4,
) -> None:
    """Run all stages: from prompts to mp4 files."""
    _begin(["encode", "denoise", "decode"], locals())


def denoise(
    model: Model,
    out: Out,
    save_every: SaveEvery = 10,
    calls: Calls = 1,
    spread: SpreadOption = None,
) -> None:
    """Denoise the latents of a run that `encode` has begun."""
    _go_on("denoise", model, out, save_every=save_every, calls=calls, spread=spread)


def upscale(
    model: Model,
    out: Out,
    super_resolution: Annotated[
        LargerName | None, typer.Option(help="What to make of it [default: as upstream does].")
    ] = None,
    height: Annotated[int | None, typer.Option(help="Height, if not by the resolution.")] = None,
    width: Width = None,
    steps: Annotated[int | None, typer.Option(help="Steps [default: upstream's 6 or 8].")] = None,
    save_every: SaveEvery = 10,
    spread: SpreadOption = None,
    output: OutputOption = Output.MP4,
) -> None:
    """Make the video of a run larger by super-resolution, in a folder inside the run's."""
    with errors_as_exit_codes("upscale"):
        from recipes.hunyuan_video.runs import Run
        from recipes.hunyuan_video.upscale import Larger

        resolution = "" if super_resolution is None else super_resolution.value
        wanted = Larger(resolution, steps, height, width)
        how = {"save_every": save_every, "spread": spread, "output": output}
        _upscale(Run.open(model, out), wanted, how)


def decode(
    model: Model,
    out: Out,
    spread: SpreadOption = None,
    output: OutputOption = Output.MP4,
) -> None:
    """Decode the latents of a run to videos."""
    _go_on("decode", model, out, spread=spread, output=output)


def denoise_latents(
    model: Annotated[Path, typer.Argument(help="Model folder as diffusers publishes it.")],
    inputs: Annotated[
        Path, typer.Argument(help="Safetensors file with latents and conditions by name.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Safetensors file to write.")],
    kind: Annotated[
        str | None, typer.Option("--class", help="Transformer class [default: the folder's].")
    ] = None,
    steps: Steps = 50,
    guidance: Annotated[float, typer.Option(help="Scale; above 1 negative_... are read.")] = 1.0,
    shift: Shift = None,
    precision: PrecisionOption = Precision.BF16,
    calls: Calls = 1,
    cache: CacheOption = None,
    cache_start: CacheStart = 11,
    cache_end: CacheEnd = 45,
    cache_interval: CacheInterval = 4,
) -> None:
    """Denoise with another transformer (Wan, Flux), between its pipeline's encoders and decoder."""
    with errors_as_exit_codes("denoise-latents"):
        import tpuport
        from recipes.hunyuan_video.caching import StepCache
        from recipes.hunyuan_video.other_models import Flow, denoise_file

        steps_reused = cache_start, cache_end, cache_interval
        reuse = None if cache is None else StepCache(cache.value, *steps_reused)
        flow = Flow(steps, guidance, shift, calls, precision.value, reuse)
        with steps_bar("denoise", steps) as on_step, tpuport.compile_cache(min_compile_seconds=0):
            denoise_file(model, inputs, out, flow, kind=kind, on_step=on_step)
        typer.echo(f"latents in {out}")


def compare(
    left: Annotated[Path, typer.Argument(help="Folder of a run, or an mp4 file.")],
    right: Annotated[Path, typer.Argument(help="The one to compare it with.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Mp4 file to write, unless there are only latents.")
    ],
) -> None:
    """Write two videos side by side, and print how far they are from each other."""
    with errors_as_exit_codes("compare"):
        from recipes.hunyuan_video import video

        if (found := _latents_beside(left, right)) is not None:
            typer.echo(f"latents: PSNR {found[0]:.1f} dB, cosine {found[1]:.5f}")
            if not _video_of(left).is_file() or not _video_of(right).is_file():
                # Runs with --output latents or png have no more than that.
                return
        (one, about), (other, _) = (video.read_video(_video_of(path)) for path in (left, right))
        both = video.side_by_side(one, other)
        video.write_video(out, both, about={"left": str(left), "right": str(right), **about})
        length = len(both)
        typer.echo(f"{out}: PSNR {video.psnr(one[:length], other[:length]):.1f} dB")


def compile_(
    programs: Annotated[
        list[Program] | None, typer.Argument(help="Programs [default: all but upscale].")
    ] = None,
    topology: Annotated[str, typer.Option("--topology", "-t", help="TPU slice.")] = "v6e-8",
    spread: Annotated[
        SpreadName, typer.Option(help="How to spread the denoiser.")
    ] = SpreadName.AUTO,
    resolution: ResolutionOption = Resolution.P720,
    aspect: Aspect = "16:9",
    frames: Frames = 121,
    guidance: Guidance = 6.0,
    calls: Calls = 1,
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Let libtpu optimise less or fully.")
    ] = True,
) -> None:
    """Compile the programs at full size from shapes alone, for a TPU that need not be attached."""
    with errors_as_exit_codes("compile"):
        from recipes.hunyuan_video.compile import compile_denoise, compile_encode, compile_upscale
        from recipes.hunyuan_video.compile_decode import compile_decode
        from recipes.hunyuan_video.options import Options, size_of

        given = Options(("",), resolution=resolution.value, aspect=aspect, frames=frames)
        size = (frames, *size_of(given))
        for program in programs or [one for one in Program if one != Program.UPSCALE]:
            match program:
                case Program.ENCODE:
                    report = compile_encode(topology, quick=quick)
                case Program.DENOISE:
                    how: dict[str, Any] = {"guidance": guidance, "calls": calls, "quick": quick}
                    report = compile_denoise(spread.value, topology, *size, **how)
                case Program.UPSCALE:
                    report = compile_upscale(given, spread.value, topology, quick=quick)
                case Program.DECODE:
                    report = compile_decode(topology, *size, quick=quick)
            typer.echo(str(report))


def _latents_beside(left: Path, right: Path) -> tuple[float, float] | None:
    """Return PSNR and cosine of two runs' latents, or None unless both have them in one shape."""
    from recipes.hunyuan_video.runs import LATENTS, latents_apart

    paths = left / LATENTS, right / LATENTS
    return latents_apart(*paths) if all(path.is_file() for path in paths) else None


def _video_of(path: Path) -> Path:
    """Return the video file of a run's folder, or the file itself."""
    return path / "video.mp4" if path.is_dir() else path


_HOW = ("save_every", "calls", "spread", "output")


def _begin(stages: list[str], given: dict[str, Any]) -> None:
    """Begin a run with a command's arguments, and run some stages of it."""
    with errors_as_exit_codes(stages[0] if len(stages) == 1 else "generate"):
        from recipes.hunyuan_video.options import Options
        from recipes.hunyuan_video.runs import Run

        model, out = given.pop("model"), given.pop("out")
        larger = given.pop("super_resolution", None)
        how = {name: given.pop(name) for name in _HOW if name in given}
        given = {n: v.value if isinstance(v, StrEnum) else v for n, v in given.items()}
        given["image"] = None if given["image"] is None else str(given["image"])
        options = Options(**{**given, "prompts": tuple(given["prompts"])})
        run = Run.begin(model, out, options)
        if larger is None:
            _run(stages, run, how)
            return
        from recipes.hunyuan_video.upscale import Larger, check_upscaling

        wanted = Larger(larger.value)
        check_upscaling(run, wanted)
        # As upstream, which decodes the larger video alone.
        _run(["encode", "denoise"], run, how)
        _upscale(run, wanted, how)


def _go_on(stage: str, model: Path, out: Path, **how: Any) -> None:
    with errors_as_exit_codes(stage):
        from recipes.hunyuan_video.runs import Run

        _run([stage], Run.open(model, out), how)


def _upscale(low: Any, wanted: Any, how: dict[str, Any]) -> None:
    from recipes.hunyuan_video.upscale import begin_upscaling, upscale

    run = begin_upscaling(low, wanted)
    _shown(run, how, lambda shown: upscale(low, run, shown))


def _run(stages: list[str], run: Any, how: dict[str, Any]) -> None:
    from recipes.hunyuan_video.generate import run_stages

    _shown(run, how, lambda shown: run_stages(run, shown, stages))


def _shown(run: Any, how: dict[str, Any], call: Callable[[Any], Any]) -> None:
    """Call with the settings of a command and a progress bar, and print what was compiled."""
    from recipes.hunyuan_video.generate import How

    how = {n: v.value if isinstance(v, StrEnum) else v for n, v in how.items()}
    with steps_bar("denoise", run.options.steps) as on_step:
        report = call(How(**how, say=on_step.say, on_step=on_step))
    typer.echo(str(report))
