"""Measures of sets of images: each image counts once, whatever the size of batches."""

import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tpuport
from recipes.mae_dit.evaluation.inception import Activations
from recipes.mae_dit.evaluation.pictures import psnr, ssim
from recipes.mae_dit.evaluation.statistics import (
    Moments,
    frechet_distance,
    inception_score,
    read_reference,
    write_reference,
)
from tpuport.foundation.errors import CheckpointError, UsageError

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
    """

    pool: Moments
    spatial: Moments
    logits: np.ndarray

    @classmethod
    def of(cls, made: Iterable[tuple[Activations, np.ndarray]]) -> "Features":
        """Return those of batches of activations, of the images that are valid.

        Raises:
            UsageError: There is no image.
        """
        pool, spatial, logits = None, None, []
        for activations, valid in made:
            parts = [tpuport.to_numpy(part) for part in activations]
            pool = pool or Moments.zeros(parts[0].shape[1])
            spatial = spatial or Moments.zeros(parts[1].shape[1])
            pool.add(parts[0], valid)
            spatial.add(parts[1], valid)
            logits.append(parts[2][valid])
        if pool is None or spatial is None:
            raise UsageError("there is no image to measure")
        return cls(pool, spatial, np.concatenate(logits))

    def write(self, path: Path) -> None:
        """Write statistics that pytorch-fid and ADM read."""
        write_reference(path, self.pool, self.spatial)

    def score(self) -> float:
        """Return the Inception Score."""
        return inception_score(self.logits)


@dataclass(frozen=True)
class Reference:
    """The statistics that images are compared with; `spatial` is None if a file lacks them."""

    pool: Gaussian
    spatial: Gaussian | None

    @classmethod
    def read(cls, path: Path) -> "Reference":
        """Read a file in pytorch-fid's layout, or ADM's, which has those of sFID as well."""
        pool = read_reference(path)
        with np.load(path, allow_pickle=False) as file:
            has_spatial = "mu_s" in file.files
        return cls(pool, read_reference(path, spatial=True) if has_spatial else None)

    @classmethod
    def of(cls, features: Features) -> "Reference":
        """Return the statistics of images."""
        return cls(features.pool.gaussian(), features.spatial.gaussian())

    def distances(self, features: Features) -> dict[str, float]:
        """Return FID, and sFID if its statistics are known."""
        own = features.pool.gaussian()
        if len(own[0]) != len(self.pool[0]):
            raise UsageError(
                f"the reference has {len(self.pool[0])} features, expected {len(own[0])}. What to"
                " do: give statistics of Inception's last pooling"
            )
        found = {"FID": frechet_distance(*own, *self.pool)}
        if self.spatial is not None:
            found["sFID"] = frechet_distance(*features.spatial.gaussian(), *self.spatial)
        return found


class Measures:
    """The networks of measures, each one program.

    Args:
        inception: The network of FID.
        perceptual: LPIPS.
    """

    def __init__(self, inception: torch.nn.Module, perceptual: torch.nn.Module) -> None:
        self._inception = tpuport.convert(inception, verify=False)
        self._pairs = tpuport.convert(_Pairs(perceptual), verify=False)

    def features(self, batches: Batches) -> Features:
        """Return what Inception has of images."""
        network: Any = self._inception
        return Features.of((network(images), valid) for images, valid in batches)

    def pairs(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor, Any]]) -> dict[str, float]:
        """Return the means of PSNR, SSIM and LPIPS over images and their reconstructions.

        LPIPS has images in [-1, 1], as the published weights were fitted to. A pair of equal images
        counts as 100 dB.
        """
        rows = []
        for images, made, valid in batches:
            if min(images.shape[-2:]) < _SMALLEST:
                raise UsageError(
                    f"SSIM needs images of {_SMALLEST} pixels or more, got {tuple(images.shape)}"
                )
            found = tpuport.to_numpy(self._pairs(images, made))
            rows.append(found[:, np.asarray(valid, bool)])
        means = np.concatenate(rows, 1).astype(np.float64).mean(1).tolist()
        return dict(zip(("PSNR", "SSIM", "LPIPS"), means, strict=True))


class _Pairs(torch.nn.Module):
    """PSNR, SSIM and LPIPS of pairs of images, (3, B)."""

    def __init__(self, perceptual: torch.nn.Module) -> None:
        super().__init__()
        self.perceptual = perceptual

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        distance = self.perceptual(x * 2 - 1, y * 2 - 1)
        return torch.stack([psnr(x, y).clamp(max=100.0), ssim(x, y), distance])


def read_samples(path: Path, size: int) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    """Yield batches of images of a file in ADM's layout, the last filled up with copies.

    Args:
        path: npz whose arr_0 is (N, H, W, 3) of 8 bits.
        size: Images of a batch.

    Raises:
        UsageError: There is no such file, or it has no images.
        CheckpointError: It is damaged.
    """
    if not path.is_file():
        raise UsageError(f"{path} is not there. What to do: run sample, or give another file")
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            images = file["arr_0"] if "arr_0" in file.files else None
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. What to do: make it again"
        ) from error
    if images is None or images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8:
        what = "no arr_0" if images is None else f"arr_0 {images.dtype}{list(images.shape)}"
        raise UsageError(f"{path} has {what}, expected arr_0 uint8[N, H, W, 3], as sample writes")
    for start in range(0, len(images), size):
        own = images[start : start + size]
        filled = np.resize(own, (size, *own.shape[1:]))
        pixels = torch.from_numpy(filled.astype(np.float32) / 255).permute(0, 3, 1, 2)
        yield pixels.contiguous(), np.arange(size) < len(own)
