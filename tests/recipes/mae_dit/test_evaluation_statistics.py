"""Statistics: each sample counts once, closed forms, and files of others."""

from pathlib import Path

import numpy as np
import pytest

from recipes.mae_dit.evaluation.statistics import (
    Moments,
    frechet_distance,
    inception_score,
    read_reference,
    write_reference,
)
from tpuport.foundation.errors import CheckpointError, UsageError


def test_each_sample_counts_once_however_it_is_divided() -> None:
    rows = np.random.default_rng(0).normal(3, 1, (37, 5)).astype(np.float32)
    parts = [Moments.zeros(5), Moments.zeros(5)]
    for number, start in enumerate(range(0, 37, 4)):
        batch = rows[start : start + 4]
        valid = np.arange(4) < len(batch)
        parts[number % 2].add(
            np.concatenate([batch, batch[: 4 - len(batch)].repeat(3, 0)])[:4], valid
        )
    merged = parts[0].merged(parts[1])
    mean, cov = merged.gaussian()
    assert merged.count == 37
    np.testing.assert_allclose(mean, rows.astype(float).mean(0), rtol=1e-12)
    np.testing.assert_allclose(cov, np.cov(rows.astype(float), rowvar=False), rtol=1e-9, atol=1e-12)
    with pytest.raises(UsageError, match="take more"):
        Moments.zeros(2).gaussian()


def test_distance_of_known_gaussians_is_the_closed_form() -> None:
    """Covariances that commute: the distance is a sum over their common axes, singular ones too."""
    random = np.random.default_rng(1)
    axes = np.linalg.qr(random.normal(size=(8, 8)))[0]
    a, b = random.uniform(0.1, 4, 8), random.uniform(0.1, 4, 8)
    a[0] = b[1] = 0
    means = random.normal(size=(2, 8))
    want = ((means[0] - means[1]) ** 2).sum() + ((a**0.5 - b**0.5) ** 2).sum()
    found = frechet_distance(means[0], (axes * a) @ axes.T, means[1], (axes * b) @ axes.T)
    assert abs(found - want) < 1e-6


def test_distance_equals_the_root_of_the_product() -> None:
    linalg = pytest.importorskip("scipy.linalg")
    random = np.random.default_rng(2)
    c1, c2 = (np.cov(random.normal(size=(40, 6)), rowvar=False) for _ in range(2))
    want = 4 * 6 + np.trace(c1 + c2 - 2 * linalg.sqrtm(c1 @ c2).real)
    assert abs(frechet_distance(np.zeros(6), c1, np.full(6, 2.0), c2) - want) < 1e-8


def test_inception_score_of_known_classes() -> None:
    sure = np.eye(4, dtype=np.float32)[np.arange(40) % 4] * 1e3
    assert inception_score(sure) == pytest.approx(4)
    assert inception_score(np.zeros((8, 4))) == pytest.approx(1)
    assert inception_score(sure, split=1) == pytest.approx(1)


def test_reference_files(tmp_path: Path) -> None:
    pool, spatial = Moments.zeros(3), Moments.zeros(2)
    rows = np.random.default_rng(3).normal(size=(9, 3))
    pool.add(rows, np.ones(9, bool))
    spatial.add(rows[:, :2], np.ones(9, bool))
    path = tmp_path / "new" / "reference.npz"
    write_reference(path, pool, spatial)
    for found, want in zip(read_reference(path), pool.gaussian(), strict=True):
        assert np.array_equal(found, want)
    assert np.array_equal(read_reference(path, spatial=True)[1], spatial.gaussian()[1])
    write_reference(path, pool)
    with pytest.raises(UsageError, match="no 'mu_s'"):
        read_reference(path, spatial=True)
    with pytest.raises(UsageError, match="not there"):
        read_reference(tmp_path / "gone.npz")
    np.savez(path, mu=np.array([{}], dtype=object), sigma=np.zeros((1, 1)))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_reference(path)
    path.write_bytes(b"PK no archive")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_reference(path)
