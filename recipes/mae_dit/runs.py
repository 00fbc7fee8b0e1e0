"""What the commands of stage 1 do, from a configuration to files."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tpuport
from recipes.hosts import refuse_several
from recipes.mae_dit import devices, stage1
from recipes.mae_dit.config import Config, load
from recipes.mae_dit.data import batches, training_batches
from recipes.mae_dit.discriminator import make_discriminator
from recipes.mae_dit.evaluation.lpips import load_lpips
from recipes.mae_dit.losses import Stage1, gan_of
from recipes.mae_dit.models import Autoencoder, make_autoencoder
from recipes.mae_dit.reconstructions import (
    SHOWN,
    Reconstructions,
    first_images,
    grid,
    write_picture,
)
from recipes.mae_dit.sinks import make_sinks
from recipes.mae_dit.statistics import LatentStatistics, statistics
from recipes.mae_dit.upstream import checkout
from recipes.mae_dit.weights import MODEL, load_run
from tpuport.foundation.errors import UsageError


@dataclass(frozen=True)
class Given:
    """A configuration file, images, changed values, and perhaps a checkout."""

    file: Path
    data: Path | None = None
    overrides: tuple[str, ...] = ()
    upstream: Path | None = None

    @contextlib.contextmanager
    def made(self) -> Iterator[tuple[Config, Autoencoder]]:
        """Yield the configuration and its autoencoder, inside the checkout."""
        config = load(self.file, self.overrides)
        with contextlib.ExitStack() as stack:
            if self.upstream is not None:
                stack.enter_context(checkout(self.upstream))
            yield config, make_autoencoder(config, self.upstream)


def train(
    given: Given,
    out: Path,
    published: tuple[Path | None, Path | None] = (None, None),
    *,
    on: devices.Devices | None = None,
    limit: int | None = None,
    log: str = "json",
    log_every: int = 10,
    grid_every: int | None = None,
    workers: int = 0,
    say: Callable[[str], Any] = print,
) -> Path:
    """Train, or resume, and return the file of the autoencoder; see the command `stage1`."""
    on, sinks = on or devices.Devices(), make_sinks(log, out)
    with given.made() as (config, model):
        gan = gan_of(config)
        perceptual = load_lpips(*published, say=say)
        judge = make_discriminator(gan.disc.arch, config.seed, say)
        modules = Stage1(model, judge, perceptual, gan)
        with training_batches(config, given.data, workers=workers) as batches_:
            identity = {"config": plain(asdict(config)), "batches": len(batches_)}
            on.join({"configuration and images": identity})
            steps = stage1.Stage1Steps(modules, config, len(batches_), on.place)
            watch = None
            if grid_every is not None:
                refuse_several("drawing while it trains", "which writes the pictures")
                updates = len(batches_) * config.experiment.epochs
                watch = Reconstructions(
                    steps.ported,
                    first_images(batches(config, given.data)),
                    out / "grids",
                    every=grid_every,
                    last=min(limit or updates, updates),
                    averaged=config.arch.ema_decay is not None,
                    seed=config.seed,
                )
            trained: Any = stage1.train(
                steps,
                batches_,
                out,
                config,
                identity=identity,
                limit=limit,
                log_every=log_every,
                sinks=sinks,
                watch=watch,
            )
    devices.write(out / MODEL, trained.model.state_dict())
    return out / MODEL


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def trained_autoencoder(model: Autoencoder, run: Path) -> Autoencoder:
    """Return an autoencoder with the weights of a run of stage 1, in evaluation mode."""
    load_run(model, run, "stage1")
    return model.eval()


def latents(model: Autoencoder, images: torch.Tensor) -> torch.Tensor:
    """Return the latents that stage 2 sees."""
    return model.encode(images).zs


def reconstructed(model: Autoencoder, images: torch.Tensor) -> torch.Tensor:
    """Return images, encoded and decoded, in [0, 1]."""
    return model.decode(model.encode(images)).clamp(0, 1)


def latent_statistics(given: Given, run: Path, *, workers: int = 0) -> LatentStatistics:
    """Return the statistics of the latents of all training images."""
    refuse_several("stats", "which reads all images")
    with given.made() as (config, model):
        ported = tpuport.convert(trained_autoencoder(model, run), methods=(latents,), verify=False)
        read = batches(config, given.data, split="train", workers=workers)
        return statistics((tpuport.to_numpy(ported.latents(b["image"])), b["valid"]) for b in read)


def reconstruct(given: Given, run: Path, out: Path) -> tuple[int, float]:
    """Draw images of the validation set above their reconstructions.

    Returns:
        The number of images, and the mean of their PSNR in dB.
    """
    refuse_several("reconstruct", "which draws the picture")
    rows, found = [], []
    with given.made() as (config, model):
        model = trained_autoencoder(model, run)
        ported = tpuport.convert(model, methods=(reconstructed,), verify=False)
        for batch in batches(config, given.data):
            made = tpuport.to_numpy(ported.reconstructed(batch["image"]))
            images, valid = batch["image"].numpy(), batch["valid"].numpy()
            error = np.square(made - images).mean((1, 2, 3))[valid]
            found.extend(-10 * np.log10(np.maximum(error, 1e-10)))
            rows.extend(zip(images[valid], made[valid], strict=True))
    if not found:
        raise UsageError("no image for validation can be decoded: there is nothing to reconstruct")
    write_picture(out, grid(rows[: 2 * SHOWN]))
    return len(found), float(np.mean(found))
