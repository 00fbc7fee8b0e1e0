"""The commands of data and stage 1. Each imports its framework only when it runs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli._common import errors_as_exit_codes


class Layout(StrEnum):
    """The layout of images on disk."""

    FOLDER = "folder"
    TAR = "tar"


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
    log_every: Annotated[int, typer.Option(help="Updates between lines of the log.")] = 10,
    workers: Workers = 0,
) -> None:
    """Train the autoencoder, and its discriminator."""
    with errors_as_exit_codes("stage1"):
        from recipes.mae_dit import runs

        found = runs.train(
            runs.Given(config, data, tuple(overrides or ()), upstream),
            out,
            (vgg, heads),
            limit=steps,
            log_every=log_every,
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
