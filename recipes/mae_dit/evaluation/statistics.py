"""Sums over samples, the Fréchet distance between them, and files of reference statistics."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipes.mae_dit.arrays import opened
from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.foundation.files import replacing_file

ROWS = "pool"  # features of single images, in a file of statistics


@dataclass
class Moments:
    """Sums in float64, to which each valid sample is added once.

    Attributes:
        count: Samples.
        total: (D,), their sum.
        outer: (D, D), the sum of their outer products.
    """

    count: int
    total: np.ndarray
    outer: np.ndarray

    @classmethod
    def zeros(cls, width: int) -> "Moments":
        """Return the sums of no sample."""
        return cls(0, np.zeros(width), np.zeros((width, width)))

    def add(self, features: np.ndarray, valid: np.ndarray) -> None:
        """Add the rows of features (B, D) where `valid` (B,) is True."""
        rows = features[valid].astype(np.float64)
        self.count += len(rows)
        self.total += rows.sum(axis=0)
        self.outer += rows.T @ rows

    def merged(self, other: "Moments") -> "Moments":
        """Return the sums of both."""
        return Moments(self.count + other.count, self.total + other.total, self.outer + other.outer)

    def gaussian(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean and the unbiased covariance.

        Raises:
            UsageError: There are fewer than two samples.
        """
        if self.count < 2:
            raise UsageError(f"{self.count} samples have no covariance. What to do: take more")
        mean = self.total / self.count
        return mean, (self.outer - self.count * np.outer(mean, mean)) / (self.count - 1)


def frechet_distance(
    mean1: np.ndarray, cov1: np.ndarray, mean2: np.ndarray, cov2: np.ndarray
) -> float:
    """Return |m1 - m2|² + tr(C1 + C2 - 2 (C1 C2)^½) of two Gaussians.

    The trace of the root is the sum of roots of the eigenvalues of C1^½ C2 C1^½, which is
    symmetric: its eigenvalues are real, where those of the product C1 C2 are only up to rounding.
    """
    values, vectors = np.linalg.eigh(cov1)
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    between = root @ cov2 @ root
    roots = np.sqrt(np.linalg.eigvalsh((between + between.T) / 2).clip(min=0))
    difference = mean1 - mean2
    return float(difference @ difference + np.trace(cov1) + np.trace(cov2) - 2 * roots.sum())


def inception_score(logits: np.ndarray, split: int = 5000) -> float:
    """Return exp(mean KL(p(y|x) || p(y))), the mean over splits of the samples as in ADM.

    Args:
        logits: (N, classes).
        split: Samples of each split.
    """
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    scores = []
    for start in range(0, len(logs), split):
        part = logs[start : start + split]
        # A class of no sample adds 0 times log 0, which is 0: the smallest number avoids a NaN.
        tiny = np.finfo(np.float64).tiny
        marginal = np.log(np.exp(part).mean(axis=0, keepdims=True).clip(min=tiny))
        scores.append(np.exp((np.exp(part) * (part - marginal)).sum(axis=1).mean()))
    return float(np.mean(scores))


def read_reference(path: str | Path, *, spatial: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Read mean and covariance from a file in pytorch-fid's layout, or ADM's.

    Args:
        path: An npz file with `mu` and `sigma`, of ADM with `mu_s` and `sigma_s` as well.
        spatial: Whether to read those of sFID.

    Raises:
        UsageError: There is no such file, or it has no such statistics.
        CheckpointError: It is damaged, or reading it would run code.
    """
    names = ("mu_s", "sigma_s") if spatial else ("mu", "sigma")
    mean, cov = (part.astype(np.float64) for part in _read(path, names))
    if mean.ndim != 1 or cov.shape != (len(mean), len(mean)):
        raise CheckpointError(
            f"{path}: {names[0]} is {mean.shape} and {names[1]} {cov.shape}, expected (D,), (D, D)"
        )
    return mean, cov


def read_features(path: str | Path, width: int) -> np.ndarray:
    """Read the features (N, width) that `write_reference` wrote; raises as `read_reference`."""
    (rows,) = _read(path, (ROWS,))
    if rows.ndim != 2 or rows.shape[1] != width:
        raise CheckpointError(f"{path}: {ROWS} is {rows.shape}, expected (N, {width})")
    return rows


def _read(path: str | Path, names: tuple[str, ...]) -> list[np.ndarray]:
    absent = "give a file of reference statistics"
    with opened(Path(path), absent=absent, damaged="get it again") as file:
        missing = [name for name in names if name not in file.files]
        if missing:
            raise UsageError(
                f"{path} has {', '.join(file.files)}, and no {missing[0]!r}. What to do: give"
                " statistics of pytorch-fid or ADM"
            )
        return [file[name] for name in names]


def write_reference(
    path: str | Path,
    pool: Moments,
    spatial: Moments | None = None,
    rows: np.ndarray | None = None,
) -> None:
    """Write statistics that pytorch-fid and ADM read, and features, to a whole file or none."""
    found: dict[str, np.ndarray] = dict(zip(("mu", "sigma"), pool.gaussian(), strict=True))
    if spatial is not None:
        found |= dict(zip(("mu_s", "sigma_s"), spatial.gaussian(), strict=True))
    if rows is not None:
        found[ROWS] = rows
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(Path(path)) as temporary, temporary.open("wb") as file:
        np.savez(file, **found)  # pyright: ignore[reportCallIssue, reportArgumentType]
