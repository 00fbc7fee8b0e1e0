"""Measures of sets of images: each image counts once, whatever the size of batches."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from recipes.mae_dit.arrays import opened
from recipes.mae_dit.evaluation.neighbours import NEIGHBOURS, precision_and_recall
from recipes.mae_dit.evaluation.pictures import psnr, ssim
from recipes.mae_dit.evaluation.spreading import Spread
from recipes.mae_dit.evaluation.statistics import (
    ROWS,
    Moments,
    frechet_distance,
    inception_score,
    read_features,
    read_reference,
    write_reference,
)
from tpuport.foundation.errors import UsageError
from tpuport.training.input.sources import HostShard

_SMALLEST = 11  # pixels of SSIM's window
# Images (b, 3, H, W) in [0, 1], and which of them are valid (b,).
Batches = Iterable[tuple[torch.Tensor, np.ndarray]]
Gaussian = tuple[np.ndarray, np.ndarray]


@dataclass
class Features:
    """What Inception has of a set of images.

    Attributes:
        pool: Sums for FID.
        spatial: Sums for sFID.
        logits: The logits of all images.
        rows: The features of FID of all images, for precision and recall.
    """

    pool: Moments
    spatial: Moments
    logits: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, made: Iterable[tuple[Any, np.ndarray]]) -> "Features":
        """Return those of batches of `Activations` as arrays, of the images that are valid.

        Raises:
            UsageError: There is no image.
        """
        pool, spatial, logits, rows = None, None, [], []
        for parts, valid in made:
            pool = pool or Moments.zeros(parts.pool.shape[1])
            spatial = spatial or Moments.zeros(parts.spatial.shape[1])
            pool.add(parts.pool, valid)
            spatial.add(parts.spatial, valid)
            logits.append(parts.logits[valid])
            rows.append(parts.pool[valid])
        if pool is None or spatial is None:
            raise UsageError("there is no image to measure")
        return cls(pool, spatial, np.concatenate(logits), np.concatenate(rows))

    def write(self, path: Path) -> None:
        """Write statistics that pytorch-fid and ADM read, with the features themselves."""
        write_reference(path, self.pool, self.spatial, self.rows)

    def score(self) -> float:
        """Return the Inception Score."""
        return inception_score(self.logits)


@dataclass(frozen=True)
class Reference:
    """The statistics that images are compared with.

    Attributes:
        pool: Those of FID.
        spatial: Those of sFID, or None if a file lacks them.
        rows: Features (N, D) for precision and recall, or None if a file lacks them.
    """

    pool: Gaussian
    spatial: Gaussian | None
    rows: np.ndarray | None = None

    @classmethod
    def read(cls, path: Path) -> "Reference":
        """Read a file in pytorch-fid's layout, or ADM's, which has those of sFID as well."""
        pool = read_reference(path)
        with np.load(path, allow_pickle=False) as file:
            names = file.files
        spatial = read_reference(path, spatial=True) if "mu_s" in names else None
        return cls(pool, spatial, read_features(path, len(pool[0])) if ROWS in names else None)

    @classmethod
    def of(cls, features: Features) -> "Reference":
        """Return the statistics of images."""
        return cls(features.pool.gaussian(), features.spatial.gaussian(), features.rows)

    def distances(self, features: Features) -> dict[str, float]:
        """Return FID; sFID, precision and recall if what they need is known.

        Sets of less than four images have no precision and recall.
        """
        own = features.pool.gaussian()
        if len(own[0]) != len(self.pool[0]):
            raise UsageError(
                f"the reference has {len(self.pool[0])} features, expected {len(own[0])}. What to"
                " do: give statistics of Inception's last pooling"
            )
        found = {"FID": frechet_distance(*own, *self.pool)}
        if self.spatial is not None:
            found["sFID"] = frechet_distance(*features.spatial.gaussian(), *self.spatial)
        if self.rows is not None and min(len(self.rows), len(features.rows)) > NEIGHBOURS:
            both = precision_and_recall(self.rows, features.rows)
            found |= dict(zip(("precision", "recall"), both, strict=True))
        return found


class Measures:
    """The networks of measures, each one program over all devices of all processes.

    Batches are those of this process, as many as the others have; measures are of all.

    Args:
        inception: The network of FID.
        perceptual: LPIPS; None if no pairs are to be compared.
        devices: The devices; by default all.
    """

    def __init__(
        self,
        inception: torch.nn.Module,
        perceptual: torch.nn.Module | None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        self._inception = Spread(inception, devices=devices)
        self._pairs = None
        if perceptual is not None:
            self._pairs = Spread(_Pairs(perceptual), devices=devices)

    def features(self, batches: Batches) -> Features:
        """Return what Inception has of images."""
        return Features.of(self._inception(valid, images) for images, valid in batches)

    def pairs(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor, Any]]) -> dict[str, float]:
        """Return the means of PSNR, SSIM and LPIPS over images and their reconstructions.

        LPIPS has images in [-1, 1], as the published weights were fitted to. A pair of equal images
        counts as 100 dB.
        """
        rows = []
        assert self._pairs is not None
        for images, made, valid in batches:
            if min(images.shape[-2:]) < _SMALLEST:
                raise UsageError(
                    f"SSIM needs images of {_SMALLEST} pixels or more, got {tuple(images.shape)}"
                )
            found, counted = self._pairs(valid, images, made)
            rows.append(found[counted])
        means = np.concatenate(rows).astype(np.float64).mean(0).tolist()
        return dict(zip(("PSNR", "SSIM", "LPIPS"), means, strict=True))


class _Pairs(torch.nn.Module):
    """PSNR, SSIM and LPIPS of pairs of images, (B, 3)."""

    def __init__(self, perceptual: torch.nn.Module) -> None:
        super().__init__()
        self.perceptual = perceptual

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        distance = self.perceptual(x * 2 - 1, y * 2 - 1)
        return torch.stack([psnr(x, y).clamp(max=100.0), ssim(x, y), distance], 1)


def read_samples(path: Path, size: int) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    """Yield batches of images of a file in ADM's layout, the last filled up with copies.

    Each process has its rows of a batch.

    Args:
        path: npz whose arr_0 is (N, H, W, 3) of 8 bits.
        size: Images of a batch, over all processes.

    Raises:
        UsageError: There is no such file, or it has no images.
        CheckpointError: It is damaged.
    """
    with opened(path, absent="run sample, or give another file", damaged="make it again") as file:
        images = file["arr_0"] if "arr_0" in file.files else None
    if images is None or images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
        what = "no arr_0" if images is None else f"arr_0 {images.dtype}{list(images.shape)}"
        raise UsageError(f"{path} has {what}, expected arr_0 uint8[N, H, W, 3], as sample writes")
    yield from in_batches(images, size)


def in_batches(images: np.ndarray, size: int) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    """Yield images (N, H, W, 3) of 8 bits in batches, of which each process has its rows."""
    mine = HostShard(jax.process_index(), jax.process_count()).rows(size)
    for start in range(0, len(images), size):
        own = images[start : start + size]
        filled = np.resize(own, (size, *own.shape[1:]))[mine]
        pixels = torch.from_numpy(filled.astype(np.float32) / 255).permute(0, 3, 1, 2)
        yield pixels.contiguous(), (np.arange(size) < len(own))[mine]
