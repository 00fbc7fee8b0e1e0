"""What the command `evaluate` does: measures of reconstructions and of samples."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import torch

from recipes.mae_dit.data import batches
from recipes.mae_dit.evaluation.inception import Preparation, load_inception
from recipes.mae_dit.evaluation.lpips import load_lpips
from recipes.mae_dit.evaluation.measuring import Measures, Reference, read_samples
from recipes.mae_dit.evaluation.spreading import Spread
from recipes.mae_dit.runs import Given, reconstructed, trained_autoencoder
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_file
from tpuport.training import initialize


@dataclass(frozen=True)
class Published:
    """Files of published weights; a network without one has random weights.

    Attributes:
        inception: pytorch-fid's file.
        vgg: torchvision's VGG16.
        heads: The heads of LPIPS.
        preparation: How Inception's images are resized.
    """

    inception: Path | None = None
    vgg: Path | None = None
    heads: Path | None = None
    preparation: Preparation = "pytorch"

    def load(self, say: Callable[[str], Any], devices: Sequence[Any] | None = None) -> Measures:
        """Return the networks over devices, and say which are random."""
        inception = load_inception(self.inception, say=say, preparation=self.preparation)
        return Measures(inception, load_lpips(self.vgg, self.heads, say=say), devices)


@dataclass(frozen=True)
class Wanted:
    """What to measure, and with what.

    Attributes:
        stage1: Run of stage 1, for PSNR, SSIM, LPIPS and rFID on the images for validation.
        samples: File of `sample`, for FID, sFID, Inception Score, precision and recall.
        reference: Statistics that samples are compared with; None for those of the images of
            `split`.
        write: Where to write the statistics of the images of `split`.
        split: Folder of images below the data.
    """

    stage1: Path | None = None
    samples: Path | None = None
    reference: Path | None = None
    write: Path | None = None
    split: str = "train"


def evaluate(
    given: Given,
    wanted: Wanted,
    published: Published,
    *,
    workers: int = 0,
    say: Callable[[str], Any] = print,
    devices: Sequence[Any] | None = None,
) -> dict[str, float]:
    """Return the measures by name, of all samples on any number of processes.

    The first process writes files. By default all devices are used.

    Raises:
        UsageError: Nothing was asked for, or a file does not fit.
    """
    if wanted.stage1 is None and wanted.samples is None and wanted.write is None:
        raise UsageError(
            "there is nothing to measure. What to do: give --stage1 for reconstructions, --samples"
            " for samples, or --write-reference for statistics of images"
        )
    initialize()
    reference = None if wanted.reference is None else Reference.read(wanted.reference)
    found: dict[str, float] = {}
    with given.made() as (config, model):
        size = config.experiment.batch_size
        # Read before the networks are compiled, as a file that does not fit is found so.
        samples = None if wanted.samples is None else list(read_samples(wanted.samples, size))
        autoencoder = None
        if wanted.stage1 is not None:
            autoencoder = trained_autoencoder(model, wanted.stage1)
        measures = published.load(say, devices)

        def images(split: str) -> Iterator[tuple[torch.Tensor, Any]]:
            for batch in batches(config, given.data, split=split, workers=workers):
                yield batch["image"], batch["valid"].numpy()

        if wanted.write is not None or (samples is not None and reference is None):
            features = measures.features(images(wanted.split))
            say(f"statistics of {features.pool.count} images of {wanted.split}")
            if wanted.write is not None and jax.process_index() == 0:
                features.write(wanted.write)
            reference = reference or Reference.of(features)
        if samples is not None:
            assert reference is not None
            features = measures.features(samples)
            found |= reference.distances(features) | {"IS": features.score()}
            if "precision" not in found:
                say(
                    "precision and recall are left out: they need the features of four or more"
                    " images and samples, which --write-reference keeps"
                )
        if autoencoder is not None:
            found |= _of_reconstructions(measures, autoencoder, list(images("val")), devices)
    return found


def _of_reconstructions(
    measures: Measures, autoencoder: Any, given: list[Any], devices: Sequence[Any] | None
) -> dict[str, float]:
    """Return rFID, PSNR, SSIM and LPIPS of images and their reconstructions."""
    network = Spread(autoencoder, reconstructed, devices)
    made = [network.own(network(valid, x)[0], len(x)) for x, valid in given]
    pairs = [(x, y, valid) for (x, valid), y in zip(given, made, strict=True)]
    real = Reference.of(measures.features(given))
    between = real.distances(measures.features([(y, valid) for _, y, valid in pairs]))
    return {"rFID": between["FID"], **measures.pairs(pairs)}


def preparation_of(name: str) -> Preparation:
    """Return the name of a preparation, if it is one."""
    if name not in ("pytorch", "tensorflow"):
        raise UsageError(f"preparation={name!r}: expected pytorch or tensorflow")
    return "pytorch" if name == "pytorch" else "tensorflow"


def write(path: Path, found: dict[str, float]) -> None:
    """Write measures as JSON, if this is the first process."""
    if jax.process_index() > 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as temporary:
        temporary.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
