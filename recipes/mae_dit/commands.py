"""The commands. Each imports its framework only when it runs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from recipes.command_line import mesh_sizes
from tpuport.cli._common import errors_as_exit_codes


class Layout(StrEnum):
    """The layout of images on disk."""

    FOLDER = "folder"
    TAR = "tar"
    PARQUET = "parquet"


ConfigFile = Annotated[Path, typer.Argument(help="Configuration in upstream's YAML.")]
Data = Annotated[Path | None, typer.Option(help="Folder of images; by default dataset.root.")]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder of the run; resumed if it was begun.")
]
Run = Annotated[Path, typer.Option(help="Folder of a run of `stage1`.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A value; repeatable.")
]
Upstream = Annotated[Path | None, typer.Option(help="Checkout of upstream, to use its classes.")]
Mesh = Annotated[str | None, typer.Option(metavar="AXES", help="Devices by axis, such as fsdp=8.")]
Rules = Annotated[str, typer.Option(help="fsdp spreads the weights, ddp does not.")]
Log = Annotated[
    str,
    typer.Option(help="Where numbers and pictures go: json, tensorboard, wandb, with commas."),
]
GridEvery = Annotated[int | None, typer.Option(help="Updates between OUT/grids.")]
Workers = Annotated[int, typer.Option(help="Processes that read images.")]


def make_data(
    out: Annotated[Path, typer.Argument(help="Folder to write to.")],
    count: Annotated[int, typer.Option(help="Images for training.")] = 256,
    size: Annotated[int, typer.Option(help="Pixels of a side.")] = 40,
    layout: Annotated[Layout, typer.Option(help="Layout on disk.")] = Layout.FOLDER,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Write JPEGs of shapes by class."""
    with errors_as_exit_codes("make-data"):
        from recipes.mae_dit import make_data as stage

        made = stage.make_data(out, count=count, size=size, layout=layout.value, seed=seed)
        typer.echo(f"{made['train']} and {made['val']} images in {out}")


def stage1(
    config: ConfigFile,
    out: Out,
    data: Data = None,
    overrides: Set = None,
    upstream: Upstream = None,
    vgg: Annotated[Path | None, typer.Option(help="Published VGG16; else random.")] = None,
    heads: Annotated[Path | None, typer.Option(help="Published heads of LPIPS.")] = None,
    steps: Annotated[int | None, typer.Option(help="Maximum number of updates.")] = None,
    log: Log = "json",
    log_every: Annotated[int, typer.Option(help="Updates between lines of the log.")] = 10,
    grid_every: GridEvery = None,
    workers: Workers = 0,
    mesh: Mesh = None,
    rules: Rules = "fsdp",
) -> None:
    """Train the autoencoder, and its discriminator."""
    with errors_as_exit_codes("stage1"):
        from recipes.mae_dit import devices, runs

        found = runs.train(
            runs.Given(config, data, tuple(overrides or ()), upstream),
            out,
            (vgg, heads),
            on=devices.Devices(mesh_sizes(mesh), rules),
            limit=steps,
            log=log,
            log_every=log_every,
            grid_every=grid_every,
            workers=workers,
            say=typer.echo,
        )
        typer.echo(f"the model is in {found}")


def stats(
    config: ConfigFile,
    run: Run,
    out: Annotated[Path, typer.Option("--out", "-o", help="The .npz file to write.")],
    data: Data = None,
    overrides: Set = None,
    upstream: Upstream = None,
    workers: Workers = 0,
) -> None:
    """Compute mean and variance of the latents of the training images."""
    with errors_as_exit_codes("stats"):
        from recipes.mae_dit import runs

        given = runs.Given(config, data, tuple(overrides or ()), upstream)
        found = runs.latent_statistics(given, run, workers=workers)
        found.save(out)
        typer.echo(f"{out}: {found.count} images, latents {list(found.mean.shape)}")


def reconstruct(
    config: ConfigFile,
    run: Run,
    out: Annotated[Path, typer.Option("--out", "-o", help="The picture to write.")],
    data: Data = None,
    overrides: Set = None,
    upstream: Upstream = None,
) -> None:
    """Draw images above their reconstructions, and print the PSNR of all."""
    with errors_as_exit_codes("reconstruct"):
        from recipes.mae_dit import runs

        given = runs.Given(config, data, tuple(overrides or ()), upstream)
        count, psnr = runs.reconstruct(given, run, out)
        typer.echo(f"{out}: PSNR {psnr:.2f} dB over {count} images")


Stage1 = Annotated[
    Path | None, typer.Option(help="Folder of a run of `stage1`; by default arch's ckpt_path.")
]
Inception = Annotated[Path | None, typer.Option(help="pytorch-fid's file; else random.")]
Preparation = Annotated[
    str, typer.Option(help="How images are resized for it: pytorch or tensorflow (ADM).")
]
Stats = Annotated[Path | None, typer.Option(help="File of `stats`, if arch.do_normalize is true.")]


def cache(
    config: ConfigFile,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder for the files; one that was begun is continued."),
    ],
    stage1: Stage1 = None,
    data: Data = None,
    split: Annotated[str, typer.Option(help="Folder of images below --data.")] = "train",
    overrides: Set = None,
    upstream: Upstream = None,
    workers: Workers = 0,
) -> None:
    """Write the latents of images, from which stage2 can be trained."""
    with errors_as_exit_codes("cache"):
        from recipes.mae_dit import generation, runs

        given = runs.Given(config, data, tuple(overrides or ()), upstream)
        sources = generation.Sources(stage1)
        count, skipped = generation.cache(given, sources, out, split=split, workers=workers)
        typer.echo(f"{count} latents in {out}; {skipped} images could not be read")


def stage2(
    config: ConfigFile,
    out: Out,
    stage1: Stage1 = None,
    stats: Stats = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder of `cache`, instead of images.")
    ] = None,
    data: Data = None,
    overrides: Set = None,
    upstream: Upstream = None,
    steps: Annotated[int | None, typer.Option(help="Maximum number of updates.")] = None,
    log: Log = "json",
    log_every: Annotated[int, typer.Option(help="Updates between lines of the log.")] = 10,
    grid_every: GridEvery = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Updates between FID of samples; draws OUT/fid.svg.")
    ] = None,
    evaluate_count: Annotated[int, typer.Option(help="Samples of an evaluation.")] = 64,
    reference: Annotated[
        Path | None, typer.Option(help="Statistics for it; else of the training images.")
    ] = None,
    inception: Inception = None,
    preparation: Preparation = "pytorch",
    workers: Workers = 0,
    mesh: Mesh = None,
    rules: Rules = "fsdp",
) -> None:
    """Train a diffusion transformer in the latents of a frozen stage 1."""
    with errors_as_exit_codes("stage2"):
        from recipes.mae_dit import devices, generation, measures, runs

        prepared = measures.preparation_of(preparation)
        looks = generation.Looks(
            grid_every, evaluate_every, evaluate_count, reference, inception, prepared
        )
        found = generation.train(
            runs.Given(config, data, tuple(overrides or ()), upstream),
            generation.Sources(stage1, stats, cache),
            out,
            on=devices.Devices(mesh_sizes(mesh), rules),
            limit=steps,
            log=log,
            log_every=log_every,
            looks=looks,
            workers=workers,
            say=typer.echo,
        )
        typer.echo(f"the model is in {found}")


def sample(
    config: ConfigFile,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write to.")],
    run: Annotated[Path | None, typer.Option(help="Folder of a run of `stage2`.")] = None,
    untrained: Annotated[bool, typer.Option(help="Sample before training.")] = False,
    stage1: Stage1 = None,
    stats: Stats = None,
    count: Annotated[int, typer.Option(help="Images, of classes in turn.")] = 64,
    sampler: Annotated[str | None, typer.Option(help="ddpm, ddim, euler or heun.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the sampler.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Scale; 1 is none.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    overrides: Set = None,
    upstream: Upstream = None,
) -> None:
    """Draw images by class."""
    with errors_as_exit_codes("sample"):
        from recipes.mae_dit import generation, runs
        from tpuport.foundation.errors import UsageError

        if untrained == (run is not None):
            raise UsageError("expected either --run, the folder of a run of stage2, or --untrained")
        generation.sample(
            runs.Given(config, None, tuple(overrides or ()), upstream),
            generation.Sources(stage1, stats),
            run,
            out,
            count=count,
            seed=seed,
            say=typer.echo,
            sampler=sampler,
            steps=steps,
            guidance=guidance,
        )
        typer.echo(f"{count} images in {out}")


def evaluate(
    config: ConfigFile,
    stage1: Annotated[
        Path | None, typer.Option(help="Run of `stage1`, for rFID, PSNR, SSIM and LPIPS.")
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(help="File of `sample`, for FID and its kin.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Statistics (npz of ADM or pytorch-fid); else of --split.")
    ] = None,
    write_reference: Annotated[
        Path | None, typer.Option(help="Where to write the statistics of --split.")
    ] = None,
    split: Annotated[str, typer.Option(help="Folder of images below --data.")] = "train",
    data: Data = None,
    inception: Inception = None,
    preparation: Preparation = "pytorch",
    vgg: Annotated[Path | None, typer.Option(help="Published VGG16; else random.")] = None,
    heads: Annotated[Path | None, typer.Option(help="Published heads of LPIPS.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="JSON file to write.")] = None,
    overrides: Set = None,
    upstream: Upstream = None,
    workers: Workers = 0,
) -> None:
    """Measure reconstructions and samples against images."""
    with errors_as_exit_codes("evaluate"):
        from recipes.mae_dit import measures, runs

        found = measures.evaluate(
            runs.Given(config, data, tuple(overrides or ()), upstream),
            measures.Wanted(stage1, samples, reference, write_reference, split),
            measures.Published(inception, vgg, heads, measures.preparation_of(preparation)),
            workers=workers,
            say=typer.echo,
        )
        for name, value in found.items():
            typer.echo(f"{name:6} {value:.4f}")
        if out is not None:
            measures.write(out, found)


def page(
    runs: Annotated[list[Path], typer.Argument(help="Folders of stage1, stage2 or sample.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The .html file to write.")],
    picture: Annotated[
        list[Path] | None, typer.Option(help="Another picture, as of reconstruct; repeatable.")
    ] = None,
    measures: Annotated[
        list[Path] | None, typer.Option(help="File of evaluate --out; repeatable.")
    ] = None,
) -> None:
    """Write a page of runs: curves of losses and FID, pictures, measures."""
    with errors_as_exit_codes("page"):
        from recipes.mae_dit.page import write_page
        from tpuport.foundation.reporting.markup import plural

        write_page(out, runs, pictures=picture or (), measures=measures or ())
        typer.echo(f"{out} shows {plural(len(runs), 'run')}")


class Program(StrEnum):
    """A step at full size."""

    STAGE1 = "stage1"
    DISCRIMINATOR = "discriminator"
    DIT_XL = "dit-xl"
    DIT_WIDE = "dit-wide"


def compile_(
    programs: Annotated[list[Program] | None, typer.Argument(help="By default all.")] = None,
    topology: Annotated[str, typer.Option("--topology", "-t", help="TPU slice.")] = "v6e-8",
    batch: Annotated[int, typer.Option(help="Images of an update, over all chips.")] = 1024,
    accumulate: Annotated[int, typer.Option(help="Parts of an update.")] = 1,
    rules: Rules = "fsdp",
    quick: Annotated[
        bool, typer.Option("--quick/--full", help="Let libtpu optimise less or fully.")
    ] = True,
) -> None:
    """Compile steps at full size from shapes alone, for a TPU that need not be attached."""
    with errors_as_exit_codes("compile"):
        from recipes.mae_dit.compile import How, compile_program

        mesh = "fsdp" if rules == "fsdp" else "data"
        how = How(topology, batch, accumulate, mesh, rules, quick)
        for program in programs or list(Program):
            typer.echo(str(compile_program(program.value, how)))
