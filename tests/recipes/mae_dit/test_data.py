"""Images come from both layouts alike, and broken files are skipped and counted."""

from pathlib import Path

import numpy as np
import pytest
import torch

from recipes.mae_dit.config import load
from recipes.mae_dit.data import batches, find, pictures, training_batches
from recipes.mae_dit.make_data import make_data
from tpuport.foundation.errors import UsageError


def made(folder: Path, layout: str) -> Path:
    make_data(folder, count=10, size=40, layout=layout)  # type: ignore[arg-type]
    return folder


@pytest.mark.parametrize("layout", ["folder", "tar"])
def test_every_image_comes_once(tmp_path, file, layout):
    given = list(batches(load(file), made(tmp_path / "data", layout), split="train"))
    assert [one["image"].shape for one in given] == [(4, 3, 16, 16)] * 3
    valid = torch.cat([one["valid"] for one in given])
    assert valid.tolist() == [True] * 10 + [False] * 2
    labels = torch.cat([one["label"] for one in given])[valid]
    assert sorted(labels.tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    images = torch.cat([one["image"] for one in given])[valid]
    assert 0 <= images.min() < 0.2 < 0.8 < images.max() <= 1


def test_layouts_have_the_same_images(tmp_path, file):
    found = [
        {
            int(one["image"].sum() * 100): int(one["label"])
            for one in pictures(load(file), made(tmp_path / layout, layout), "train", train=False)  # type: ignore[attr-defined]
        }
        for layout in ("folder", "tar")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["MAE", "DiT", "VAE", "weak", ""])
def test_crops_of_training(tmp_path, file, kind):
    config = load(file, [f"dataset.transforms.type=imagenet{kind}24x24"])
    found = pictures(config, made(tmp_path / "data", "folder"), "train", train=True)
    np.random.seed(0)
    several = torch.stack([found[0]["image"] for _ in range(6)])
    assert several.shape == (6, 3, 24, 24)
    different = len({float(one.sum()) for one in several.flip(-1)})
    flips = len({tuple(one[:, 3, 3].tolist()) for one in several})
    # The images are square: only these two kinds take all of one.
    assert flips == 2 if kind in ("DiT", "") else different > 2


def test_a_broken_file_is_skipped_and_counted(tmp_path, file):
    folder, config = made(tmp_path / "data", "folder"), load(file)
    broken = sorted((folder / "train").rglob("*.JPEG"))[2]
    broken.write_bytes(broken.read_bytes()[:100])
    found = pictures(config, folder, "train", train=True)
    with pytest.warns(UserWarning, match=broken.name):
        row = found[2]
    assert (bool(row["valid"]), int(row["skipped"])) == (True, 1)
    with pytest.warns(UserWarning, match=broken.name):
        given = list(batches(config, folder, split="train"))
    assert sum(int(one["valid"].sum()) for one in given) == 9


def test_batches_of_training(tmp_path, file):
    folder = made(tmp_path / "data", "tar")
    found = training_batches(load(file, ["experiment.accu_step=2"]), folder)
    assert len(found) == 1
    assert next(iter(found))["image"].shape == (8, 3, 16, 16)
    with pytest.raises(UsageError, match="less than one batch"):
        training_batches(load(file, ["experiment.batch_size=11"]), folder)


def test_what_is_damaged_is_named(tmp_path, file):
    folder = made(tmp_path / "data", "tar")
    shard = folder / "train" / "000000.tar"
    shard.write_bytes(b"no tar" * 200)
    with pytest.raises(UsageError, match=r"000000\.tar is damaged"):
        find(folder / "train")
    with pytest.raises(UsageError, match="neither tar shards nor folders"):
        find(tmp_path / "none")
    with pytest.raises(UsageError, match="imagenetMAE256x256"):
        pictures(load(file, ["dataset.transforms.type=LSUN"]), folder, "val", train=True)
    with pytest.raises(UsageError, match="--data"):
        pictures(load(file), None, "val", train=True)
