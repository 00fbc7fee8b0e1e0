"""Measures over several devices and processes: each image counts once, and sizes do not matter."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

from recipes.mae_dit import measures
from recipes.mae_dit.evaluation.measuring import Features, Measures, Reference, in_batches
from recipes.mae_dit.evaluation.neighbours import precision_and_recall
from recipes.mae_dit.make_data import make_data
from recipes.mae_dit.measures import Published, Wanted
from recipes.mae_dit.runs import Given
from tests.recipes.mae_dit.tiny import Difference, Means, write
from tests.training.processes import finish, start_two
from tpuport.foundation.errors import CheckpointError, UsageError

COUNT = 37  # images, which no number of devices divides


def images(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)


def eager(pixels: np.ndarray) -> Any:
    """What the network has of all images at once, in eager PyTorch."""
    given = torch.from_numpy(pixels.astype(np.float32) / 255).permute(0, 3, 1, 2)
    return [value.double().numpy() for value in Means()(given)]


def test_each_image_counts_once_on_eight_devices():
    pixels = images(COUNT, 0)
    pool, spatial, logits = eager(pixels)
    found: list[Features] = []
    for devices, size in ((jax.devices()[:1], 5), (jax.devices(), 5), (jax.devices()[:3], 37)):
        features = Measures(Means().eval(), None, devices).features(in_batches(pixels, size))
        assert features.pool.count == features.spatial.count == COUNT
        np.testing.assert_allclose(features.rows, pool, rtol=1e-6)
        np.testing.assert_allclose(features.logits, logits, rtol=1e-6)
        mean, cov = features.spatial.gaussian()
        np.testing.assert_allclose(mean, spatial.mean(0), rtol=1e-6)
        np.testing.assert_allclose(cov, np.cov(spatial, rowvar=False), rtol=1e-5, atol=1e-9)
        found.append(features)
    for other in found[1:]:
        for name in ("rows", "logits"):
            np.testing.assert_array_equal(getattr(other, name), getattr(found[0], name))


def test_distances_are_those_of_their_definitions():
    """FID and sFID by a root of the product, precision and recall pair by pair."""
    linalg = pytest.importorskip("scipy.linalg")
    one, two = images(40, 1), images(COUNT, 2) // 2
    measured = Measures(Means().eval(), None)
    reference = Reference.of(measured.features(in_batches(one, 8)))
    found = reference.distances(measured.features(in_batches(two, 8)))
    for name, a, b in zip(("FID", "sFID"), eager(one), eager(two), strict=False):
        covs = [np.cov(rows, rowvar=False) for rows in (a, b)]
        root = linalg.sqrtm(covs[0] @ covs[1]).real
        wanted = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(covs[0] + covs[1] - 2 * root)
        assert found[name] == pytest.approx(wanted, rel=1e-4)
    real, made = eager(one)[0], eager(two)[0]
    assert (found["precision"], found["recall"]) == (within(made, real), within(real, made))


def within(rows: np.ndarray, others: np.ndarray) -> float:
    """The share of rows that are as near to one of the others as its third neighbour is."""
    count = 0
    for row in rows:
        hit = False
        for index, other in enumerate(others):
            rest = sorted(np.linalg.norm(other - o) for i, o in enumerate(others) if i != index)
            hit = hit or np.linalg.norm(row - other) <= rest[2]
        count += hit
    return count / len(rows)


def test_precision_and_recall_of_known_sets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("recipes.mae_dit.evaluation.neighbours._BLOCK", 16)
    random = np.random.default_rng(0)
    real, made = random.normal(size=(50, 6)), random.normal(size=(41, 6))
    made[:20] += 2
    far = 1e4  # large features hide no distances
    got = precision_and_recall(real + far, made + far)
    assert got == (within(made, real), within(real, made))
    assert 0 < got[0] < 1
    assert 0 < got[1] < 1
    assert precision_and_recall(real, real) == (1.0, 1.0)
    assert precision_and_recall(real, real + 100) == (0.0, 0.0)
    with pytest.raises(UsageError, match="more than 3 images and samples, got 50 and 3"):
        precision_and_recall(real, made[:3])


def test_features_of_a_file_are_read(tmp_path: Path):
    measured = Measures(Means().eval(), None)
    features = measured.features(in_batches(images(9, 3), 8))
    features.write(tmp_path / "reference.npz")
    found = Reference.read(tmp_path / "reference.npz")
    np.testing.assert_array_equal(found.rows, features.rows)
    with np.load(tmp_path / "reference.npz") as file:
        parts = {name: file[name] for name in file.files}
    np.savez(tmp_path / "adm.npz", **{n: v for n, v in parts.items() if n != "pool"})
    assert Reference.read(tmp_path / "adm.npz").rows is None
    assert "precision" not in Reference.read(tmp_path / "adm.npz").distances(features)
    np.savez(tmp_path / "other.npz", **{**parts, "pool": parts["pool"][:, :2]})
    with pytest.raises(CheckpointError, match=r"pool is \(9, 2\), expected"):
        Reference.read(tmp_path / "other.npz")


SCRIPT = """
import jax
from recipes.mae_dit import measures
from recipes.mae_dit.__main__ import app
from tests.recipes.mae_dit.tiny import Difference, Means

measures.load_inception = lambda *_, **__: Means().eval()
measures.load_lpips = lambda *_, **__: Difference().eval()
app(standalone_mode=False)
print(jax.process_count(), "processes,", jax.device_count(), "devices")
"""


# test_each_image_counts_once_on_eight_devices has them in one process.
@pytest.mark.slow
def test_two_processes_measure_what_one_device_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also with a file that only one of them finds to be damaged."""
    make_data(tmp_path / "data", count=COUNT, size=20)
    (tmp_path / "stage").mkdir()
    config = write(tmp_path / "stage")
    broken = sorted((tmp_path / "data" / "train").rglob("*.JPEG"))[5]
    broken.write_bytes(broken.read_bytes()[:200])
    np.savez(tmp_path / "samples.npz", images(29, 4), np.zeros(29, np.int32))
    stage1 = tmp_path / "stage" / "stage1"
    given = ["evaluate", str(config), "--data", str(tmp_path / "data"), "--stage1", str(stage1)]
    given += ["--samples", str(tmp_path / "samples.npz"), "-o", str(tmp_path / "two.json")]
    given += ["--write-reference", str(tmp_path / "two.npz")]
    started = start_two("-W", "ignore", "-c", SCRIPT, *given)
    try:
        monkeypatch.setattr(measures, "load_inception", lambda *_, **__: Means().eval())
        monkeypatch.setattr(measures, "load_lpips", lambda *_, **__: Difference().eval())
        wanted = Wanted(stage1, tmp_path / "samples.npz", write=tmp_path / "one.npz")
        with pytest.warns(UserWarning, match=broken.name):
            one = measures.evaluate(
                Given(config, tmp_path / "data"), wanted, Published(), devices=jax.devices()[:1]
            )
    finally:
        outputs = finish(started)
    assert all("2 processes, 8 devices" in output for output in outputs)
    assert all(f"statistics of {COUNT - 1} images" in output for output in outputs)
    found = json.loads((tmp_path / "two.json").read_text())
    assert found == pytest.approx(one, rel=1e-6)
    with np.load(tmp_path / "one.npz") as a, np.load(tmp_path / "two.npz") as b:
        assert a["pool"].shape == (COUNT - 1, a["mu"].size)
        for name in a.files:
            np.testing.assert_allclose(b[name], a[name], rtol=1e-6, atol=1e-9)
