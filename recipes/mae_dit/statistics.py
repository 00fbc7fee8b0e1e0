"""Mean and variance of latents over a set of images, exactly once per image."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.mae_dit.arrays import opened
from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.foundation.files import replacing_file

_EPS = 1e-5  # as upstream's norm of latents


@dataclass(frozen=True)
class LatentStatistics:
    """The statistics by element of a latent.

    Attributes:
        mean: Mean in float64.
        var: Variance in float64, over all images.
        count: Number of images.
    """

    mean: np.ndarray
    var: np.ndarray
    count: int

    def shift_and_scale(self) -> tuple[np.ndarray, np.ndarray]:
        """Return what to subtract from latents, and then to divide them by."""
        return self.mean, np.sqrt(self.var + _EPS)

    def save(self, path: Path) -> None:
        """Write an npz file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as temporary, temporary.open("wb") as file:
            np.savez(file, mean=self.mean, var=self.var, count=self.count)


def read_statistics(path: Path) -> LatentStatistics:
    """Read statistics that were saved.

    Raises:
        UsageError: There is no such file.
        CheckpointError: It is damaged or of something else.
    """
    with opened(path, absent="run stats first", damaged="run stats again") as file:
        found = LatentStatistics(file["mean"], file["var"], int(file["count"]))
    if found.mean.shape != found.var.shape or not np.isfinite(found.var).all():
        raise CheckpointError(f"{path} has no statistics of latents. What to do: run stats again")
    return found


def statistics(latents: Iterable[tuple[Any, Any]]) -> LatentStatistics:
    """Return the statistics of latents (B, ...), of rows that are valid (B,).

    Sums are of differences to the first latent, in float64: the square of a large mean would hide
    a small variance.
    """
    first, total, squares, count = None, np.zeros(()), np.zeros(()), 0
    for zs, valid in latents:
        rows = np.asarray(zs, np.float64)[np.asarray(valid, bool)]
        if not len(rows):
            continue
        first = rows[0] if first is None else first
        rows = rows - first
        total, squares = total + rows.sum(0), squares + np.square(rows).sum(0)
        count += len(rows)
    if first is None:
        raise UsageError("there is no latent to take statistics of")
    mean = total / count
    return LatentStatistics(first + mean, squares / count - np.square(mean), count)
